"""Sleep, wake, profile and numbers of a diffusion stage."""

import json
from pathlib import Path

import pytest

from proto.errors import InvalidRequest, StageUnavailable
from proto.ids import RequestId
from proto.messages import Text
from proto.params import DiffusionParams
from stages.diffusion.engine import DiffusionEngine
from stages.engine import Finished, Job
from tests.models.tiny_diffusion import build_tiny_ddim, build_tiny_sd
from tests.pipeline.batching_cases import load


def job(number: int, prompt: str | None = "a fox") -> Job:
    inputs = {} if prompt is None else {"prompt": Text(text=prompt)}
    return Job(RequestId(f"r{number}"), inputs, DiffusionParams(seed=1, num_inference_steps=2), emit=("image",))


def draw(engine: DiffusionEngine, one: Job) -> bytes:
    engine.submit(one)
    events = []
    while engine.has_work:
        events += engine.step()
    (end,) = [event for event in events if isinstance(event, Finished)]
    return bytes(end.tensors[0].data)


def test_a_stage_that_slept_draws_what_it_drew_before(tmp_path: Path) -> None:
    engine = load(build_tiny_sd(tmp_path / "sd"))
    before = draw(engine, job(1))
    assert engine.call("stats", {})["prompts_kept"] > 0
    slept = engine.call("sleep", {})
    assert (slept["asleep"], slept["device"], slept["weights_moved_bytes"]) == (True, "cpu", 0)
    assert engine.call("sleep", {})["asleep"]
    stats = engine.call("stats", {})
    assert (stats["asleep"], stats["prompts_kept"]) == (True, 0)
    assert engine.call("info", {})["asleep"]
    with pytest.raises(StageUnavailable, match="asleep; wake it"):
        engine.submit(job(2))
    assert not engine.call("wake", {})["asleep"]
    assert draw(engine, job(3)) == before
    engine.close()


def test_a_stage_with_requests_does_not_sleep_and_says_how_many_there_are(tmp_path: Path) -> None:
    engine = load(build_tiny_ddim(tmp_path / "ddim"))
    engine.submit(job(1, None))
    engine.submit(job(2, None))
    with pytest.raises(StageUnavailable, match="2 request"):
        engine.call("sleep", {})
    engine.close()


def test_a_profile_is_a_chrome_trace_of_the_steps_between_start_and_stop(tmp_path: Path) -> None:
    engine = load(build_tiny_ddim(tmp_path / "ddim"))
    with pytest.raises(InvalidRequest, match="no profile is running"):
        engine.call("stop_profile", {})
    told = engine.call("start_profile", {"path": str(tmp_path / "traces")})
    with pytest.raises(InvalidRequest, match="running already"):
        engine.call("start_profile", {})
    draw(engine, job(1, None))
    done = engine.call("stop_profile", {})
    assert done["path"] == told["path"]
    trace = json.loads(Path(done["path"]).read_text())
    assert any("conv2d" in event.get("name", "") for event in trace["traceEvents"])
    assert done["bytes"] == Path(done["path"]).stat().st_size
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="no folder") as refused:
        engine.call("start_profile", {"path": str(tmp_path / "file")})
    assert refused.value.info.field == "path"
    engine.close()
