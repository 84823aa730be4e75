"""What is not ours runs behind our contracts: engines, recipes, and pipelines that come with their model.

The plug-in is `tests/plugin`, as the README tells of it.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from omni.outputs import ImageOutput
from proto.deploy import DiffusionEngineSpec, DiffusionStage, Kind, LimitsSpec, Link, ModelSpec
from proto.errors import ErrorCode, StartError
from proto.ids import RequestId, StageName
from proto.messages import Partial, Started, Text, Video
from proto.numpy_tensors import from_wire
from proto.params import DiffusionParams, Json
from stages.diffusion.engine import DiffusionEngine
from stages.diffusion.recipes import Recipe
from stages.engine import Emit, Event, Failed, Finished, Job, LoadContext
from stages.engines import engine_factory
from tests.models.sketch import build_sketch, stock_sketch
from tests.pipeline.batching_cases import drive
from tests.pipeline.harness import ENV, ROOT, Running, deploy, fake_ar, fake_painter

PLUGIN = ROOT / "tests" / "plugin"


@pytest.fixture(scope="module")
def sketch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sketch(tmp_path_factory.mktemp("models") / "sketch")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As `pip install ./tests/plugin` leaves it: the package, and the metadata with its entry point."""
    metadata = tmp_path / "omni_example_plugin-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: omni-example-plugin\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[omni.recipes]\nSketchPipeline = omni_example.recipes:sketch\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(PLUGIN))
    yield
    for name in [name for name in sys.modules if name.startswith("omni_example")]:
        del sys.modules[name]


def load(folder: Path, *, trust: bool = True, custom: Path | None = None, recipe: str | None = None) -> DiffusionEngine:
    engine = DiffusionEngine()
    code = None if custom is None else str(custom)
    stage = DiffusionStage(
        model=ModelSpec(path=str(folder), trust_remote_code=trust, custom_pipeline=code),
        engine=DiffusionEngineSpec(recipe=recipe),
    )
    engine.load(LoadContext(StageName("painter"), stage, LimitsSpec(), "cpu", (), lambda note, done: None))
    return engine


def job(name: str = "r", *, emit: str = "image", **params: Json) -> Job:
    return Job(RequestId(name), {"prompt": Text(text="a cat")}, DiffusionParams(seed=3, **params), emit=(emit,))


def picture(event: Event) -> np.ndarray:
    assert isinstance(event, Finished), event
    return from_wire(event.tensors[0])[0]


def alone(folder: Path, prompt: str = "a cat", **arguments: Json) -> Image.Image:
    pipe = stock_sketch(folder)
    return pipe(prompt, generator=torch.Generator().manual_seed(3), **arguments)[0]


def partials(events: list[Event]) -> list[Emit]:
    return [event for event in events if isinstance(event, Emit) and isinstance(event.part, Partial)]


# --- engines ----------------------------------------------------------------------------------------------------------


