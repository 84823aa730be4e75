"""The thread that owns the engine and the device. Commands in and reports out through bounded janus queues.

It blocks on the command queue while the engine has nothing to do, and looks at it between any two steps otherwise; so it
never polls, and nothing waits longer than one step. Counters are plain numbers that the I/O loop reads for heartbeats.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import janus
import msgspec

from proto.calls import offering
from proto.errors import ErrorCode, ErrorInfo, InvalidRequest, OmniError
from proto.figures import Figures, Histogram
from proto.ids import CallId, EventId, RequestId
from proto.messages import Change, StageInfo, Started, Timings, Updated, UpdateState
from proto.params import Json, set_fields
from stages.engine import Emit, Engine, Event, Failed, Finished, Interactive, Job, LoadContext, Measured, Publish

log = logging.getLogger("omni.stage")

COMMANDS: Final = 4096
REPORTS: Final = 256
SMOOTHING: Final = 0.1
MEASURE_S: Final = 0.2
"""How old the figures of a busy engine may be."""


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    job: Job
    received_at: float
    pull_s: float


@dataclass(frozen=True, slots=True)
class Alter:
    """An update of a request that was `Run` before."""

    request: RequestId
    event: EventId
    change: Change


@dataclass(frozen=True, slots=True)
class Drop:
    request: RequestId


@dataclass(frozen=True, slots=True)
class DropAll:
    """The master is gone: nobody wants any of it."""


@dataclass(slots=True)
class Ask:
    """A call. Either the engine's thread claims it, to run it, or the I/O loop does, because its deadline has passed."""

    call: CallId
    method: str
    args: Mapping[str, Json]
    _claimed: threading.Lock = field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """Whether the caller is the first; whoever is not must leave the call alone."""
        return self._claimed.acquire(blocking=False)


@dataclass(frozen=True, slots=True)
class Quit:
    pass


Command = Run | Alter | Drop | DropAll | Ask | Quit


# --- reports ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loading:
    note: str
    done: float | None


@dataclass(frozen=True, slots=True)
class Loaded:
    info: StageInfo
    seconds: float


@dataclass(frozen=True, slots=True)
class Broken:
    """The engine could not load, or a step raised: this process is of no more use."""

    error: str
    loaded: bool


@dataclass(frozen=True, slots=True)
class Done:
    """`Finished`, with its times."""

    finished: Finished
    timings: Timings


@dataclass(frozen=True, slots=True)
class Dropped:
    request: RequestId


@dataclass(frozen=True, slots=True)
class Changed:
    """A call has changed what the stage offers. Comes before its answer."""

    info: StageInfo


@dataclass(frozen=True, slots=True)
class Answer:
    call: CallId
    ok: bool
    value: Json
    error: str
    code: ErrorCode | None = None
    field: str | None = None


Report = Loading | Loaded | Broken | Done | Dropped | Changed | Answer | Emit | Publish | Failed


@dataclass(slots=True)
class _Times:
    received_at: float
    pull_s: float
    started_at: float | None = None


