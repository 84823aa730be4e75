"""LoRA in the diffusion stage: each request gets its adapter at its scale, whoever shares the stage, and nobody else's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

from proto.deploy import DiffusionEngineSpec, DiffusionStage, LimitsSpec, LoraSpec, ModelSpec
from proto.errors import InvalidRequest, OmniError, StageFailed, StageUnavailable, StartError, UnknownModel
from proto.ids import RequestId, StageName
from proto.messages import Text
from proto.params import DiffusionParams, Json
from proto.torch_tensors import from_wire
from stages.diffusion.engine import DiffusionEngine
from stages.engine import Finished, Job, LoadContext
from tests.models import tiny_diffusion as tiny
from tests.models.tiny_loras import ATTENTION, CLIP, save_diffusion_lora

FAMILIES: Mapping[str, tuple[tiny.Builder, Mapping[str, Sequence[str]], Mapping[str, Sequence[str]]]] = {
    "sd": (tiny.build_tiny_sd, {"unet": ATTENTION}, {"unet": ("to_q", "to_v"), "text_encoder": CLIP}),
    "flux": (tiny.build_tiny_flux, {"transformer": ATTENTION}, {"transformer": ("to_k",), "text_encoder": CLIP}),
    "sd3": (tiny.build_tiny_sd3, {"transformer": ATTENTION}, {"transformer": ("to_q",)}),
}
"""A tiny pipeline and what its adapters A and B change."""


class Case:
    """A pipeline folder, two adapters, an engine that has both and the stock pipeline that has both."""

    def __init__(self, root: Path, family: str) -> None:
        build, a, b = FAMILIES[family]
        self.folder = build(root / family)
        self.paths = {
            "A": save_diffusion_lora(self.folder, root / f"{family}-a", 1, a),
            "B": save_diffusion_lora(self.folder, root / f"{family}-b", 2, b, rank=3),
        }
        self.bare = DiffusionPipeline.from_pretrained(self.folder, local_files_only=True)
        self.stock = DiffusionPipeline.from_pretrained(self.folder, local_files_only=True)
        for name, path in self.paths.items():
            self.stock.load_lora_weights(str(path), adapter_name=f"stock_{name}", local_files_only=True)
        for pipe in (self.bare, self.stock):
            pipe.set_progress_bar_config(disable=True)
        self.engine = engine(self.folder)
        for name, path in self.paths.items():
            self.engine.call("load_lora", {"name": name, "path": str(path)})

    def alone(self, one: Job) -> torch.Tensor:
        """The stock pipeline's latents for the request by itself, with its adapter."""
        params = one.params
        assert isinstance(params, DiffusionParams)
        pipe = self.bare
        if params.lora:
            pipe = self.stock
            scale = 1.0 if params.lora_scale is None else params.lora_scale
            pipe.set_adapters([f"stock_{params.lora}"], [scale])
        prompt = one.inputs["prompt"]
        assert isinstance(prompt, Text)
        assert params.seed is not None
        with torch.inference_mode():
            return pipe(
                prompt.text,
                width=32,
                height=32,
                num_inference_steps=params.num_inference_steps,
                generator=torch.Generator().manual_seed(params.seed),
                output_type="latent",
            )[0]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Case]]:
    made: dict[str, Case] = {}
    root = tmp_path_factory.mktemp("loras")

    def take(family: str) -> Case:
        if family not in made:
            made[family] = Case(root, family)
        assert not made[family].engine.has_work
        return made[family]

    yield take
    for one in made.values():
        one.engine.close()


def engine(folder: Path, **spec: Json) -> DiffusionEngine:
    made = DiffusionEngine()
    stage = DiffusionStage(model=ModelSpec(path=str(folder)), engine=DiffusionEngineSpec(memory_profile=False, **spec))
    made.load(LoadContext(StageName("painter"), stage, LimitsSpec(), "cpu", (), lambda note, done: None))
    return made


def job(number: int, lora: str | None = None, scale: float | None = None, steps: int = 3, prompt: str = "a fox") -> Job:
    params = DiffusionParams(seed=number, num_inference_steps=steps, width=32, height=32, lora=lora, lora_scale=scale)
    return Job(RequestId(f"r{number}"), {"prompt": Text(text=prompt)}, params, emit=("latents",))


def run(made: DiffusionEngine, *jobs: Job) -> list[torch.Tensor]:
    """Latents of each, all submitted at once."""
    for one in jobs:
        made.submit(one)
    ends = {}
    while made.has_work:
        ends |= {event.request: event for event in made.step() if isinstance(event, Finished)}
    return [from_wire(ends[one.request].tensors[0]) for one in jobs]


