"""One session of a worker: from the master's Welcome to the end of this epoch.

It reads messages from the master and reports from the engine's thread, and passes each on to the other side. Whatever
happens to the requests in between is `stages.requests`'s; payloads are `stages.payload`'s.

Invariant: a session ends once, for one reason (`Ended`), and says Goodbye; what ended it decides what the worker does next.
"""

import asyncio
import contextlib
import enum
import logging
import os
import resource
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Final

import janus

from proto.errors import ErrorCode, ErrorInfo, ProtocolError
from proto.ids import CallId, StageName
from proto.messages import (
    Abort,
    Aborted,
    BeatAck,
    Call,
    CallReply,
    ControlDown,
    DataDown,
    Drain,
    Goodbye,
    Heartbeat,
    InfoChanged,
    Leaving,
    LoadFailed,
    LoadProgress,
    Ready,
    Refuse,
    Shutdown,
    StageInfo,
    Submit,
    Update,
    Welcome,
)
from proto.tensors import WireTensor
from stages.connection import Connection, Handlers
from stages.engine import Emit, Failed, Publish
from stages.engine_thread import (
    Answer,
    Ask,
    Broken,
    Changed,
    Command,
    Done,
    Dropped,
    EngineThread,
    Loaded,
    Loading,
    Report,
)
from stages.payload.relay import MasterRelay
from stages.payload.store import PayloadStore
from stages.requests import Requests

log = logging.getLogger("omni.stage")

SILENT_BEATS: Final = 10
"""Heartbeats without an acknowledgement after which the master is taken for gone."""

MIN_SILENCE_S: Final = 5.0
LAST_WORDS_S: Final = 2.0
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """`devices` override the deploy's; `replica` None takes any free slot. A worker that does not `exit_with_master` waits
    for another one, with its model loaded. `exit_when_lost` ends it also when a master is silent or has been replaced; the
    workers of a launcher need not guess, since it ends them itself."""

    master: str
    stage: StageName
    replica: int | None = None
    devices: tuple[str, ...] = ()
    exit_with_master: bool = False
    exit_when_lost: bool = False


class Ended(enum.Enum):
    """Why a session ended."""

    MASTER_LOST = "lost"  # join again
    DISMISSED = "told to go"  # by a master that ends
    LEFT = "stopped on its own host"
    OUTDATED = "the stage's config has changed"
    BROKEN = "broken"
    NOT_LOADED = "not loaded"


