"""The diffusion engine, driven in this process: it draws what the stock pipeline draws, and stops where it promises to."""

import functools
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, EulerDiscreteScheduler, SchedulerMixin, StableDiffusionImg2ImgPipeline
from numpy.typing import NDArray
from PIL import Image

from proto.deploy import DiffusionEngineSpec, DiffusionStage, Kind, LimitsSpec, ModelSpec
from proto.errors import ErrorCode, InvalidRequest, StartError
from proto.ids import Epoch, LeaseId, RequestId, StageName
from proto.messages import Audio, Chat, ChatMessage, Images, Payload, Progress, Started, Tensor, Text, Value, Video
from proto.numpy_tensors import from_wire
from proto.numpy_tensors import to_wire as numpy_to_wire
from proto.params import DiffusionParams, Json, SamplingParams
from proto.tensors import WireTensor
from proto.torch_tensors import from_wire as torch_from_wire
from proto.torch_tensors import to_wire
from stages.diffusion.engine import DiffusionEngine
from stages.engine import Emit, Event, Failed, Finished, Job, LoadContext, PulledPayload
from tests.models import tiny_diffusion
from tests.models.tiny_diffusion_families import build_tiny_stable_audio

PROMPT: Mapping[str, Value] = {"prompt": Text(text="a red fox")}
BUILDERS = {
    "sd": tiny_diffusion.build_tiny_sd,
    "sd3": tiny_diffusion.build_tiny_sd3,
    "flux": tiny_diffusion.build_tiny_flux,
    "pixart": tiny_diffusion.build_tiny_pixart,
    "wan": tiny_diffusion.build_tiny_wan,
    "dance": tiny_diffusion.build_tiny_dance,
    "ddim": tiny_diffusion.build_tiny_ddim,
    "stable_audio": build_tiny_stable_audio,
}
Engines = Callable[..., DiffusionEngine]
Stock = Callable[..., DiffusionPipeline]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny pipeline, built once."""
    root = tmp_path_factory.mktemp("tiny_diffusion")
    return lambda name: folder if (folder := root / name).exists() else BUILDERS[name](folder)


@pytest.fixture(scope="session")
def stock(checkpoint: Callable[[str], Path]) -> Stock:
    """The same pipeline as the library gives it."""

    @functools.cache
    def load_stock(name: str, pipeline_class: str = "DiffusionPipeline") -> DiffusionPipeline:
        pipe = getattr(diffusers, pipeline_class).from_pretrained(checkpoint(name), local_files_only=True)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return load_stock


@pytest.fixture(scope="session")
def load(checkpoint: Callable[[str], Path]) -> Engines:
    """Loads a new engine on a tiny pipeline."""

    def load_new(name: str, pipeline_class: str | None = None) -> DiffusionEngine:
        engine = DiffusionEngine()
        engine.load(context(ModelSpec(path=str(checkpoint(name)), pipeline_class=pipeline_class)))
        return engine

    return load_new


@pytest.fixture(scope="session")
def shared(load: Engines) -> Iterator[Engines]:
    """Engines that the tests use one after the other."""
    once = functools.cache(load)
    yield once
    assert not fiber_threads()


@pytest.fixture
def engines(shared: Engines) -> Iterator[Engines]:
    """Engines with nothing to do, which is how the test must leave them."""
    used: list[DiffusionEngine] = []

    def take(*which: str) -> DiffusionEngine:
        used.append(shared(*which))
        assert not used[-1].has_work
        return used[-1]

    yield take
    assert not any(engine.has_work for engine in used)
    assert not fiber_threads()


def context(model: ModelSpec, report: Callable[[str, float | None], None] = lambda note, done: None) -> LoadContext:
    return LoadContext(
        StageName("painter"),
        DiffusionStage(model=model, engine=DiffusionEngineSpec(memory_profile=False)),
        LimitsSpec(),
        "cpu",
        (),
        report,
    )


def job(
    request: str = "r1", inputs: Mapping[str, Value] = PROMPT, emit: tuple[str, ...] = ("image",), **more: Json
) -> Job:
    """A job; words that are not the job's own are params."""
    own = {name: more.pop(name) for name in ("publish", "tensors", "payloads") if name in more}
    return Job(RequestId(request), inputs, DiffusionParams(**more), emit=emit, **own)