def test_engines_of_a_plug_in_run_as_stages_of_both_kinds_with_their_options() -> None:
    env = {**ENV, "PYTHONPATH": f"{ROOT}:{PLUGIN}"}
    stages = {
        "parrot": fake_ar(use="omni_example.engines:Parrot", options={"suffix": "!"}, env=env),
        "stripes": fake_painter(
            use="omni_example.engines:Stripes",
            options={"width": 2},
            inputs={"prompt": Link(source="parrot.text")},
            output=Kind.IMAGE,
            env=env,
        ),
    }
    with Running(deploy(stages)) as pipeline:
        done = pipeline.run("ab", stages={"stripes": {"height": 4}})
        assert pipeline.do(pipeline.omni.call(StageName("stripes"), "options")) == {0: {"width": 2}}
    assert done.text == "ab!"
    drawn = done.outputs[StageName("stripes")]
    assert isinstance(drawn, ImageOutput)
    assert drawn.array.shape == (1, 4, 6, 3)
    assert drawn.array[0, 0, ::2, 0].tolist() == list(b"ab!")


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ("no_such_package.engines:Parrot", "No module named 'no_such_package'"),
        ("omni_example.engines:Parakeet", "has no attribute 'Parakeet'"),
        ("tests.pipeline.test_plugins:Unmakable", "cannot be made: ValueError: not here"),
        ("tests.pipeline.test_plugins:load", "cannot be made: TypeError"),
        ("collections:Counter", "is no engine: it has no load, has_work, submit"),
    ],
)
@pytest.mark.parametrize("make", [fake_ar, fake_painter])
def test_what_is_no_engine_is_refused_with_the_reason(
    make: Json, use: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    with pytest.raises(StartError, match=words) as refusal:
        engine_factory(make(use=use))()
    assert refusal.value.info.field == "engine.use"
    assert use in str(refusal.value)


class Unmakable(DiffusionEngine):
    def __init__(self) -> None:
        raise ValueError("not here")


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_a_recipe_of_a_plug_in_is_found_by_the_pipelines_class(installed: None, sketch: Path) -> None:
    engine = load(sketch)
    info = engine.call("info", {})
    assert info["size_multiple"] == 4
    assert "guidance_scale" in info["params"]
    (*_, end) = drive(engine, {0: job(guidance_scale=2.5, num_inference_steps=3)})
    expected = alone(sketch, "A sketch: a cat", boldness=2.5, num_inference_steps=3)
    np.testing.assert_array_equal(picture(end), np.asarray(expected))


def test_the_recipe_that_the_deploy_names_wins(installed: None, sketch: Path) -> None:
    engine = load(sketch, recipe="tests.pipeline.test_plugins:film_recipe")
    assert tuple(engine.call("info", {})["outputs"]) == ("video",)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("no_such_package:NAME", "No module named"),
        ("omni_example.recipes:no_such", "has no attribute 'no_such'"),
        ("stages.diffusion.families:GROUP", "gives a str; it must be a stages.diffusion.recipes.Recipe"),
        ("tests.pipeline.test_plugins:broken_recipe", "ValueError: this recipe is broken"),
    ],
)
def test_a_recipe_that_cannot_be_used_fails_the_start(installed: None, sketch: Path, recipe: str, words: str) -> None:
    with pytest.raises(StartError, match=words) as refusal:
        load(sketch, recipe=recipe)
    assert refusal.value.info.field == "engine.recipe"


def broken_recipe(pipe: Json, recipe: Recipe) -> Recipe:
    raise ValueError("this recipe is broken")


def film_recipe(pipe: Json, recipe: Recipe) -> Recipe:
    """Each picture that is yielded is a frame."""
    return replace(
        recipe, media=("video",), fps=4.0, read=lambda pictures: {"frames": np.stack(pictures)[None] / np.float32(255)}
    )


# --- pipelines that come with their model -----------------------------------------------------------------------------


def test_a_models_own_code_is_not_run_unless_the_deploy_trusts_it(sketch: Path, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"pipeline\.py, unet/sketch_unet\.py") as refusal:
        load(sketch, trust=False)
    assert refusal.value.info.field == "model.trust_remote_code"
    assert "set model.trust_remote_code: true" in str(refusal.value)
    (sketch / "pipeline.py").rename(hidden := tmp_path / "hidden.py")
    try:
        with pytest.raises(StartError, match=r"there is no '.*pipeline\.py'"):
            load(sketch)
    finally:
        hidden.rename(sketch / "pipeline.py")


def test_a_trusted_model_runs_its_own_pipeline_and_its_requests_share_forwards(sketch: Path) -> None:
    engine = load(sketch)
    jobs = {k: job(f"r{k}", num_inference_steps=4, width=16, extra={"boldness": 0.5}) for k in (0, 1)}
    ends = [event for event in drive(engine, jobs) if isinstance(event, Finished)]
    expected = np.asarray(alone(sketch, num_inference_steps=4, boldness=0.5)).astype(int)
    for end in ends:
        assert np.abs(picture(end) - expected).max() <= 1
    assert engine.call("stats", {})["forwards"] < 8


def test_two_models_in_one_process_keep_their_own_code(sketch: Path, tmp_path: Path) -> None:
    other = build_sketch(tmp_path / "other")
    code = (other / "pipeline.py").read_text()
    (other / "pipeline.py").write_text(code.replace("boldness: float = 1.0", "boldness: float = 0.0"))
    first, second = load(sketch), load(other)
    assert first._loaded().signature.defaults["boldness"] == 1.0
    assert second._loaded().signature.defaults["boldness"] == 0.0
    assert not [name for name in sys.modules if name.startswith("diffusers_modules")]