class StageSession:
    """From Welcome to the end of this epoch."""

    def __init__(
        self,
        connection: Connection,
        welcome: Welcome,
        engine: EngineThread,
        loaded: Loaded | None,
        options: WorkerOptions,
    ) -> None:
        self._connection = connection
        self._welcome = welcome
        self._engine = engine
        self._loaded = loaded
        self._options = options
        self._stage = options.stage
        self._failed_to_load = False
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Ended] = self._loop.create_future()
        self._draining = False
        self._quiet = asyncio.Event()
        self._last_ack = self._loop.time()
        self._beats_unanswered = 0
        self._beat_answered = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        epoch = welcome.epoch
        self._store = PayloadStore(options.stage, welcome.replica, epoch, welcome.spec.edge.lease)
        self._relay = MasterRelay(
            options.stage, epoch, self._store, connection.send_data, welcome.limits.max_frame_bytes
        )
        self._requests = Requests(
            options.stage, welcome.spec, epoch, self._relay, self._to_engine, connection.send_data, self._aborted
        )
        self._overdue: dict[CallId, asyncio.TimerHandle] = {}  # calls without an answer yet
        self._payload_messages: asyncio.Queue[tuple[DataDown, Sequence[WireTensor]]] = asyncio.Queue()

    async def serve(self, on_loaded: Callable[[Loaded], None]) -> Ended:
        self._on_loaded = on_loaded
        if self._loaded is not None:
            self._say_ready(self._engine.info or self._loaded.info, 0.0)
        self._connection.serve(Handlers(self._control, self._data))
        self._start(self._read_reports())
        self._start(self._read_payload_messages())
        self._beat()
        try:
            return await self._ended
        finally:
            self._timer.cancel()
            for timer in self._overdue.values():
                timer.cancel()
            for task in self._tasks:
                task.cancel()
            self._connection.send_control(Goodbye(epoch=self._welcome.epoch, reason=self._ended.result().value))

    def end(self, why: Ended) -> None:
        if not self._ended.done():
            self._ended.set_result(why)

    def drain(self) -> None:
        """Take no new work, finish what is here, then leave. While still loading there is nothing to finish."""
        if self._draining:
            return
        self._draining = True
        self._connection.send_control(Leaving(epoch=self._welcome.epoch))
        if self._loaded is None:
            self.end(Ended.LEFT)
        else:
            self._start(self._leave())

    async def _leave(self) -> None:
        """Work may be under way to here until the master has heard of our leaving, and results under way to the master
        until it has handled them: so leave when it has answered to both."""
        self._send_beat()
        await self._soon(self._all_beats_answered())
        while True:
            self._quiet.clear()
            if self._busy():
                await self._quiet.wait()
            await self._soon(self._connection.settle())
            if not self._busy():
                self.end(Ended.LEFT)
                return

    async def _all_beats_answered(self) -> None:
        while self._beats_unanswered:
            self._beat_answered.clear()
            await self._beat_answered.wait()

    @staticmethod
    async def _soon(answer: Coroutine[None, None, None]) -> None:
        """Wait for the master's answer, but not for that of a master that is gone."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answer, LAST_WORDS_S)

    def _look_if_quiet(self) -> None:
        if self._draining and not self._busy():
            self._quiet.set()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Run something for as long as the session lasts. If it fails, the session does."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _busy(self) -> bool:
        return len(self._requests) > 0 or len(self._store) > 0

    def close(self) -> None:
        self._requests.close()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the worker's loop failed", exc_info=error)
            self.end(Ended.BROKEN)

    # --- liveness -----------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Report progress, and look whether the master still answers."""
        every = self._welcome.heartbeat_s
        self._send_beat()
        self._look_if_quiet()
        if self._loop.time() - self._last_ack > max(MIN_SILENCE_S, SILENT_BEATS * every):
            self.end(Ended.MASTER_LOST)
        self._timer = self._loop.call_later(every, self._beat)

    def _send_beat(self) -> None:
        engine = self._engine
        beat = Heartbeat(
            epoch=self._welcome.epoch,
            steps=engine.steps,
            queued=engine.queued,
            running=engine.running,
            step_s=engine.step_s,
            leases=len(self._store),
            lease_bytes=self._store.nbytes,
            rss_bytes=_rss(),
            figures=engine.figures,
        )
        self._connection.send_control(beat)
        self._connection.stay_attached()
        self._beats_unanswered += 1

    # --- from the master ----------------------------------------------------------------------------------------------

    def _control(self, message: ControlDown) -> None:
        if isinstance(message, BeatAck):
            self._last_ack = self._loop.time()
            self._beats_unanswered -= 1
            self._beat_answered.set()
        elif isinstance(message, Abort):
            self._requests.abort(message.request)
        elif isinstance(message, Call):
            self._ask(message)
        elif isinstance(message, Drain):
            self.drain()
        elif isinstance(message, Shutdown):
            log.info("told to go: %s", message.reason)
            if self._failed_to_load:
                self.end(Ended.NOT_LOADED)
            else:
                self.end(Ended.DISMISSED if self._options.exit_with_master else Ended.MASTER_LOST)
        elif isinstance(message, Refuse):
            self.end(Ended.MASTER_LOST)  # another master than the one that welcomed us

    def _data(self, message: DataDown, tensors: Sequence[WireTensor]) -> None:
        if isinstance(message, Submit):
            if message.epoch == self._welcome.epoch:
                self._requests.submit(message, tensors)
        elif isinstance(message, Update):
            if message.epoch == self._welcome.epoch:
                self._requests.update(message)
        else:
            self._payload_messages.put_nowait((message, tensors))

    async def _read_payload_messages(self) -> None:
        while True:
            message, tensors = await self._payload_messages.get()
            await self._relay.handle(message, tensors)  # type: ignore[arg-type] # the lane has nothing else

    def _ask(self, message: Call) -> None:
        ask = Ask(message.call, message.method, message.args)
        if not self._to_engine(ask):
            self._reply(Answer(message.call, False, None, "the engine takes no more commands now"))
        elif message.within_s is not None:
            self._overdue[ask.call] = self._loop.call_later(message.within_s, self._late, ask, message.within_s)

    def _late(self, ask: Ask, within_s: float) -> None:
        """Its deadline has passed without an answer. One that has not begun never will."""
        del self._overdue[ask.call]
        if ask.claim():
            text = f"not run: the engine was busy with a step or another call for the {within_s:g} s of its deadline"
        else:
            text = f"begun, and not done within the {within_s:g} s of its deadline; it is not broken off"
        self._reply(Answer(ask.call, False, None, text, ErrorCode.DEADLINE))

    # --- to and from the engine ---------------------------------------------------------------------------------------

    def _to_engine(self, command: Command) -> bool:
        try:
            self._engine.commands.async_q.put_nowait(command)
        except janus.AsyncQueueFull:
            return False
        return True

    async def _read_reports(self) -> None:
        queue = self._engine.reports.async_q
        while True:
            for report in await queue.get():
                await self._report(report)
            self._look_if_quiet()

    async def _report(self, report: Report) -> None:
        if isinstance(report, Emit):
            await self._requests.emit(report)
        elif isinstance(report, Done):
            await self._requests.finish(report)
        elif isinstance(report, Publish):
            await self._requests.publish_event(report)
        elif isinstance(report, Failed):
            await self._requests.fail(report)
        elif isinstance(report, Dropped):
            self._requests.dropped(report.request)
        elif isinstance(report, Changed):
            self._connection.send_control(InfoChanged(epoch=self._welcome.epoch, info=report.info))
        elif isinstance(report, Answer):
            if (timer := self._overdue.pop(report.call, None)) is not None:
                timer.cancel()
            self._reply(report)
        elif isinstance(report, Loading):
            self._connection.send_control(
                LoadProgress(epoch=self._welcome.epoch, note=report.note[:4096], done=report.done)
            )
        elif isinstance(report, Loaded):
            self._loaded = report
            self._on_loaded(report)
            info = report.info
            log.info("ready after %.1f s (%s, %s on %s)", report.seconds, info.model, info.dtype, info.device)
            self._say_ready(info, report.seconds)
        else:
            await self._give_up(report)

    def _say_ready(self, info: StageInfo, load_s: float) -> None:
        self._connection.send_control(Ready(epoch=self._welcome.epoch, info=info, load_s=load_s))

    async def _give_up(self, broken: Broken) -> None:
        """The engine is of no more use. Before the process ends, everybody who waits is told."""
        epoch = self._welcome.epoch
        if broken.loaded:
            text = f"the engine is broken: {broken.error}"
            await self._requests.fail_all(ErrorInfo(ErrorCode.STAGE_FAILED, text, self._stage))
            await self._soon(self._connection.settle())
            self.end(Ended.BROKEN)
        else:
            self._failed_to_load = True
            log.error("could not load: %s", broken.error)
            self._connection.send_control(LoadFailed(epoch=epoch, error=broken.error[:4096]))
            # The master answers with Shutdown, so it knows the reason before it sees this process end.
            self._loop.call_later(LAST_WORDS_S, self.end, Ended.NOT_LOADED)

    def _reply(self, answer: Answer) -> None:
        epoch, call = self._welcome.epoch, answer.call
        try:
            self._connection.send_control(
                CallReply(
                    epoch=epoch,
                    call=call,
                    ok=answer.ok,
                    value=answer.value,
                    error=answer.error[:4096],
                    code=answer.code,
                    field=answer.field,
                )
            )
        except (ValueError, ProtocolError) as error:
            text = f"the engine's answer cannot be sent: {error}"[:4096]
            self._connection.send_control(CallReply(epoch=epoch, call=call, ok=False, error=text))

    def _aborted(self, message: Aborted) -> None:
        self._connection.send_control(message)


def _rss() -> int:
    """Resident bytes of this process now, where the system says so, else their maximum."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * PAGE
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