def forwards(made: DiffusionEngine) -> int:
    return made.call("stats", {})["forwards"]


def check_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """But for rounding, which is of the size of the largest value."""
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error <= 1e-4, error


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_gives_each_request_its_own_adapter_at_its_own_scale(
    case: Callable[[str], Case], family: str
) -> None:
    one = case(family)
    jobs = [job(1), job(2, "A"), job(3, "A", 0.5), job(4, "B"), job(5, "A"), job(6), job(7, "B", 0.0)]
    before = forwards(one.engine)
    found = run(one.engine, *jobs)
    assert forwards(one.engine) - before == 5 * 3  # base, A, A at half, B, B at nothing: three steps of each
    for mine, asked in zip(found, jobs, strict=True):
        check_equal(mine, one.alone(asked))
    assert len({tensor.numpy().tobytes() for tensor in found}) == len(jobs)
    half, whole = run(one.engine, job(9, "A", 0.5))[0], run(one.engine, job(9, "A"))[0]
    assert float((half - whole).abs().max()) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_without_an_adapter_get_the_bits_of_a_stage_that_never_had_one(
    case: Callable[[str], Case], family: str
) -> None:
    one = case(family)
    with_loras = run(one.engine, job(1, "A"))[0]
    fresh = engine(one.folder)
    before, after = run(fresh, job(1))[0], run(one.engine, job(1))[0]
    assert torch.equal(before, after)
    assert not torch.allclose(with_loras, after)
    fresh.close()


def test_a_text_encoder_adapter_is_part_of_the_prompt_caches_key(case: Callable[[str], Case]) -> None:
    one = case("sd")
    one.engine.call("clear_cache", {})
    jobs = [job(1), job(2, "A"), job(3, "B"), job(4, "B", 0.5)]  # A leaves the text encoder as it is
    for asked in jobs:
        check_equal(run(one.engine, asked)[0], one.alone(asked))
    assert (
        one.engine.call("stats", {})["prompts_kept"] == 2 * 3
    )  # the prompt and the negative one: base and A, B, B at half
    hits = one.engine.call("stats", {})["prompt_hits"]
    run(one.engine, job(5, "B", 0.5))
    assert one.engine.call("stats", {})["prompt_hits"] == hits + 2


def test_an_adapter_is_loaded_while_others_are_drawn_and_changes_nothing_of_theirs(case: Callable[[str], Case]) -> None:
    one = case("flux")
    made = engine(one.folder)
    asked = job(1, steps=4)
    made.submit(asked)
    events = [*made.step(), *made.step(), *made.step()]
    made.call("load_lora", {"name": "A", "path": str(one.paths["A"])})
    made.submit(job(2, "A"))
    while made.has_work:
        events += made.step()
    ends = {event.request: from_wire(event.tensors[0]) for event in events if isinstance(event, Finished)}
    check_equal(ends[RequestId("r1")], one.alone(asked))
    check_equal(ends[RequestId("r2")], one.alone(job(2, "A")))
    made.close()


def test_an_adapter_in_use_is_not_unloaded_and_one_that_was_is_unknown(case: Callable[[str], Case]) -> None:
    one = case("sd")
    made = engine(one.folder, loras={"A": LoraSpec(path=str(one.paths["A"])), "B": LoraSpec(path=str(one.paths["B"]))})
    made.submit(job(1, "A"))
    made.submit(job(2, "A"))
    with pytest.raises(StageUnavailable, match="2 request") as refused:
        made.call("unload_lora", {"name": "A"})
    assert refused.value.info.field == "name"
    assert made.call("list_loras", {})["loras"]["A"]["requests"] == 2
    while made.has_work:
        made.step()
    assert set(made.call("unload_lora", {"name": "A"})["loras"]) == {"B"}
    with pytest.raises(UnknownModel, match="no adapter 'A'; loaded adapters: B") as unknown:
        made.submit(job(3, "A"))
    assert unknown.value.info.field == "lora"
    for asked in (job(4), job(5, "B")):
        check_equal(run(made, asked)[0], one.alone(asked))
    made.call("load_lora", {"name": "A", "path": str(one.paths["B"])})  # the name again, with other weights
    check_equal(run(made, job(6, "A"))[0], one.alone(job(6, "B")))
    made.close()