def drive(engine: DiffusionEngine) -> list[Event]:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return events


def run(engine: DiffusionEngine, one: Job) -> Finished:
    """The end of a single job, which must succeed."""
    engine.submit(one)
    end = drive(engine)[-1]
    assert isinstance(end, Finished), end
    return end


def pixels(end: Finished) -> NDArray[np.generic]:
    return from_wire(end.tensors[0])


def generators(*seeds: int) -> Json:
    made = [torch.Generator().manual_seed(seed) for seed in seeds]
    return made[0] if len(made) == 1 else made


def stock_pixels(pipe: DiffusionPipeline, **arguments: Json) -> NDArray[np.uint8]:
    return np.stack([np.asarray(image) for image in pipe(**arguments).images])


def fiber_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("paint-")]


def payload(kind: Kind, **tensors: torch.Tensor) -> PulledPayload:
    descriptor = Payload(
        lease=LeaseId(1), source=StageName("thinker"), replica=0, epoch=Epoch(1), kind=kind.value, items=()
    )
    return PulledPayload(descriptor, {name: to_wire(tensor) for name, tensor in tensors.items()})


# --- the same as the stock pipeline -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fixed"),
    [("sd", {}), ("sd3", {}), ("flux", {}), ("pixart", {"use_resolution_binning": False})],
)
def test_image_is_the_stock_pipelines_to_the_byte(
    name: str, fixed: dict[str, Json], engines: Engines, stock: Stock
) -> None:
    asked = {"width": 32, "height": 48, "num_inference_steps": 4, "guidance_scale": 3.0, "negative_prompt": "grey"}
    end = run(engines(name), job(seed=7, **asked))
    expected = stock_pixels(stock(name), prompt="a red fox", generator=generators(7), **asked, **fixed)
    assert end.outputs == {"image": Images(tensor=0, seeds=(7,))}
    assert expected.shape == (1, 48, 32, 3)
    np.testing.assert_array_equal(pixels(end), expected)


def test_video_is_the_stock_pipelines_to_the_byte(engines: Engines, stock: Stock) -> None:
    asked = {"width": 32, "height": 16, "num_inference_steps": 2}
    end = run(engines("wan"), job(emit=("video",), seed=1, extra={"num_frames": 5}, **asked))
    frames = stock("wan")(prompt="a red fox", num_frames=5, generator=generators(1), output_type="pil", **asked).frames
    expected = np.stack([[np.asarray(frame) for frame in video] for video in frames])
    assert end.outputs == {"video": Video(tensor=0, fps=16.0, seeds=(1,))}
    np.testing.assert_array_equal(pixels(end), expected)


def test_sound_is_the_stock_pipelines(engines: Engines, stock: Stock) -> None:
    end = run(engines("dance"), job(inputs={}, emit=("audio",), publish=("audio",), seed=1, num_inference_steps=3))
    expected = stock("dance")(generator=generators(1), num_inference_steps=3).audios
    assert end.outputs == {"audio": Audio(tensor=0, sample_rate=16000, seeds=(1,))}
    assert expected.shape == (1, 2, 1024)
    np.testing.assert_array_equal(pixels(end), expected)
    assert end.payloads["audio"].kind is Kind.AUDIO
    assert end.payloads["audio"].meta == {"sample_rate": 16000, "seeds": [1]}


def test_sound_too_short_for_a_sample_is_the_callers_fault(tmp_path: Path) -> None:
    build_tiny_stable_audio(tmp_path)
    engine = DiffusionEngine()
    engine.load(context(ModelSpec(path=str(tmp_path))))
    asked = {"num_inference_steps": 1, "extra": {"audio_end_in_s": 0.01}}
    engine.submit(job(emit=("audio",), seed=1, **asked))
    end = drive(engine)[-1]
    engine.close()
    assert isinstance(end, Failed)
    assert end.error.code is ErrorCode.INVALID_REQUEST
    assert "no samples" in end.error.message
    assert end.error.field == "seconds"


