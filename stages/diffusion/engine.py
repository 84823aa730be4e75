"""The diffusion engine: stock pipelines, one request at a time, one denoising step per `step`.

A request is checked when it comes, waits in order, starts, and then advances from one step boundary to the next. Between
two calls of the engine nothing runs: the request at work is parked at a boundary, so an abort takes effect there at once.

Invariant: at most one fiber is alive, and `_running` is its request.
"""

import logging
from collections import deque
from collections.abc import Mapping

import msgspec
import torch

from proto.errors import ErrorCode, ErrorInfo, InvalidRequest
from proto.ids import RequestId
from proto.messages import Progress, StageInfo, Started
from proto.params import Json
from stages.diffusion import library
from stages.diffusion.arguments import check
from stages.diffusion.faults import to_error
from stages.diffusion.loading import Painter, load_painter
from stages.diffusion.request import PaintRequest
from stages.engine import Emit, EngineStats, Event, Failed, Job, LoadContext

log = logging.getLogger(__name__)

METHODS = ("info", "stats")


class DiffusionEngine:
    """Implements `stages.engine.Engine`."""

    def __init__(self) -> None:
        self._painter: Painter | None = None
        self._queue: deque[PaintRequest] = deque()
        self._running: PaintRequest | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._counts = {"finished": 0, "failed": 0, "aborted": 0, "steps": 0, "forwards": 0}

    def load(self, context: LoadContext) -> StageInfo:
        """Raises `StartError` if the folder cannot be loaded."""
        self._painter = load_painter(context)
        self._hooks = [
            part.register_forward_pre_hook(self._on_forward) for part in library.denoisers(self._painter.pipe)
        ]
        context.report("ready", 1.0)
        return self._painter.info

    @property
    def has_work(self) -> bool:
        return self._running is not None or bool(self._queue)

    def submit(self, job: Job) -> None:
        """Raises `InvalidRequest` naming the field, if the pipeline could not run the job."""
        painter = self._loaded()
        self._queue.append(PaintRequest(job, check(job, painter), painter))

    def step(self) -> list[Event]:
        """Start the next request, or take the one at work to its next step boundary or its end."""
        if self._running is not None:
            return [self._advance(self._running)]
        if not self._queue:
            return []
        self._running = self._queue.popleft()
        return [Emit(self._running.job.request, "", Started(queue_s=self._running.start()))]

    def abort(self, request: RequestId) -> None:
        """Forget the request, waiting or at work. Unknown ones are done already."""
        if self._running is not None and self._running.job.request == request:
            self._running.abort()
            self._running = None
            self._counts["aborted"] += 1
            return
        kept = [waiting for waiting in self._queue if waiting.job.request != request]
        self._counts["aborted"] += len(self._queue) - len(kept)
        self._queue = deque(kept)

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        """`info`: what the stage said when it loaded. `stats`: counts since then."""
        if method == "info":
            return msgspec.to_builtins(self._loaded().info)
        if method == "stats":
            return {**msgspec.to_builtins(self.stats()), **self._counts}
        raise InvalidRequest(f"no method {method!r}; a diffusion stage has {', '.join(METHODS)}", field="method")

    def stats(self) -> EngineStats:
        return EngineStats(queued=len(self._queue), running=int(self._running is not None))

    def close(self) -> None:
        """End the request at work and give the weights back."""
        if self._running is not None:
            self._running.abort()
        self._running = None
        self._queue.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._painter = None

    def _advance(self, running: PaintRequest) -> Event:
        request = running.job.request
        try:
            reached = running.advance()
        except Exception as error:  # noqa: BLE001 - the fault boundary of a request: the next one goes on
            self._running = None
            self._counts["failed"] += 1
            return Failed(request, self._explain(error, running))
        if isinstance(reached, Progress):
            self._counts["steps"] += 1
            return Emit(request, "", reached)
        self._running = None
        self._counts["finished"] += 1
        return reached

    @staticmethod
    def _explain(error: Exception, running: PaintRequest) -> ErrorInfo:
        painter = running.painter
        info = to_error(error, painter.stage, painter.info.model, running.steps)
        if info.code is ErrorCode.INVALID_REQUEST:
            log.info("stage %s: request %s: %s", painter.stage, running.job.request, info.message)
        else:
            log.warning("stage %s: request %s failed", painter.stage, running.job.request, exc_info=error)
        return info

    def _on_forward(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._counts["forwards"] += 1
        if self._running is not None:
            self._running.saw_forward()

    def _loaded(self) -> Painter:
        if self._painter is None:
            raise RuntimeError("the engine has not been loaded, or has been closed")
        return self._painter
