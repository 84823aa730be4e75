"""The painter over a language model's keys and values: as a pipeline, in the engine's shared steps, and over two processes."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from transformers import AutoModelForCausalLM, AutoTokenizer

from omni.outputs import ImageOutput
from proto.deploy import ArEngineSpec, ArStage, DiffusionStage, Kind, LimitsSpec, Link, ModelSpec
from proto.errors import InvalidRequest, StageFailed
from proto.ids import Epoch, LeaseId, RequestId, StageName
from proto.messages import Payload
from proto.params import DiffusionParams, Json
from proto.torch_tensors import to_wire
from stages.diffusion.engine import DiffusionEngine
from stages.diffusion.painter.kv import Thinker, unrotated
from stages.diffusion.painter.pipeline import PainterPipeline
from stages.engine import Failed, Finished, Job, LoadContext, PulledPayload
from tests.models.tiny_ar import build_tiny_llama
from tests.models.tiny_kv_painter import LAYERS, SIDE, build_tiny_kv_painter
from tests.pipeline.batching_cases import drive, ends, forwards, latents_of, load
from tests.pipeline.harness import ENV, Running, deploy

STEPS = 5
PROMPTS = ("a red boat", "a cat that sits on a chair and looks at the sea", "the sun", "漢字 and 🎨")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_kv_painter(tmp_path_factory.mktemp("models") / "painter")


@pytest.fixture(scope="module")
def thinker(llama: Path) -> Thinker:
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    return Thinker(model, AutoTokenizer.from_pretrained(llama), LAYERS)


@pytest.fixture(scope="module")
def pipe(folder: Path) -> PainterPipeline:
    pipe = PainterPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def engine(folder: Path) -> DiffusionEngine:
    return load(folder)


def noise(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def kv_payload(cached: Mapping[str, torch.Tensor], meta: Mapping[str, Json] | None = None) -> PulledPayload:
    described = Payload(
        lease=LeaseId("l1"),
        source=StageName("thinker"),
        replica=0,
        epoch=Epoch(1),
        kind=Kind.KV.value,
        items=(),
        meta=meta or {"position_offset": 0},
    )
    return PulledPayload(described, {name: to_wire(tensor) for name, tensor in cached.items()})


def job(thinker: Thinker, number: int, *, guidance: float = 3.0, **more: Json) -> Job:
    payloads = {"kv": kv_payload(thinker.cached(PROMPTS[number])), "negative_kv": kv_payload(thinker.cached(""))}
    params = DiffusionParams(**{"seed": number, "num_inference_steps": STEPS, "guidance_scale": guidance, **more})
    return Job(RequestId(f"r{number}"), {}, params, emit=("image", "latents"), payloads=payloads)


# --- the pipeline -----------------------------------------------------------------------------------------------------


def test_a_key_without_its_position_is_the_same_wherever_the_word_stands(thinker: Thinker, llama: Path) -> None:
    """In the first layer, where a word has not yet seen the others."""
    short, long = thinker.cached("a boat"), thinker.cached("The sun goes down, a boat")
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    theta = model.config.rope_parameters["rope_theta"]
    ends_alike = -6
    one, other = (unrotated(cached["k.0"], theta)[:, :, ends_alike:] for cached in (short, long))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(short["k.0"][:, :, ends_alike:], long["k.0"][:, :, ends_alike:], atol=1e-2)


def test_captions_read_in_one_batch_are_what_a_serving_stage_caches(thinker: Thinker) -> None:
    together = thinker.read(PROMPTS)
    for n, prompt in enumerate(PROMPTS):
        cached = thinker.cached(prompt)
        keys = torch.stack([unrotated(cached[f"k.{layer}"], thinker.theta) for layer in LAYERS], 1)
        count = int(together.mask[n].sum())
        assert count == thinker.tokens(prompt)
        torch.testing.assert_close(
            together.keys[n, :, :, :count], keys[0, :, :, thinker.prefix_tokens :], rtol=1e-4, atol=1e-4
        )


def test_a_saved_folder_loads_again_and_draws_the_same(pipe: PainterPipeline, thinker: Thinker, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path / "again")
    again = PainterPipeline.from_pretrained(tmp_path / "again")
    assert isinstance(again, DiffusionPipeline)
    cached = thinker.cached(PROMPTS[0])
    first, second = (
        one(cached, num_inference_steps=3, generator=noise(4), output_type="np").images for one in (pipe, again)
    )
    assert first.shape == (1, SIDE, SIDE, 3)
    assert np.array_equal(first, second)


def test_another_prompt_another_seed_and_guidance_each_give_another_picture(
    pipe: PainterPipeline, thinker: Thinker
) -> None:
    one, two, none = thinker.cached("a red boat"), thinker.cached("a blue boat"), thinker.cached("")

    def drawn(cached: Mapping[str, torch.Tensor], seed: int = 0, **more: Json) -> bytes:
        return pipe(cached, num_inference_steps=3, generator=noise(seed), **more).images[0].tobytes()

    usual = drawn(one)
    assert drawn(one) == usual
    assert len({usual, drawn(two), drawn(one, 1), drawn(one, negative_kv=none, guidance_scale=4.0)}) == 4
    assert drawn(one, negative_kv=none, guidance_scale=1.0) == usual


def test_prompts_of_any_length_in_one_guided_batch_change_nothing(pipe: PainterPipeline, thinker: Thinker) -> None:
    """The shorter text of a pair is padded, and its padding is not seen."""
    long, short = thinker.cached(PROMPTS[1]), thinker.cached("")
    pair = pipe(long, short, guidance_scale=1.0001, num_inference_steps=1, generator=noise(0), output_type="latent")
    alone = pipe(long, num_inference_steps=1, generator=noise(0), output_type="latent")
    torch.testing.assert_close(pair.images, alone.images, rtol=1e-3, atol=1e-3)


# --- the engine -------------------------------------------------------------------------------------------------------


def test_prompts_of_different_lengths_share_steps_and_draw_what_each_draws_alone(
    engine: DiffusionEngine, pipe: PainterPipeline, thinker: Thinker
) -> None:
    before = forwards(engine)
    events = ends(drive(engine, {n: job(thinker, n, guidance=(3.0, 1.0, 5.0, 3.0)[n]) for n in range(4)}))
    assert forwards(engine) - before <= STEPS + 4  # all four together, but for those that joined a step later
    for n in range(4):
        alone = pipe(
            thinker.cached(PROMPTS[n]),
            thinker.cached(""),
            guidance_scale=(3.0, 1.0, 5.0, 3.0)[n],
            num_inference_steps=STEPS,
            generator=noise(n),
            output_type="latent",
        ).images
        torch.testing.assert_close(latents_of(events[f"r{n}"]), alone, rtol=1e-4, atol=1e-4)


def test_several_pictures_of_one_prompt_have_seeds_of_their_own(engine: DiffusionEngine, thinker: Thinker) -> None:
    done = ends(drive(engine, {0: job(thinker, 0, num_images=2)}))["r0"]
    alone = ends(drive(engine, {0: job(thinker, 0, seed=1)}))["r0"]
    torch.testing.assert_close(latents_of(done)[1:], latents_of(alone), rtol=1e-4, atol=1e-4)


def test_a_request_without_kv_or_of_another_size_is_refused_before_it_runs(
    engine: DiffusionEngine, thinker: Thinker
) -> None:
    with pytest.raises(InvalidRequest, match="link its input kv"):
        engine.submit(Job(RequestId("r"), {}, DiffusionParams(), emit=("image",)))
    with pytest.raises(InvalidRequest, match=f"multiple of {SIDE}"):
        engine.submit(job(thinker, 0, width=SIDE + 1, height=SIDE))
    with pytest.raises(InvalidRequest, match=f"draws {SIDE} x {SIDE} pixels only, not {2 * SIDE} x {SIDE}"):
        engine.submit(job(thinker, 0, width=2 * SIDE, height=SIDE))


def test_kv_of_other_layers_names_the_setting_that_mends_it(engine: DiffusionEngine, thinker: Thinker) -> None:
    cached = {name: tensor for name, tensor in thinker.cached("a boat").items() if not name.endswith(".1")}
    wrong = Job(RequestId("r"), {}, DiffusionParams(), emit=("image",), payloads={"kv": kv_payload(cached)})
    failed = ends(drive(engine, {0: wrong}))["r"]
    assert isinstance(failed, Failed)
    assert failed.error.code == StageFailed("").info.code
    assert "set stages.thinker.engine.kv_layers to [0, 1]" in failed.error.message


def test_a_bad_kv_fails_its_own_request_only(engine: DiffusionEngine, thinker: Thinker) -> None:
    cached = {name: tensor[..., :8] for name, tensor in thinker.cached("a boat").items()}
    bad = Job(RequestId("bad"), {}, DiffusionParams(), emit=("image",), payloads={"kv": kv_payload(cached)})
    events = ends(drive(engine, {0: bad, 1: job(thinker, 1)}))
    assert isinstance(events["bad"], Failed)
    assert isinstance(events["r1"], Finished)


# --- two processes ----------------------------------------------------------------------------------------------------


def test_kv_and_its_companion_reach_the_painter_in_another_process(
    llama: Path, folder: Path, pipe: PainterPipeline, thinker: Thinker
) -> None:
    stages = {
        "thinker": ArStage(
            model=ModelSpec(path=str(llama), dtype="float32"),
            engine=ArEngineSpec(kv_layers=LAYERS),
            output=Kind.TEXT,
            env=ENV,
        ),
        "painter": DiffusionStage(
            model=ModelSpec(path=str(folder)),
            inputs={"kv": Link(source="thinker.kv", companion="negative_prompt")},
            defaults=DiffusionParams(num_inference_steps=STEPS, guidance_scale=3.0),
            output=Kind.IMAGE,
            env=ENV,
        ),
    }
    with Running(deploy(stages)) as running:
        flights = {
            n: running.launch(prompt, outputs=["painter"], stages={"painter": {"seed": n, **_negative(n)}})
            for n, prompt in enumerate(PROMPTS)
        }
        for n, flight in flights.items():
            drawn = flight.result().outputs["painter"]
            assert isinstance(drawn, ImageOutput)
            negative = thinker.cached(str(_negative(n).get("negative_prompt", "")))
            alone = pipe(thinker.cached(PROMPTS[n]), negative, num_inference_steps=STEPS, generator=noise(n)).images[0]
            off = np.subtract(np.asarray(drawn.images[0]), np.asarray(alone), dtype=int)
            assert abs(off).max() <= 1
        running.until_idle()


def _negative(number: int) -> Mapping[str, Json]:
    return {"negative_prompt": "orange and red"} if number % 2 else {}


def test_a_start_measures_memory_with_made_up_keys_and_values(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    notes: list[str] = []
    stage = DiffusionStage(model=ModelSpec(path=str(folder)))
    context = LoadContext(StageName("painter"), stage, LimitsSpec(), "cpu", (), lambda note, done: notes.append(note))
    DiffusionEngine().load(context)
    assert any(note.startswith("memory:") for note in notes), notes
    assert "could not be found out" not in caplog.text