def test_pipeline_without_prompt_or_step_callback_draws_and_steps(engines: Engines, stock: Stock) -> None:
    engine = engines("ddim")
    engine.submit(job(inputs={}, seed=3, num_inference_steps=5, num_images=2))
    events = drive(engine)
    assert [e.part for e in events[1:-1] if isinstance(e, Emit)] == [Progress(step=k, total=5) for k in range(1, 6)]
    expected = stock_pixels(stock("ddim"), batch_size=2, generator=generators(3, 4), num_inference_steps=5)
    assert isinstance(events[-1], Finished)
    np.testing.assert_array_equal(pixels(events[-1]), expected)


def test_image_to_image_through_another_pipeline_class(engines: Engines, stock: Stock) -> None:
    start = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 4), dtype=np.uint8)
    engine = engines("sd", "StableDiffusionImg2ImgPipeline")
    engine.submit(
        job(
            inputs={**PROMPT, "image": Images(tensor=0)},
            tensors=[numpy_to_wire(start)],
            seed=2,
            strength=0.5,
            num_inference_steps=6,
        )
    )
    events = drive(engine)
    assert [e.part for e in events[1:-1] if isinstance(e, Emit)] == [Progress(step=k, total=3) for k in (1, 2, 3)]
    pipe = stock("sd", "StableDiffusionImg2ImgPipeline")
    assert isinstance(pipe, StableDiffusionImg2ImgPipeline)
    image = Image.fromarray(start[0]).convert("RGB")
    expected = stock_pixels(
        pipe, prompt="a red fox", image=image, strength=0.5, num_inference_steps=6, generator=generators(2)
    )
    assert isinstance(events[-1], Finished)
    np.testing.assert_array_equal(pixels(events[-1]), expected)


def test_embeddings_of_another_stage_take_the_prompts_place(engines: Engines, stock: Stock) -> None:
    hidden = torch.randn((5, 32), generator=torch.Generator().manual_seed(4))
    negative = torch.randn((3, 32), generator=torch.Generator().manual_seed(5))
    payloads = {
        "prompt_embeds": payload(Kind.HIDDEN, hidden=hidden),
        "negative_prompt_embeds": payload(Kind.HIDDEN, hidden=negative),
    }
    end = run(engines("pixart"), job(inputs={}, payloads=payloads, seed=1, num_inference_steps=2))
    expected = stock_pixels(
        stock("pixart"),
        prompt_embeds=hidden[None],
        prompt_attention_mask=torch.ones(1, 5, dtype=torch.int64),
        negative_prompt=None,
        negative_prompt_embeds=torch.nn.functional.pad(negative, (0, 0, 0, 2))[None],
        negative_prompt_attention_mask=torch.tensor([[1, 1, 1, 0, 0]]),
        generator=generators(1),
        num_inference_steps=2,
        use_resolution_binning=False,
    )
    np.testing.assert_array_equal(pixels(end), expected)


def test_further_payload_tensors_are_arguments_by_their_names(engines: Engines, stock: Stock) -> None:
    torch.manual_seed(6)
    embeds, pooled = torch.randn(7, 32), torch.randn(32)
    given = payload(Kind.HIDDEN, prompt_embeds=embeds, pooled_prompt_embeds=pooled)
    end = run(
        engines("flux"),
        job(inputs={}, payloads={"prompt_embeds": given}, seed=1, num_inference_steps=2, width=32, height=32),
    )
    expected = stock_pixels(
        stock("flux"),
        prompt_embeds=embeds[None],
        pooled_prompt_embeds=pooled[None],
        generator=generators(1),
        num_inference_steps=2,
        width=32,
        height=32,
    )
    np.testing.assert_array_equal(pixels(end), expected)


def test_last_words_of_a_chat_are_the_prompt(engines: Engines) -> None:
    engine = engines("sd")
    chat = Chat(
        messages=(ChatMessage("user", "a cat"), ChatMessage("assistant", "Yes?"), ChatMessage("user", "a red fox"))
    )
    said = run(engine, job(inputs={"prompt": chat}, seed=1, num_inference_steps=2))
    np.testing.assert_array_equal(pixels(said), pixels(run(engine, job(seed=1, num_inference_steps=2))))


