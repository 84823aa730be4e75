"""`AsyncOmniEngine`: the caller's side of the master thread. It makes ids, posts requests and hands news to their streams.

Belongs to one event loop, the caller's; the orchestrator has its own loop in its own thread (`omni.shell`), and the two
talk through bounded janus queues. Invariant: every stream that was given out gets exactly one terminal news, also when
the master stops.
"""

import asyncio
import functools
import itertools
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from omni.core import MasterCore
from omni.events import (
    CallAsked,
    CallDone,
    Cancelled,
    ChildExited,
    Errored,
    MembershipChanged,
    PartArrived,
    Submitted,
    Tell,
    UpdateAsked,
)
from omni.graph import Graph
from omni.outputs import RequestEvent, RequestOutput
from omni.picture_inputs import with_arrays
from omni.planning import Planner
from omni.request import GenerateRequest, UpdateRequest
from omni.running import RunningRequest
from omni.shell import Endpoints, MasterShell, News
from omni.snapshot import pipeline_status
from omni.status import PipelineStatus
from omni.stream import CallFailed, RequestStream
from omni.update_planning import Refused, plan_update
from omni.updates import OVER
from omni.waits import to_its_end
from proto.deploy import Deploy
from proto.errors import ErrorCode, ErrorInfo, InvalidRequest, QueueFull, ShuttingDown, StartError
from proto.ids import CallId, EventId, RequestId, StageName
from proto.messages import StageInfo, Updated, UpdateState
from proto.params import Json

log = logging.getLogger("omni.master")

MAX_CALL_S: Final = 86400.0

DEPARTURES: Final = 64
STOP_REASON: Final = "the master is shutting down"


@dataclass(frozen=True, slots=True)
class Readiness:
    """What the callers' side knows of the stages: their own words, and which are still missing."""

    infos: Mapping[StageName, StageInfo] = field(default_factory=dict)
    waiting: tuple[str, ...] = ("the master is starting",)

    @classmethod
    def of(cls, core: MasterCore, _now: float) -> "Readiness":
        infos = {name: info for name in core.graph.order if (info := core.members.info(name)) is not None}
        return cls(infos, tuple(core.members.waiting_for()))