class EngineThread:
    """`make_engine` runs in the thread, because it imports what the engine needs (torch)."""

    def __init__(self, make_engine: Callable[[], Engine], context: LoadContext) -> None:
        self.commands: janus.Queue[Command] = janus.Queue(COMMANDS)
        self.reports: janus.Queue[list[Report]] = janus.Queue(REPORTS)
        self.steps = 0
        self.queued = 0
        self.running = 0
        self.step_s = 0.0
        self.info: StageInfo | None = None  # since it has loaded: what the stage offers now, whatever reports were lost
        self.broken: Broken | None = None  # set before it is reported: a report may be lost with its session
        self._make = make_engine
        self._context = context
        self.figures = Figures()
        self._times: dict[RequestId, _Times] = {}
        self._queue = Histogram("queue_seconds")
        self._measure_at = 0.0
        self._woken = False  # by the engine's own clock
        self._out: list[Report] = []
        self._breaking = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="omni-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._load()
            self._serve(engine)
            engine.close()
        except BaseException as error:  # SystemExit too: a library may raise it, and the thread ends by it all the same
            if self.info is not None or not isinstance(error, OmniError):  # the words of a failed load are enough
                log.exception("the engine of stage %s is broken", self._context.stage)
            self._break(str(error) if isinstance(error, OmniError) else f"{type(error).__name__}: {error}", self._out)

    def _load(self) -> Engine:
        started = time.monotonic()
        engine = self._make()
        info = engine.load(self._context)
        _check_defaults(self._context, info)
        self.info = info
        self._report(Loaded(info, time.monotonic() - started))
        return engine

    def report_broken(self, reason: str) -> None:
        """For `LoadContext.broken`, from any thread. The engine's own may be stuck, and ends with the process."""
        log.error("stage %s: %s", self._context.stage, reason)
        self._break(reason, [])

    def _break(self, error: str, last_words: list[Report]) -> None:
        """Once: what is found to be broken first is the reason, and the rest follows from it."""
        with self._breaking:
            if self.broken is not None:
                return
            self.broken = Broken(error, self.info is not None)
        with contextlib.suppress(janus.SyncQueueShutDown):
            self.reports.sync_q.put([*last_words, self.broken])

    def report_loading(self, note: str, done: float | None) -> None:
        """For `LoadContext.report`."""
        self._report(Loading(note, done))

    def _report(self, report: Report) -> None:
        self.reports.sync_q.put([report])

    def _serve(self, engine: Engine) -> None:
        commands = self.commands.sync_q
        while True:
            if not engine.has_work and not self._obey_next(engine):
                return
            with contextlib.suppress(janus.SyncQueueEmpty):
                while True:
                    if not self._obey(engine, commands.get_nowait()):
                        return
            if engine.has_work or self._woken:
                self._step(engine)
            stats = engine.stats()
            self.queued, self.running = stats.queued, stats.running
            self._measure(engine)
            if self._out:
                self.reports.sync_q.put(self._out)
                self._out = []

    def _measure(self, engine: Engine) -> None:
        """Not at every step, but always before it waits."""
        now = time.monotonic()
        if now < self._measure_at and engine.has_work:
            return
        self._measure_at = now + MEASURE_S
        own = engine.figures() if isinstance(engine, Measured) else Figures()
        self.figures = Figures(own.numbers, {**own.spreads, self._queue.name: self._queue.spread})

    def _obey_next(self, engine: Engine) -> bool:
        """Wait for a command, but not longer than until the engine has work by itself."""
        self._woken = False
        wait_s = engine.wake_s() if isinstance(engine, Interactive) else None
        try:
            command = self.commands.sync_q.get(timeout=wait_s)
        except janus.SyncQueueEmpty:
            self._woken = True
            return True
        return self._obey(engine, command)

    def _step(self, engine: Engine) -> None:
        self._woken = False
        started = time.monotonic()
        events = engine.step()
        now = time.monotonic()
        self.steps += 1
        self.step_s += SMOOTHING * (now - started - self.step_s) if self.steps > 1 else now - started
        for event in events:
            self._event(event, started, now)

    def _event(self, event: Event, step_began: float, now: float) -> None:
        times = self._times.get(event.request)
        if times is None:
            return  # aborted, and the engine was in the middle of saying something about it
        if isinstance(event, Emit) and isinstance(event.part, Started):
            times.started_at = step_began  # it left the queue for this step, and has been worked on since
            event = Emit(event.request, event.output, Started(queue_s=step_began - times.received_at))
            self._queue.add(step_began - times.received_at)
        if isinstance(event, Finished):
            del self._times[event.request]
            started = times.received_at if times.started_at is None else times.started_at
            timings = Timings(started - times.received_at, now - started, times.pull_s, dict(event.detail))
            self._out.append(Done(event, timings))
            return
        if isinstance(event, Failed):
            del self._times[event.request]
        self._out.append(event)

    def _obey(self, engine: Engine, command: Command) -> bool:
        """Carry out one command; False ends the thread."""
        if isinstance(command, Run):
            self._submit(engine, command)
        elif isinstance(command, Alter):
            self._alter(engine, command)
        elif isinstance(command, Drop):
            if self._times.pop(command.request, None) is not None:
                engine.abort(command.request)
            self._out.append(Dropped(command.request))
        elif isinstance(command, DropAll):
            for request in list(self._times):
                engine.abort(request)
            self._times.clear()
        elif isinstance(command, Ask) and command.claim():
            self._ask(engine, command)
        return not isinstance(command, Quit)

    def _submit(self, engine: Engine, command: Run) -> None:
        request = command.job.request
        self._times[request] = _Times(command.received_at, command.pull_s)
        try:
            engine.submit(command.job)
        except Exception as error:  # noqa: BLE001 - a fault stays with its request
            del self._times[request]
            self._out.append(Failed(request, self._error(error)))

    def _alter(self, engine: Engine, command: Alter) -> None:
        """What the engine does not take is refused. A request that has ended has told its end already."""
        if command.request not in self._times:
            return
        try:
            if not isinstance(engine, Interactive):
                raise InvalidRequest(f"stage {self._context.stage}: its engine takes no updates of running requests")
            engine.update(command.request, command.event, command.change)
        except Exception as error:  # noqa: BLE001 - no fault of the request
            reason = self._error(error).message[:4096]
            refusal = Updated(event=command.event, state=UpdateState.REFUSED, reason=reason)
            self._out.append(Emit(command.request, "", refusal))

    def _ask(self, engine: Engine, command: Ask) -> None:
        try:
            value = engine.call(command.method, command.args)
        except Exception as error:  # noqa: BLE001 - the asker is told
            info = self._error(error)
            self._out.append(Answer(command.call, False, None, info.message, info.code, info.field))
            return
        offers = offering(command.method, value)
        if offers is not None and self.info is not None:
            loras, asleep = offers
            self.info = msgspec.structs.replace(self.info, loras=loras, asleep=asleep)
            self._out.append(Changed(self.info))
        self._out.append(Answer(command.call, True, value, ""))

    def _error(self, error: Exception) -> ErrorInfo:
        if isinstance(error, OmniError):
            return error.info
        log.error("stage %s: a request raised", self._context.stage, exc_info=error)
        return ErrorInfo(ErrorCode.STAGE_FAILED, f"{type(error).__name__}: {error}", self._context.stage)


def _check_defaults(context: LoadContext, info: StageInfo) -> None:
    """The deploy's defaults go with every request, so one that the model cannot take must stop the start."""
    if info.params is None:
        return
    for name in set_fields(context.spec.defaults):
        if name not in info.params and name != "extra":
            raise OmniError(
                f"stages.{context.stage}.defaults.{name}: {info.model} does not take it;"
                f" it takes: {', '.join(sorted(info.params))}",
                stage=context.stage,
                field=name,
            )