# --- parameters -------------------------------------------------------------------------------------------------------


def test_image_k_of_n_can_be_made_again_alone(engines: Engines) -> None:
    engine = engines("sd")
    together = run(engine, job(seed=40, num_images=3, num_inference_steps=4))
    assert together.outputs["image"] == Images(tensor=0, seeds=(40, 41, 42))
    for k in range(3):
        alone = run(engine, job(seed=40 + k, num_inference_steps=4))
        off = np.abs(pixels(together)[k].astype(int) - pixels(alone)[0].astype(int))
        assert off.max() <= 1  # float32 kernels of another batch size may round the other way


def test_chosen_seed_is_told_and_makes_the_image_again(engines: Engines) -> None:
    engine = engines("sd")
    first = run(engine, job(num_inference_steps=2))
    told = first.outputs["image"]
    assert isinstance(told, Images)
    assert len(told.seeds) == 1
    np.testing.assert_array_equal(pixels(first), pixels(run(engine, job(seed=told.seeds[0], num_inference_steps=2))))


def test_other_prompts_seeds_and_a_guidance_of_zero_give_other_images(engines: Engines, stock: Stock) -> None:
    engine = engines("sd")
    seen = [
        pixels(run(engine, job(num_inference_steps=8, inputs={"prompt": Text(text=prompt)}, **params)))
        for prompt, params in [
            ("a red fox", {"seed": 1}),
            ("a blue whale", {"seed": 1}),
            ("a red fox", {"seed": 2}),
            ("a red fox", {"seed": 1, "guidance_scale": 0.0}),
        ]
    ]
    assert len({image.tobytes() for image in seen}) == 4
    expected = stock_pixels(
        stock("sd"), prompt="a red fox", generator=generators(1), guidance_scale=0.0, num_inference_steps=8
    )
    np.testing.assert_array_equal(seen[3], expected)


@pytest.mark.parametrize(
    ("name", "one", "field"),
    [
        ("sd", job(strength=0.5), "strength"),
        ("sd", job(width=63), "width"),
        ("sd", job(height=513), "height"),
        ("sd3", job(width=34), "width"),
        ("ddim", job(inputs={}, guidance_scale=0.0), "guidance_scale"),
        ("ddim", job(inputs={}, width=16), "width"),
        ("ddim", job(), "prompt"),
        ("sd", job(extra={"guidance_rescal": 0.5}), "extra.guidance_rescal"),
        ("sd", job(extra={"output_type": "pt"}), "extra.output_type"),
        ("sd", job(extra={"prompt_embeds": [1.0]}), "extra.prompt_embeds"),
        ("sd", job(inputs={}), "prompt"),
        ("sd", job(inputs={"prompt": Images(tensor=0)}), "prompt"),
        ("sd", job(emit=("audio",)), "outputs"),
        ("sd", job(seed=2**63 - 1, num_images=2), "seed"),
        ("sd", Job(RequestId("r"), PROMPT, SamplingParams(), emit=("image",)), "params"),
    ],
)  # fmt: skip
def test_what_the_pipeline_cannot_do_is_refused_before_work(name: str, one: Job, field: str, engines: Engines) -> None:
    engine = engines(name)
    with pytest.raises(InvalidRequest, match="painter") as refused:
        engine.submit(one)
    assert refused.value.info.field == field
    assert not engine.has_work


def test_image_pipeline_refuses_to_start_without_its_image(engines: Engines) -> None:
    with pytest.raises(InvalidRequest) as refused:
        engines("sd", "StableDiffusionImg2ImgPipeline").submit(job())
    assert refused.value.info.field == "image"


def test_what_the_pipelines_own_checks_refuse_is_the_callers_fault(engines: Engines) -> None:
    engine = engines("sd")
    engine.submit(job(extra={"timesteps": [9, 5], "sigmas": [1.0]}))
    end = drive(engine)[-1]
    assert isinstance(end, Failed)
    assert end.error.code is ErrorCode.INVALID_REQUEST