def test_loading_the_same_file_again_is_no_fault_and_another_under_its_name_is(case: Callable[[str], Case]) -> None:
    one = case("sd")
    one.engine.call("load_lora", {"name": "A", "path": str(one.paths["A"])})
    with pytest.raises(InvalidRequest, match="unload it first") as refused:
        one.engine.call("load_lora", {"name": "A", "path": str(one.paths["B"])})
    assert refused.value.info.field == "name"


def test_a_load_that_fails_says_why_and_leaves_nothing_behind(case: Callable[[str], Case], tmp_path: Path) -> None:
    one, other = case("sd"), case("flux")
    made = engine(one.folder)
    names = {name for name, _ in made._loaded().pipe.unet.named_modules()}
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no safetensors")
    wide = save_diffusion_lora(tiny.build_tiny_sd3(tmp_path / "sd3"), tmp_path / "wide", 3, {"transformer": ATTENTION})
    for path, field in (
        (tmp_path / "nowhere", "path"),
        (empty, "path"),
        (broken, "path"),
        (other.paths["A"], "path"),
        (wide, "path"),
    ):
        with pytest.raises(OmniError, match="painter") as refused:
            made.call("load_lora", {"name": "A", "path": str(path)})
        assert refused.value.info.field == field
        assert made.call("list_loras", {}) == {"loras": {}}
    assert {name for name, _ in made._loaded().pipe.unet.named_modules()} == names
    torch.testing.assert_close(run(made, job(1))[0], one.alone(job(1)), atol=0, rtol=0)
    made.close()


def test_a_load_that_fails_halfway_is_taken_back(case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    one = case("sd")
    made = engine(one.folder)
    made.call("load_lora", {"name": "A", "path": str(one.paths["A"])})
    text_encoder = made._loaded().pipe.text_encoder

    def no_memory(*_: Json, **__: Json) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(text_encoder, "load_adapter", no_memory)
        with pytest.raises(StageFailed, match="no memory"):
            made.call("load_lora", {"name": "B", "path": str(one.paths["B"])})
    assert set(made.call("list_loras", {})["loras"]) == {"A"}
    assert not [name for name, _ in made._loaded().pipe.unet.named_parameters() if "omni2" in name]
    for asked in (job(1), job(2, "A")):
        check_equal(run(made, asked)[0], one.alone(asked))
    made.call("load_lora", {"name": "B", "path": str(one.paths["B"])})
    check_equal(run(made, job(3, "B"))[0], one.alone(job(3, "B")))
    made.close()


def test_an_adapter_that_would_change_the_base_for_everybody_is_refused(
    case: Callable[[str], Case], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    one = case("flux")
    state = load_file(one.paths["A"] / "pytorch_lora_weights.safetensors")
    norm = {"transformer.transformer_blocks.0.attn.norm_q.weight": torch.ones(16)}
    wide = {
        "transformer.x_embedder.lora_A.weight": torch.ones(2, 32),
        "transformer.x_embedder.lora_B.weight": torch.ones(32, 2),
    }
    for name, more in (("norm", norm), ("wide", wide)):
        save_file(state | more, tmp_path / f"{name}.safetensors")
        with pytest.raises(InvalidRequest, match="for every request"):
            one.engine.call("load_lora", {"name": name, "path": str(tmp_path / f"{name}.safetensors")})
    torch.testing.assert_close(run(one.engine, job(1))[0], one.alone(job(1)), atol=1e-6, rtol=1e-5)


def test_a_pipeline_without_a_loader_takes_no_adapters(tmp_path: Path) -> None:
    made = engine(tiny.build_tiny_ddim(tmp_path / "ddim"))
    assert "lora" not in (made.call("info", {})["params"] or ())
    with pytest.raises(InvalidRequest, match="takes no LoRA"):
        made.call("load_lora", {"name": "A", "path": str(tmp_path)})
    made.close()


def test_a_deploys_adapter_that_cannot_be_loaded_stops_the_start(case: Callable[[str], Case], tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"engine\.loras\.A"):
        engine(case("sd").folder, loras={"A": LoraSpec(path=str(tmp_path / "nowhere"))})


def test_a_scale_among_the_attention_arguments_is_refused(case: Callable[[str], Case]) -> None:
    one = case("sd")
    params = DiffusionParams(lora="A", extra={"cross_attention_kwargs": {"scale": 0.5}})
    with pytest.raises(InvalidRequest, match="lora_scale") as refused:
        one.engine.submit(Job(RequestId("r1"), {"prompt": Text(text="a fox")}, params, emit=("image",)))
    assert refused.value.info.field == "extra.cross_attention_kwargs"
