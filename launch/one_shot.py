"""`omni-master launch DEPLOY --prompt TEXT`: start, run one prompt, save, say where the time went, end."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from launch.joining import say_who_may_join
from launch.render import show_outputs, show_timings
from launch.saving import check_target, save_outputs
from launch.waiting import Waiting
from omni.async_omni import AsyncOmni, closing
from omni.outputs import RequestEvent, RequestOutput, StageDone, StageProgress, StageStarted, TextDelta
from omni.pictures import read_mask, read_pictures
from omni.request import GenerateRequest
from proto.errors import OmniError
from proto.params import Json


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for. `images` and `mask` are files to read, `save` is one to write."""

    prompt: str
    params: Mapping[str, Json]
    images: tuple[Path, ...] = ()
    mask: Path | None = None
    save: Path | None = None


async def run_prompt(omni: AsyncOmni, asked: Asked, console: Console, progress: Console) -> None:
    """The result goes to `console`, what happens meanwhile to `progress`.

    Raises `InvalidRequest` before anything is started if the prompt, its parameters, a picture or `save` can be seen to be
    wrong, and the `OmniError` of a start or a request that failed, or of files that could not be written.
    """
    engine, save = omni.engine, asked.save
    engine.planner.plan(GenerateRequest(prompt=asked.prompt, params=engine.planner.spread(asked.params)), {})
    pictures = {
        "images": read_pictures(asked.images, "--image") if asked.images else None,
        "mask": None if asked.mask is None else read_mask(asked.mask, "--mask"),
    }
    if save is not None:
        check_target(save)
    began = time.monotonic()
    try:
        await omni.start(wait=False)
        say_who_may_join(omni, progress, only_missing=True)
        with Waiting(progress, lambda: engine.readiness.waiting) as waiting:
            await engine.wait_ready(waiting.show)
        progress.out(f"ready after {time.monotonic() - began:.1f} s", highlight=False)
        result = await _run(omni, asked, pictures, progress)
    finally:
        await omni.stop()
    show_outputs(result, console)
    if save is not None:
        try:
            for path in save_outputs(result, save):
                console.out(f"saved {path}", highlight=False)
        except OSError as error:
            raise OmniError(f"--save {str(save)!r}: {error}") from error
    elif result.images:
        console.out("nothing was saved; pass --save FILE to keep the outputs", highlight=False)
    show_timings(result, console)


async def _run(omni: AsyncOmni, asked: Asked, pictures: Mapping[str, Json], console: Console) -> RequestOutput:
    with _Bars(console) as bars:
        async with closing(omni.stream(asked.prompt, **pictures, **asked.params)) as events:
            async for event in events:
                bars.show(event)
                if isinstance(event, RequestOutput):
                    return event
    raise OmniError("the request ended without a result")


class _Bars:
    """A bar for each stage on a terminal; a line for each stage's start and end when piped."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "_Bars":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, event: RequestEvent) -> None:
        if isinstance(event, StageStarted):
            self._tasks[event.stage] = self._bars.add_task(event.stage, total=None)
            self._line(f"{event.stage}: started")
        elif isinstance(event, StageProgress) and event.stage in self._tasks:
            self._bars.update(self._tasks[event.stage], completed=event.step, total=event.total)
        elif isinstance(event, TextDelta) and event.stage in self._tasks:
            self._bars.advance(self._tasks[event.stage])
        elif isinstance(event, StageDone):
            self._line(f"{event.stage}: done in {event.timings.run_s:.2f} s")

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.out(text, highlight=False)
