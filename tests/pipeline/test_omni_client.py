"""`Omni` and `AsyncOmni` as a program uses them: on real models, beside each other, and with nothing imported in vain."""

import asyncio
import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omni import AsyncOmni, Omni
from omni.outputs import ImageOutput, RequestOutput, StageDone, StageProgress, StageStarted, TextDelta, TextOutput
from proto.errors import DeployError, InvalidRequest, StageFailed, StartError
from tests.fakes.engines import SIZE, drawing
from tests.models.folders import models
from tests.pipeline.harness import ROOT, deploy, fake_ar, text_to_image

__all__ = ["models"]

SAID = "The boat🎨 of漢字, thenEND and it."
DEPLOY = """
name: real
master: {bind: "tcp://127.0.0.1:0"}
stages:
  thinker: {kind: ar, model: {path: scripted}, output: text}
  painter:
    kind: diffusion
    model: {path: sd}
    inputs: {prompt: thinker.text}
    defaults: {num_inference_steps: 3}
    output: image
"""


@pytest.fixture(scope="module")
def started() -> list[str]:
    """The lines of the start."""
    return []


@pytest.fixture(scope="module")
def real(models: Path, started: list[str]) -> Iterator[Omni]:
    path = models / "client.yaml"
    path.write_text(DEPLOY)
    with Omni(path, overrides=["stages.painter.defaults.seed=5"], on_progress=started.append, progress=False) as omni:
        yield omni


def test_start_tells_what_it_waits_for(real: Omni, started: list[str]) -> None:
    assert "waiting for stage painter (0 of 1 replicas)" in started
    assert any("[painter/0: loading unet" in line for line in started)
    assert real.status().ready


def test_output_has_text_pictures_arrays_and_timings_of_every_stage(real: Omni) -> None:
    done = real.generate("a boat", num_images=2)
    assert done.text == SAID
    assert done.outputs["thinker"] == TextOutput(SAID)
    drawn = done.outputs["painter"]
    assert isinstance(drawn, ImageOutput)
    assert (drawn.array.dtype, drawn.array.shape, drawn.seeds) == (np.uint8, (2, 64, 64, 3), (5, 6))
    assert all(isinstance(image, Image.Image) and image.size == (64, 64) for image in done.images)
    assert done.images[1].tobytes() == drawn.array[1].tobytes()
    for stage in done.stages.values():
        assert stage.timings.run_s > 0
        assert stage.timings.detail
    assert done.total_s >= sum(stage.timings.run_s for stage in done.stages.values())
    assert done.stages["thinker"].usage.completion_tokens > 0
    assert done.stages["thinker"].finish_reason == "stop"


def test_override_default_and_parameter_each_win_over_the_one_before(real: Omni) -> None:
    own = real.generate("a boat")
    assert own.images[0].tobytes() == real.generate("a boat", seed=5).images[0].tobytes()
    assert own.images[0].tobytes() != real.generate("a boat", seed=6).images[0].tobytes()
    assert real.generate("a boat", stages={"thinker": {"max_tokens": 2}}).stages["thinker"].finish_reason == "length"


def test_only_the_wanted_outputs_are_made(real: Omni) -> None:
    done = real.generate("a boat", outputs=["thinker"])
    assert list(done.stages) == ["thinker"]
    assert done.images == []
    drawn = real.generate("a boat", outputs=["painter"])
    assert drawn.text is None
    assert len(drawn.images) == 1


def test_list_of_one_gives_a_list_and_an_empty_one_an_empty_one(real: Omni) -> None:
    assert [done.text for done in real.generate(["a boat"])] == [SAID]
    assert real.generate([]) == []


def test_picture_goes_in_and_a_stage_that_takes_none_says_so(real: Omni) -> None:
    with pytest.raises(InvalidRequest, match="no stage of this request takes an image"):
        real.generate("x", images=np.zeros((1, 8, 8, 3), np.uint8))
    with pytest.raises(InvalidRequest, match="uint8 of shape"):
        real.generate("x", images=np.zeros((8, 8), np.uint8))


def test_events_of_every_stage_come_in_their_order(real: Omni) -> None:
    events = list(real.stream("a boat"))
    kinds = [(type(event), getattr(event, "stage", None)) for event in events]
    thinker_done = kinds.index((StageDone, "thinker"))
    assert kinds[0] == (StageStarted, "thinker")
    assert "".join(event.text for event in events[:thinker_done] if isinstance(event, TextDelta)) == SAID
    steps = [event.step for event in events[thinker_done:] if isinstance(event, StageProgress)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 3
    assert kinds[-2:] == [(StageDone, "painter"), (RequestOutput, None)]


def test_bar_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Piped there is nothing of it, and never anything on stdout."""
    with Omni(text_to_image()) as omni:
        for settings, shown in (({"FORCE_COLOR": "1"}, True), ({"NO_COLOR": "1"}, False)):
            with monkeypatch.context() as patch:
                for name, value in settings.items():
                    patch.setenv(name, value)
                out, err = io.StringIO(), io.StringIO()
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    omni.generate(["one", "two"])
            assert ("requests" in err.getvalue()) is shown
            assert out.getvalue() == ""


def test_blocking_and_async_pipelines_live_in_one_process() -> None:
    async def ask(omni: AsyncOmni) -> RequestOutput:
        async for event in omni.stream("async", seed=1):
            if isinstance(event, RequestOutput):
                return event
        raise AssertionError("no result")

    async def both() -> RequestOutput:
        async with AsyncOmni(text_to_image()) as omni:
            result, other = await asyncio.gather(ask(omni), asyncio.to_thread(blocking.generate, "blocking", seed=1))
            assert other.text == "echo: blocking"
            await omni.stop()  # once more by the context
        return result

    with Omni(text_to_image(), progress=False) as blocking:
        result = asyncio.run(both())
        assert blocking.generate("still there").text == "echo: still there"
    assert result.text == "echo: async"
    assert result.images[0].tobytes() == drawing(b"echo: async", 1)
    assert result.images[0].size == (SIZE, SIZE)


def test_async_iteration_that_is_left_aborts_and_a_failure_is_raised() -> None:
    async def main() -> None:
        async with AsyncOmni(deploy({"thinker": fake_ar()})) as omni:
            with pytest.raises(StageFailed, match="as the test asked"):
                await anext(event async for event in omni.stream("raise") if isinstance(event, RequestOutput))
            events = omni.stream("hang")
            assert isinstance(await anext(events), StageStarted)
            await events.aclose()
            while (await omni.status()).running:  # every answer comes from the master's own loop
                pass
            assert (await omni.call("thinker", "echo", {"a": 1}))[0]["args"] == {"a": 1}
            with pytest.raises(InvalidRequest, match="there is no stage 'painter'"):
                await omni.call("painter", "echo")

    asyncio.run(main())


def test_deploy_that_cannot_be_used_is_refused_at_once(tmp_path: Path) -> None:
    for one in (Omni, AsyncOmni):
        with pytest.raises(DeployError, match="did you mean 'demo'"):
            one("dmeo")


def test_stage_that_cannot_load_is_raised_by_the_start() -> None:
    with pytest.raises(StartError, match=r"thinker.*this engine cannot load"):
        Omni(deploy({"thinker": fake_ar(options={"load": "fail"})}), progress=False)


def test_import_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "diffusers", "numpy", "PIL", "starlette", "uvicorn", "rich", "typer")
    code = f"import sys, omni; omni.Omni, omni.AsyncOmni; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['numpy']" or done.stdout.strip() == "[]"