# --- outputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_latents_alone_and_beside_the_image(name: str, engines: Engines, stock: Stock) -> None:
    asked = {"width": 32, "height": 32, "num_inference_steps": 3}
    engine = engines(name)
    latents = stock(name)(prompt="a red fox", generator=generators(5), output_type="latent", **asked).images
    alone = run(engine, job(emit=("latents",), publish=("latents",), seed=5, **asked))
    assert alone.outputs == {"latents": Tensor(tensor=0)}
    torch.testing.assert_close(torch_from_wire(alone.tensors[0]), latents, rtol=0, atol=0)
    assert alone.payloads["latents"].kind is Kind.LATENTS
    torch.testing.assert_close(torch_from_wire(alone.payloads["latents"].tensors["latents"]), latents, rtol=0, atol=0)
    both = run(engine, job(publish=("latents", "image"), seed=5, **asked))
    torch.testing.assert_close(torch_from_wire(both.payloads["latents"].tensors["latents"]), latents, rtol=0, atol=0)
    np.testing.assert_array_equal(from_wire(both.payloads["image"].tensors["image"]), pixels(both))


def test_latents_in_are_where_the_drawing_starts(engines: Engines, stock: Stock) -> None:
    latents = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(8))
    before = latents.clone()
    end = run(
        engines("sd"),
        job(inputs={**PROMPT, "latents": Tensor(tensor=0)}, tensors=[to_wire(latents)], num_inference_steps=3, seed=1),
    )
    expected = stock_pixels(
        stock("sd"), prompt="a red fox", latents=before.clone(), num_inference_steps=3, generator=generators(1)
    )
    np.testing.assert_array_equal(pixels(end), expected)
    torch.testing.assert_close(latents, before, rtol=0, atol=0)  # what arrived is not written to


def test_time_is_told_by_part(engines: Engines) -> None:
    detail = run(engines("sd"), job(num_inference_steps=2)).detail
    assert all(detail[part] > 0 for part in ("queue", "encode", "denoise", "decode"))
    assert detail["step"] == pytest.approx(detail["denoise"] / 2)
    assert detail["total"] > detail["queue"] + detail["encode"] + detail["denoise"] + detail["decode"] - 1e-6
    assert detail["peak_memory_bytes"] >= 0
    counts = {name: detail[name] for name in ("steps", "forwards", "rows", "rows_shared")}
    assert counts == {"steps": 2, "forwards": 2, "rows": 4, "rows_shared": 0}  # guidance takes two rows a step


# --- steps, aborts, faults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd", "sd3", "pixart"])
def test_each_engine_step_makes_at_most_one_call(name: str, engines: Engines) -> None:
    engine = engines(name)
    engine.submit(job(num_inference_steps=4))
    before = calls_made(engine)
    first = engine.step()
    assert isinstance(first[0], Emit)
    assert isinstance(first[0].part, Started)
    assert calls_made(engine) == before
    events: list[Event] = []
    while engine.has_work:
        made = calls_made(engine)
        new = engine.step()
        assert sum(calls_made(engine).values()) == sum(made.values()) + 1
        done = calls_made(engine)["denoise"] - before["denoise"]
        assert [event.part for event in new if isinstance(event, Emit)] in ([], [Progress(step=done, total=4)])
        events += new
    assert [event.part for event in events[:-1] if isinstance(event, Emit)] == [
        Progress(step=k, total=4) for k in range(1, 5)
    ]
    assert isinstance(events[-1], Finished)
    assert not fiber_threads()


def progress(events: list[Event]) -> int:
    """The last step that the events tell of; 0 if none."""
    return max((e.part.step for e in events if isinstance(e, Emit) and isinstance(e.part, Progress)), default=0)


def calls_made(engine: DiffusionEngine) -> dict[str, int]:
    stats = engine.call("stats", {})
    return {phase: stats[f"{phase}_calls"] for phase in ("encode", "denoise", "decode")}


