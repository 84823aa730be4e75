"""`Omni`: the same pipeline for code without an event loop. A thread of its own runs an `AsyncOmni`."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, overload

import uvloop

from omni.async_omni import AsyncOmni, closing
from omni.launcher import Launcher
from omni.outputs import RequestEvent, RequestOutput, StageDone, StageProgress
from omni.running import RunningRequest
from omni.status import PipelineStatus
from proto.deploy import Deploy
from proto.errors import OmniError, ShuttingDown
from proto.ids import EventId, StageName
from proto.params import Json

if TYPE_CHECKING:
    from omni.pictures import Picture, Pictures

T = TypeVar("T")


class Omni:
    """A pipeline that blocks.

        with Omni("demo") as omni:
            out = omni.generate("a red star", seed=7)
            out.images[0].save("star.png")

    Arguments are those of `AsyncOmni`. `on_progress` gets the lines of the start; `progress=False` shows no bars.
    """

    def __init__(
        self,
        deploy: str | Path | Deploy,
        *,
        overrides: Sequence[str] = (),
        launcher: Launcher | None = None,
        on_progress: Callable[[str], None] | None = None,
        progress: bool = True,
    ) -> None:
        self._progress = progress
        self._omni = AsyncOmni(deploy, overrides=overrides, launcher=launcher)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omni-client", daemon=True)
        self._closing = threading.Lock()
        self._ending = threading.Lock()  # around the next two
        self._ended = False
        self._waiting: set[threading.Event] = set()
        self._thread.start()
        try:
            self._wait(self._omni.start(on_progress))
        except BaseException:
            self._end_loop()
            raise

    def _wait(self, work: Coroutine[None, None, T]) -> T:
        """Run `work` in the loop and wait. An interrupt (Ctrl-C) cancels it, and is raised when it has ended."""
        ended = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda _: ended.set())

        if not self._soon(start, ended):
            work.close()
            raise _closed()
        try:
            ended.wait()
        except BaseException:
            self._soon(lambda: tasks[0].cancel(), ended)
            ended.wait()
            raise
        finally:
            self._waiting.discard(ended)
        if not tasks or not tasks[0].done():  # another thread has closed this Omni
            raise _closed()
        return tasks[0].result()

    def _soon(self, callback: Callable[[], object], ended: threading.Event) -> bool:
        """Call in the loop's thread, and promise that `ended` is set some day; False if the loop takes nothing more."""
        with self._ending:
            if self._ended or not self._thread.is_alive():  # it is not alive in a fork of the process
                return False
            self._waiting.add(ended)
            self._loop.call_soon_threadsafe(callback)
            return True

    @overload
    def generate(self, prompt: str, **params: Json) -> RequestOutput: ...
    @overload
    def generate(self, prompt: list[str], **params: Json) -> list[RequestOutput]: ...
    def generate(
        self,
        prompt: str | list[str],
        *,
        images: "Pictures | None" = None,
        mask: "Picture | None" = None,
        outputs: Sequence[str] | None = None,
        stages: Mapping[str, Mapping[str, Json]] | None = None,
        **params: Json,
    ) -> RequestOutput | list[RequestOutput]:
        """Run one prompt, or several at the same time, and return when all are done.

        A bar shows the steps while they run. Raises the `OmniError` of the first request that failed, after the others
        have ended. Parameters are those of `AsyncOmni.stream`.
        """
        omni = self._open()
        prompts = [prompt] if isinstance(prompt, str) else prompt
        with _Bars(len(prompts), self._progress) as bars:
            streams = [
                self._run(omni, bars.show, one, images=images, mask=mask, outputs=outputs, stages=stages, **params)
                for one in prompts
            ]
            results = self._wait(_gather(streams))
        failed = next((result for result in results if isinstance(result, BaseException)), None)
        if failed is not None:
            raise failed
        done = [result for result in results if isinstance(result, RequestOutput)]
        return done[0] if isinstance(prompt, str) else done

    @staticmethod
    async def _run(
        omni: AsyncOmni, show: Callable[[RequestEvent], None], prompt: str, **keywords: Json
    ) -> RequestOutput:
        async with closing(omni.stream(prompt, **keywords)) as events:
            async for event in events:
                show(event)
                if isinstance(event, RequestOutput):
                    return event
        raise OmniError("the request ended without a result")

    def stream(self, prompt: str, **keywords: Json) -> "BlockingRequest":
        """Run one prompt and iterate over its events. Leaving the iteration aborts the request."""
        running = self._open().stream(prompt, **keywords)
        return BlockingRequest(running, self._events(running), self._wait)

    def _events(self, running: RunningRequest) -> Generator[RequestEvent, None, None]:
        try:
            while True:
                event = self._wait(_next(running))
                yield event
                if isinstance(event, RequestOutput):
                    return
        finally:
            self._wait(running.aclose())

    def call(
        self,
        stage: str,
        method: str,
        args: Mapping[str, Json] | None = None,
        *,
        replicas: Sequence[int] | None = None,
        timeout_s: float = 30.0,
    ) -> Mapping[int, Json]:
        """RPC to all or some replicas of a stage; the answers by replica. See `omni.pipeline.Pipeline.call`."""
        call = self._open().call(StageName(stage), method, args, replicas=replicas, timeout_s=timeout_s)
        return self._wait(call)

    def status(self) -> PipelineStatus:
        return self._wait(self._open().status())

    def _open(self) -> AsyncOmni:
        if self._ended or not self._thread.is_alive():
            raise _closed()
        return self._omni

    def close(self) -> None:
        """End every stage. Safe to call twice, and from several threads."""
        with self._closing:
            if not self._ended and self._thread.is_alive():
                try:
                    self._wait(self._omni.stop())
                finally:
                    self._end_loop()

    def _end_loop(self) -> None:
        with self._ending:
            self._ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for ended in list(self._waiting):
            ended.set()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BlockingRequest(Iterator[RequestEvent]):
    """A request that runs: an iterator over its events, which also takes updates. Dropping or closing it aborts the
    request."""

    def __init__(
        self, running: RunningRequest, events: Generator[RequestEvent, None, None], wait: Callable[..., EventId]
    ) -> None:
        self._running = running
        self._events = events
        self._wait = wait

    def __next__(self) -> RequestEvent:
        return next(self._events)

    def close(self) -> None:
        """Leave the iteration."""
        self._events.close()

    def update(self, prompt: str | None = None, **change: Json) -> EventId:
        """Change the request; the update's event. What comes of it is told by `StageUpdated` events of the iteration.
        Arguments are those of `omni.running.RunningRequest.update`."""
        return self._wait(self._running.update(prompt, **change))


def _closed() -> ShuttingDown:
    return ShuttingDown("this Omni is closed, or of another process; make another one")


async def _next(events: AsyncGenerator[RequestEvent, None]) -> RequestEvent:
    return await anext(events)


async def _gather(
    work: Sequence[Coroutine[None, None, RequestOutput]],
) -> list[RequestOutput | BaseException]:
    return await asyncio.gather(*work, return_exceptions=True)


class _Bars:
    """A rich progress display: one bar for the requests and one for the steps of whatever stage reports them. On stderr,
    and only if that is a terminal."""

    def __init__(self, total: int, enabled: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._bars = Progress(console=console, disable=not enabled or not console.is_terminal, transient=True)
        self._requests = self._bars.add_task("requests", total=total)
        self._steps = self._bars.add_task("steps", total=None)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, event: RequestEvent) -> None:
        if isinstance(event, StageProgress):
            self._bars.update(self._steps, description=event.stage, completed=event.step, total=event.total)
        elif isinstance(event, StageDone):
            self._bars.update(self._steps, description=f"{event.stage} done")
        elif isinstance(event, RequestOutput):
            self._bars.advance(self._requests)