class AsyncOmniEngine:
    def __init__(self, deploy: Deploy) -> None:
        self.deploy = deploy
        self.graph = Graph.build(deploy)
        self.planner = Planner(deploy, self.graph)
        self.readiness = Readiness()
        self._shell = MasterShell(deploy)
        self._streams: dict[RequestId, RequestStream] = {}
        self._calls: dict[CallId, asyncio.Future[CallDone]] = {}
        self._numbers = itertools.count(1)
        self._prefix = secrets.token_hex(4)
        self._listeners: list[Callable[[MembershipChanged], None]] = []
        # A stage may be gone before anybody waits for it; bounded, since later ones only matter to a start.
        self._departures: deque[MembershipChanged] = deque(maxlen=DEPARTURES)
        self._pump: asyncio.Task[None] | None = None
        self._ending: asyncio.Future[None] | None = None
        self._started = False
        self._stopping = False

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> Endpoints:
        """Bind the sockets and take part. Raises `StartError`. If it is cancelled, nothing stays bound."""
        if self._started:
            raise StartError("this pipeline was started before; make another one")
        self._started = True
        try:
            endpoints = await to_its_end(asyncio.to_thread(self._shell.start))
        except asyncio.CancelledError:
            await to_its_end(asyncio.to_thread(self._shell.stop, STOP_REASON))
            raise
        self._pump = asyncio.create_task(self._pump_news())
        return endpoints

    async def stop(self) -> None:
        """Fail what runs, tell the stages to go, close the sockets. Safe to call twice, and done even if cancelled."""
        if self._pump is None:
            return
        if self._ending is None:
            self._stopping = True
            self._ending = asyncio.ensure_future(self._stop(self._pump))
        await to_its_end(self._ending)

    async def _stop(self, pump: asyncio.Task[None]) -> None:
        await asyncio.to_thread(self._shell.stop, STOP_REASON)
        pump.cancel()
        for stream in list(self._streams.values()):
            if not stream.over:
                stream.push(Errored(ErrorInfo(ErrorCode.SHUTTING_DOWN, STOP_REASON)))
        for answer in self._calls.values():
            answer.cancel()
        await self._shell.news.aclose()

    def child_exited(self, event: ChildExited) -> None:
        """From any thread: a process that the launcher started has ended."""
        if not self._stopping:
            self._shell.post(event)

    async def wait_ready(self, on_progress: Callable[[str], None] | None = None) -> None:
        """Until every stage has its replicas. Raises `StartError` when one of them will not come up by itself."""
        changes: asyncio.Queue[MembershipChanged] = asyncio.Queue()
        self._listeners.append(changes.put_nowait)
        try:
            while True:
                await self._refresh()
                if not self.readiness.waiting:
                    self._departures.clear()
                    return
                if any(change.fatal for change in self._departures):
                    raise StartError("; ".join(change.line for change in self._departures))
                if on_progress is not None:
                    for line in self.readiness.waiting:
                        on_progress(line)
                await changes.get()
        finally:
            self._listeners.remove(changes.put_nowait)

    async def _refresh(self) -> None:
        self.readiness = await asyncio.wrap_future(self._shell.ask(Readiness.of))

    # --- requests -----------------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> RunningRequest:
        """See `omni.pipeline.Pipeline.generate`."""
        stream = RequestStream(RequestId(f"{self._prefix}-{next(self._numbers)}"))
        return RunningRequest(self._run(stream, request), stream.updates, functools.partial(self._update, stream))

    async def _run(self, stream: RequestStream, request: GenerateRequest) -> AsyncGenerator[RequestEvent, None]:
        self._check_it_runs()
        stream.plan = plan = self.planner.plan(await with_arrays(request), self.readiness.infos)
        self._shell.post(Submitted(stream.request, plan))
        self._streams[stream.request] = stream
        try:
            while True:
                event = await stream.next()
                yield event
                if isinstance(event, RequestOutput):
                    return
        finally:
            del self._streams[stream.request]
            if not stream.over:
                self._shell.post(Cancelled(stream.request))
            stream.over = True
            stream.updates.close(OVER)

    def _update(self, stream: RequestStream, asked: UpdateRequest) -> EventId:
        """See `RunningRequest.update`."""
        self._check_it_runs()
        if stream.plan is None:
            return self._refused(
                stream, asked, StageName(""), "the request has not begun; iterate over its events first"
            )
        try:
            task, change = plan_update(self.deploy, stream.plan, asked)
        except Refused as refused:
            return self._refused(stream, asked, refused.stage, refused.reason)
        if stream.over:
            return self._refused(stream, asked, task.stage, OVER)
        event, new = stream.updates.ask(asked)
        if new:
            try:
                self._shell.post(UpdateAsked(stream.request, event, task, change))
            except QueueFull:
                stream.updates.forget(event)
                raise
        return event

    @staticmethod
    def _refused(stream: RequestStream, asked: UpdateRequest, stage: StageName, reason: str) -> EventId:
        event, new = stream.updates.ask(asked)
        if new:
            part = Updated(event=event, state=UpdateState.REFUSED, reason=reason[:4096])
            stream.push(PartArrived(stage, "", part))
        return event

    async def call(
        self,
        stage: StageName,
        method: str,
        args: Mapping[str, Json] | None = None,
        *,
        replicas: Sequence[int] | None = None,
        timeout_s: float = 30.0,
    ) -> Mapping[int, Json]:
        """See `omni.pipeline.Pipeline.call`."""
        self._check_it_runs()
        if not 0 < timeout_s <= MAX_CALL_S:
            problem = (
                f"timeout_s: a call's deadline is more than 0 and at most {MAX_CALL_S:g} seconds, not {timeout_s!r}"
            )
            raise InvalidRequest(problem, field="timeout_s")
        call = CallId(next(self._numbers))
        answer: asyncio.Future[CallDone] = asyncio.get_running_loop().create_future()
        self._calls[call] = answer
        try:
            self._shell.post(CallAsked(call, stage, method, args or {}, replicas, timeout_s))
            done = await answer
        finally:
            del self._calls[call]
        if done.errors:
            raise CallFailed(done, stage, method)
        return done.values

    async def status(self) -> PipelineStatus:
        self._check_it_runs()
        return await asyncio.wrap_future(self._shell.ask(pipeline_status))

    def _check_it_runs(self) -> None:
        if self._stopping:
            raise ShuttingDown(STOP_REASON)
        if self._pump is None:
            raise StartError("this pipeline is not started; use `async with`, or await start() first")

    # --- news ---------------------------------------------------------------------------------------------------------

    async def _pump_news(self) -> None:
        queue = self._shell.news.async_q
        while True:
            batch = await queue.get()
            self._shell.news_taken()
            for news in batch:
                self._route(news)
            if any(isinstance(news, MembershipChanged) for news in batch):
                await self._refresh()

    def _route(self, news: News) -> None:
        if isinstance(news, Tell):
            stream = self._streams.get(news.request)
            if stream is not None:
                stream.push(news.news)
        elif isinstance(news, CallDone):
            answer = self._calls.get(news.call)
            if answer is not None and not answer.done():
                answer.set_result(news)
        else:
            log.log(logging.DEBUG if news.detail else logging.INFO, "%s", news.line)
            if news.fatal or " left: " in news.line:
                self._departures.append(news)
            for listener in self._listeners:
                listener(news)