def test_the_code_may_stand_in_a_folder_of_its_own(sketch: Path, tmp_path: Path) -> None:
    model = build_sketch(tmp_path / "model")
    index = (model / "model_index.json").read_text()
    (model / "model_index.json").write_text(index.replace('["pipeline", "SketchPipeline"]', '"SketchPipeline"'))
    (model / "pipeline.py").rename(tmp_path / "pipeline.py")
    with pytest.raises(StartError, match="names 'SketchPipeline', which is no pipeline of diffusers"):
        load(model)
    with pytest.raises(StartError, match="which is not run by default"):
        load(model, trust=False, custom=tmp_path)
    with pytest.raises(StartError, match="the folder names its own"):
        load(sketch, custom=tmp_path)
    (*_, end) = drive(load(model, custom=tmp_path / "pipeline.py"), {0: job()})
    np.testing.assert_array_equal(picture(end), np.asarray(alone(sketch)))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise RuntimeError('not today')", "RuntimeError: not today"),
        ("class SketchPipeline: pass", "has no class 'SketchPipeline' that is a DiffusionPipeline"),
    ],
)
def test_own_code_that_cannot_be_run_fails_the_start(tmp_path: Path, code: str, words: str) -> None:
    model = build_sketch(tmp_path / "model")
    (model / "pipeline.py").write_text(code)
    with pytest.raises(StartError, match=words):
        load(model)


# --- partial results --------------------------------------------------------------------------------------------------


def test_what_a_pipeline_yields_goes_to_the_caller_before_the_end(sketch: Path) -> None:
    engine = load(sketch)
    one, other = (job(name, num_inference_steps=3, extra={"partial": True}) for name in ("r", "s"))
    events = drive(engine, {0: one, 1: other})
    for name in ("r", "s"):
        own = [event for event in events if event.request == name]
        parts = partials(own)
        assert isinstance(own[0], Emit)
        assert isinstance(own[0].part, Started)
        assert [(part.output, part.part.index, part.part.append) for part in parts] == [  # type: ignore[union-attr]
            ("image", 0, False),
            ("image", 1, False),
            ("image", 2, False),
        ]
        np.testing.assert_array_equal(from_wire(parts[-1].tensors[0])[0], picture(own[-1]))
        assert np.abs(picture(own[-1]).astype(int) - np.asarray(alone(sketch, num_inference_steps=3))).max() <= 1
        assert own.index(parts[0]) < own.index(parts[1]) < len(own) - 1
    first_of_other = events.index(partials([event for event in events if event.request == "s"])[0])
    assert first_of_other < max(at for at, event in enumerate(events) if event.request == "r")  # they took turns


def test_pieces_of_a_video_are_the_video_when_joined(sketch: Path) -> None:
    engine = load(sketch, recipe="tests.pipeline.test_plugins:film_recipe")
    events = drive(engine, {0: job(emit="video", num_inference_steps=4, extra={"partial": True})})
    parts, end = partials(events), events[-1]
    assert isinstance(end, Finished)
    assert end.outputs["video"] == Video(tensor=0, fps=4.0, seeds=(3,))
    assert all(isinstance(part.part, Partial) and part.part.append for part in parts)
    pieces = [from_wire(part.tensors[0]) for part in parts]
    assert [piece.shape for piece in pieces] == [(1, 1, 16, 16, 3)] * 4
    np.testing.assert_array_equal(from_wire(end.tensors[0]), np.concatenate(pieces, axis=1))


def test_a_pipeline_that_breaks_after_some_parts_fails_alone(sketch: Path) -> None:
    engine = load(sketch)
    bad = job("bad", num_inference_steps=4, extra={"partial": True, "broken_after": 2})
    good = job("good", num_inference_steps=4, extra={"partial": True})
    events = drive(engine, {0: bad, 1: good})
    assert len(partials([event for event in events if event.request == "bad"])) == 2
    ends = {event.request: event for event in events if isinstance(event, Failed | Finished)}
    assert isinstance(ends[RequestId("good")], Finished)
    failed = ends[RequestId("bad")]
    assert isinstance(failed, Failed)
    assert failed.error.code is ErrorCode.STAGE_FAILED
    assert "the pencil broke" in failed.error.message


def test_a_request_is_aborted_between_two_parts(sketch: Path) -> None:
    engine = load(sketch)
    engine.submit(job(num_inference_steps=50, extra={"partial": True}))
    events: list[Event] = []
    while len(partials(events)) < 2:
        events += engine.step()
    engine.abort(RequestId("r"))
    assert not engine.has_work
    assert engine.step() == []