@pytest.mark.parametrize("name", ["sd", "pixart"])
def test_aborted_request_runs_no_further_step_and_leaves_no_trace(name: str, engines: Engines) -> None:
    engine = engines(name)
    alone = pixels(run(engine, job(seed=5, num_inference_steps=4)))
    engine.submit(job("left", num_inference_steps=50))
    while progress(engine.step()) != 2:
        pass
    engine.submit(job("next", seed=5, num_inference_steps=4))
    before = engine.call("stats", {})["forwards"]
    engine.abort(RequestId("left"))
    assert not fiber_threads()
    events = drive(engine)
    assert {event.request for event in events} == {"next"}
    assert engine.call("stats", {})["forwards"] == before + 4
    assert isinstance(events[-1], Finished)
    np.testing.assert_array_equal(pixels(events[-1]), alone)


def test_waiting_requests_can_be_aborted_and_unknown_ones_do_not_matter(engines: Engines) -> None:
    engine = engines("sd")
    for name in ("a", "b", "c"):
        engine.submit(job(name, num_inference_steps=1))
    engine.abort(RequestId("b"))
    engine.abort(RequestId("never heard of"))
    assert engine.stats().queued == 2
    ends = {event.request for event in drive(engine) if isinstance(event, Finished)}
    assert ends == {"a", "c"}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def thread_counts(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> set[int]:
    """Filled with how many CPU threads each call of the method may use."""
    counts: set[int] = set()
    original = getattr(owner, method)

    @functools.wraps(original)
    def counting(*args: Json, **kwargs: Json) -> Json:
        counts.add(torch.get_num_threads())
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, counting)
    return counts


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("name", "glue"), [("sd3", 1), ("stable_audio", 2)])
def test_only_the_engine_computes_with_all_threads_where_all_that_is_heavy_is_its(
    name: str, glue: int, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stable Audio's projection model is no site, so its fibers keep all threads."""
    engine = engines(name)
    pipe = engine._painter.pipe
    counts = {
        "model": thread_counts(monkeypatch, torch.nn.Linear, "forward"),
        "glue": thread_counts(monkeypatch, type(pipe.scheduler), "step"),
    }
    run(engine, job(emit=("audio" if name == "stable_audio" else "image",), num_inference_steps=2))
    assert counts == {"model": {2}, "glue": {glue}}


@pytest.mark.usefixtures("two_threads")
def test_an_engine_in_a_thread_of_its_own_keeps_its_threads_from_request_to_request(
    load: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = thread_counts(monkeypatch, torch.nn.Linear, "forward")

    def serve() -> None:
        engine = load("sd3")
        counts.clear()
        for _ in range(2):
            run(engine, job(num_inference_steps=1))
        engine.close()

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert counts == {2}


def test_request_that_raises_in_the_middle_fails_alone(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines("sd")
    alone = pixels(run(engine, job(seed=5, num_inference_steps=4)))
    step = EulerDiscreteScheduler.step

    def step_or_raise(self: EulerDiscreteScheduler, *args: Json, **kwargs: Json) -> Json:
        if len(self.timesteps) == 6 and self.step_index == 2:
            raise ArithmeticError("sigma is lost")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(EulerDiscreteScheduler, "step", step_or_raise)
    engine.submit(job("bad", num_inference_steps=6))
    engine.submit(job("good", seed=5, num_inference_steps=4))
    events = drive(engine)
    bad = [event for event in events if event.request == "bad"]
    assert isinstance(bad[-1], Failed)
    assert bad[-1].error.code is ErrorCode.STAGE_FAILED
    assert bad[-1].error.stage == "painter"
    assert bad[-1].error.message == "stage painter: ArithmeticError: sigma is lost"
    assert sum(isinstance(event, Failed | Finished) for event in bad) == 1
    assert isinstance(events[-1], Finished)
    np.testing.assert_array_equal(pixels(events[-1]), alone)


def test_nothing_of_a_request_stays_when_it_is_over(load: Engines) -> None:
    engine = load("pixart")
    gc.collect()
    gc.disable()  # what goes must go by itself: collections are rare, and tensors large
    try:
        before = count_schedulers()
        run(engine, job("done", num_inference_steps=2))
        engine.submit(job("left", num_inference_steps=9))
        while progress(engine.step()) != 2:
            pass
        assert count_schedulers() == before + 1
        engine.submit(job("failed", tensors=[], inputs={**PROMPT, "latents": Tensor(tensor=0)}))
        assert isinstance(engine.step()[-1], Failed)
        engine.abort(RequestId("left"))
        assert count_schedulers() == before
    finally:
        gc.enable()
    engine.close()


def count_schedulers() -> int:
    return sum(isinstance(one, SchedulerMixin) for one in gc.get_objects())


def test_closing_ends_the_request_at_work(load: Engines) -> None:
    engine = load("sd")
    engine.submit(job(num_inference_steps=50))
    engine.step()
    engine.step()
    assert fiber_threads()
    engine.close()
    assert not fiber_threads()
    assert not engine.has_work


# --- loading and calls ------------------------------------------------------------------------------------------------


def test_stage_info_says_what_the_pipeline_takes(checkpoint: Callable[[str], Path]) -> None:
    notes: list[tuple[str, float | None]] = []
    engine = DiffusionEngine()
    spec = ModelSpec(path=str(checkpoint("sd")), dtype="bfloat16")
    info = engine.load(context(spec, lambda note, done: notes.append((note, done))))
    assert (info.model, info.dtype, info.device) == ("StableDiffusionPipeline", "bfloat16", "cpu")
    assert (info.default_width, info.default_height, info.default_steps, info.size_multiple) == (64, 64, 50, 8)
    assert info.outputs == ("image", "latents")
    assert {"prompt", "negative_prompt", "latents", "prompt_embeds"} <= set(info.inputs)
    assert "strength" not in (info.params or ())
    assert "guidance_rescale" in info.accepts
    assert "generator" not in info.accepts
    assert [done for _, done in notes] == sorted(done for _, done in notes if done is not None)
    assert any("unet" in note for note, _ in notes)
    assert engine.call("info", {})["model"] == "StableDiffusionPipeline"
    engine.close()


@pytest.mark.parametrize(("name", "multiple"), [("sd3", 4), ("flux", 4), ("pixart", 8), ("wan", 16)])
def test_size_multiple_is_what_the_pipeline_accepts(name: str, multiple: int, engines: Engines) -> None:
    engine = engines(name)
    output = engine.call("info", {})["outputs"][0]
    assert engine.call("info", {})["size_multiple"] == multiple
    side = 32 + multiple
    extra = {"num_frames": 1} if name == "wan" else None
    end = run(engine, job(emit=(output,), width=side, height=32, num_inference_steps=1, extra=extra))
    assert pixels(end).shape[-3:] == (32, side, 3)


def test_unknown_call_lists_the_methods(engines: Engines) -> None:
    with pytest.raises(InvalidRequest, match=r"'dream'; methods: info, stats, .*clear_cache"):
        engines("sd").call("dream", {})


def test_folder_that_cannot_be_loaded_says_why(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(StartError, match=r"stage painter: .*no model_index\.json"):
        DiffusionEngine().load(context(ModelSpec(path=str(tmp_path))))
    with pytest.raises(StartError, match=r"'NoSuchPipeline'.*no pipeline of diffusers"):
        DiffusionEngine().load(context(ModelSpec(path=str(checkpoint("sd")), pipeline_class="NoSuchPipeline")))
    with pytest.raises(StartError, match="stage painter: FluxPipeline cannot be loaded"):
        DiffusionEngine().load(context(ModelSpec(path=str(checkpoint("sd")), pipeline_class="FluxPipeline")))
    (tmp_path / "model_index.json").write_text('{"_class_name": ["pipeline", "Mine"]}')
    (tmp_path / "pipeline.py").write_text("raise SystemExit('this code must not run')")
    with pytest.raises(StartError, match="names its own pipeline code"):
        DiffusionEngine().load(context(ModelSpec(path=str(tmp_path))))


def test_damaged_picture_is_refused_by_field(engines: Engines) -> None:
    engine = engines("sd", "StableDiffusionImg2ImgPipeline")
    wrong: WireTensor = numpy_to_wire(np.zeros((8, 8, 3), dtype=np.uint8))
    engine.submit(job(inputs={**PROMPT, "image": Images(tensor=0)}, tensors=[wrong]))
    end = drive(engine)[-1]
    assert isinstance(end, Failed)
    assert (end.error.code, end.error.field) == (ErrorCode.INVALID_REQUEST, "image")
