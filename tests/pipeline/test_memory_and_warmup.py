"""At the start: shapes are warmed up, and what requests take of the memory is found out and bounds what is admitted."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel

from proto.deploy import DiffusionEngineSpec, DiffusionStage, LimitsSpec, ModelSpec, WarmupSpec
from proto.errors import InvalidRequest, StartError
from proto.ids import RequestId, StageName
from proto.messages import Images, Started, Text
from proto.params import DiffusionParams, Json
from proto.torch_tensors import to_wire
from stages.diffusion import engine as engine_module
from stages.diffusion import library
from stages.diffusion.engine import DiffusionEngine
from stages.engine import Emit, Finished, Job, LoadContext
from tests.models.tiny_diffusion import build_tiny_dance, build_tiny_sd, build_tiny_wan
from tests.pipeline.batching_cases import drive, ends

MIB = 2**20
Load = Callable[..., DiffusionEngine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_sd(tmp_path_factory.mktemp("memory") / "sd")


@pytest.fixture
def load(folder: Path) -> Iterator[Load]:
    loaded: list[DiffusionEngine] = []

    def load_new(
        notes: list[str] | None = None, where: Path = folder, pipeline_class: str | None = None, **spec: Json
    ) -> DiffusionEngine:
        told = [] if notes is None else notes
        model = ModelSpec(path=str(where), pipeline_class=pipeline_class)
        stage = DiffusionStage(model=model, engine=DiffusionEngineSpec(**spec))
        engine = DiffusionEngine()
        loaded.append(engine)
        context = LoadContext(
            StageName("painter"), stage, LimitsSpec(), "cpu", (), lambda note, done: told.append(note)
        )
        engine.load(context)
        return engine

    yield load_new
    for engine in loaded:
        assert not engine.has_work
        engine.close()


def job(name: str, side: int = 32, **more: Json) -> Job:
    params = DiffusionParams(**{"num_inference_steps": 4, "width": side, "height": side, "seed": 1, **more})
    return Job(RequestId(name), {"prompt": Text(text=f"a fox, {name}")}, params, emit=("image",))


def edit(name: str, side: int, **more: Json) -> Job:
    """What is drawn gets the size of this picture."""
    params = DiffusionParams(**{"num_inference_steps": 4, "strength": 0.5, "seed": 1, **more})
    inputs = {"prompt": Text(text=f"a fox, {name}"), "image": Images(tensor=0)}
    picture = to_wire(torch.full((1, side, side, 3), 100, dtype=torch.uint8))
    return Job(RequestId(name), inputs, params, emit=("image",), tensors=[picture])


# --- memory -----------------------------------------------------------------------------------------------------------


def test_request_beyond_the_memory_is_refused_before_any_work_with_the_numbers(load: Load) -> None:
    notes: list[str] = []
    engine = load(notes, memory=64 * MIB)
    assert [note for note in notes if note.startswith("memory: 64 MiB for requests, one of the default size takes ")]
    with pytest.raises(
        InvalidRequest, match=r"would take [\d,]+ MiB of memory .* its budget is 64 MiB: ask for \d+ pix"
    ):
        engine.submit(job("huge", side=4096))
    assert not engine.has_work
    assert isinstance(ends(drive(engine, {0: job("small")}))["small"], Finished)


def test_request_that_fits_but_not_now_waits_for_the_memory(load: Load) -> None:
    engine = load()
    found = engine._budget
    assert found is not None
    one = engine_module.amount(job("a").params, engine._loaded())
    engine._schedule_within(replace(found, total=found.need(one).peak))
    engine.submit(job("a"))
    engine.submit(job("b"))
    waited = 0
    while engine.has_work:
        engine.step()
        assert engine.stats().running <= 1
        waited += engine.stats().queued
    assert waited > 0


@pytest.mark.parametrize("build", [build_tiny_wan, build_tiny_dance])
def test_videos_and_sounds_are_measured_too(build: Callable[[Path], Path], load: Load, tmp_path: Path) -> None:
    engine = load(where=build(tmp_path / "model"), memory=2 * MIB)
    assert engine._budget is not None
    with pytest.raises(InvalidRequest, match="would take"):
        engine._budget.need(engine_module.amount(DiffusionParams(num_images=1000), engine._loaded()))


def test_a_number_of_frames_that_is_none_is_refused(load: Load, tmp_path: Path) -> None:
    """Or it would be reckoned as one frame, and drawn as many."""
    engine = load(where=build_tiny_wan(tmp_path / "model"), max_pixels=32 * 16 * 9, memory_profile=False)
    for frames in ("13", 13.0, -3, 0, True, None, [13]):
        with pytest.raises(InvalidRequest, match="a whole number from 1 on") as refusal:
            engine.submit(job("a", 16, extra={"num_frames": frames}))
        assert refusal.value.info.field == "extra.num_frames"


def test_the_picture_that_a_request_starts_from_counts_where_it_says_the_size(load: Load) -> None:
    engine = load(pipeline_class="StableDiffusionImg2ImgPipeline", max_pixels=2 * 64 * 64, memory_profile=False)
    for too_much in (edit("a", 128), edit("b", 64, num_images=3)):
        with pytest.raises(InvalidRequest, match="draws at most 8192 pixels") as refusal:
            engine.submit(too_much)
        assert refusal.value.info.field == "image"
    events = drive(engine, {0: edit("c", 64), 1: edit("d", 64), 2: edit("e", 64)})
    assert all(isinstance(end, Finished) for end in ends(events).values())


def test_memory_bounds_pictures_that_requests_start_from(load: Load) -> None:
    engine = load(pipeline_class="StableDiffusionImg2ImgPipeline", memory=24 * MIB)
    assert isinstance(ends(drive(engine, {0: edit("a", 64)}))[RequestId("a")], Finished)
    with pytest.raises(InvalidRequest, match="for 16777216 pixels") as refusal:
        engine.submit(edit("b", 4096))
    assert refusal.value.info.field == "image"


def test_without_a_profile_nothing_is_drawn_at_the_start_and_nothing_bounded(load: Load) -> None:
    notes: list[str] = []
    assert load(notes, memory_profile=False)._budget is None
    assert not [note for note in notes if "memory" in note]


def test_memory_that_cannot_be_measured_bounds_nothing_unless_the_deploy_relies_on_it(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "gauge_for", lambda device: None)
    engine = load()
    ended = ends(drive(engine, {0: job("a")}))["a"]
    assert isinstance(ended, Finished)
    assert ended.detail["peak_memory_bytes"] == 0
    with pytest.raises(StartError, match=r"engine.memory: .*cannot be measured here; leave engine.memory out"):
        load(memory=MIB)


def test_memory_that_a_shared_call_takes_is_told_of_each_request_by_its_rows(load: Load) -> None:
    engine = load(memory_profile=False, prompt_cache=0)
    unet = library.modules(engine._loaded().pipe)["unet"]

    def wasteful(module: torch.nn.Module, args: Json) -> None:
        torch.zeros(96 * MIB, dtype=torch.uint8).fill_(1)

    handle = unet.get_submodule("conv_in").register_forward_pre_hook(wasteful)
    alone = ends(drive(engine, {0: job("a")}))["a"]
    ended = ends(drive(engine, {0: job("b"), 0.1: job("c", num_images=3)}))
    handle.remove()
    told = [end.detail["peak_memory_bytes"] / MIB for end in (alone, ended["b"], ended["c"])]
    for value, share in zip(told, (1, 1 / 4, 3 / 4), strict=True):
        assert 0.95 * 96 * share < value < 1.5 * 96 * share


# --- warming up -------------------------------------------------------------------------------------------------------


def test_shapes_of_the_deploy_are_drawn_before_the_stage_is_ready_and_leave_no_trace(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    forward = UNet2DConditionModel.forward

    @functools.wraps(forward)
    def noted(self: UNet2DConditionModel, sample: torch.Tensor, *args: Json, **kwargs: Json) -> Json:
        seen.append(tuple(sample.shape))
        return forward(self, sample, *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", noted)
    notes: list[str] = []
    warmup = (WarmupSpec(width=48, height=32, steps=3, rows=2), WarmupSpec())
    engine = load(notes, memory_profile=False, warmup=warmup)
    assert seen.count((4, 4, 4, 6)) == 3  # two requests, both guided
    assert seen.count((2, 4, 8, 8)) == 2
    assert "warming up 48x32, 3 steps, 2 rows (1 of 2), step 3 of 3" in notes
    assert any(note.startswith("warming up default size, 2 steps, 1 rows (2 of 2): ") for note in notes)
    assert not any(engine.call("stats", {}).values())


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (WarmupSpec(width=33), "needs a width that is a multiple of 8, not 33"),
        (WarmupSpec(width=2048, height=2048), "would take .* its budget is 64 MiB"),
    ],
)
def test_warmup_that_cannot_be_drawn_fails_the_start_naming_the_entry(
    load: Load, entry: WarmupSpec, problem: str
) -> None:
    with pytest.raises(StartError, match=rf"engine.warmup\[1\], {entry.width}x.*{problem}") as failed:
        load(memory=64 * MIB, warmup=(WarmupSpec(width=32, height=32), entry))
    assert failed.value.info.field == "engine.warmup[1]"


# --- static batches ---------------------------------------------------------------------------------------------------


def test_pipelines_that_need_a_mask_are_measured_and_warmed_up(load: Load) -> None:
    engine = load(
        pipeline_class="StableDiffusionInpaintPipeline",
        memory=256 * MIB,
        warmup=[WarmupSpec(width=64, height=64, rows=2)],
    )
    assert engine._budget is not None
    assert not engine.has_work


def test_without_step_batching_equal_requests_start_and_end_together(load: Load) -> None:
    engine = load(memory_profile=False, step_batching=False, max_num_seqs=3)
    equal = {number / 10: job(f"r{number}", seed=number) for number in range(3)}
    events = drive(engine, {**equal, 0.5: job("longer", num_inference_steps=6), 2: job("late")})
    ended = ends(events)
    assert all(ended[f"r{number}"].detail["rows_shared"] == 8 for number in range(3))
    assert ended["longer"].detail["rows_shared"] == ended["late"].detail["rows_shared"] == 0
    assert engine.call("stats", {})["forwards"] == 4 + 6 + 4
    order = [(e.request, isinstance(e, Finished)) for e in events if isinstance(e, Finished) or _starts(e)]
    batch = [f"r{number}" for number in range(3)]
    assert order[:6] == [*((name, False) for name in batch), *((name, True) for name in batch)]
    assert order[6:] == [("longer", False), ("longer", True), ("late", False), ("late", True)]


def _starts(event: Json) -> bool:
    return isinstance(event, Emit) and isinstance(event.part, Started)
