"""The thin shell around `MasterCore`: one thread, one uvloop loop, two ROUTER sockets. No decisions are made here.

    frames  -> events -> core.handle -> actions -> frames, and news for the caller's thread

The thread owns the core; others talk to it through `post` (a bounded queue) and `ask` (a question answered in the
thread). News leave in batches through a bounded queue; while that is full, no data is read from the stages, so that a
caller that stalls slows the stages down instead of filling memory.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeVar

import janus
import msgspec
import uvloop
import zmq

from omni.core import MasterCore
from omni.events import (
    Action,
    CallDone,
    ControlReceived,
    DataReceived,
    Errored,
    Event,
    JunkReceived,
    MembershipChanged,
    PeerGone,
    SendControl,
    SendData,
    StopAsked,
    Submitted,
    Tell,
    Tick,
)
from omni.outbox import Outbox
from proto.deploy import Deploy
from proto.errors import ErrorCode, ErrorInfo, ProtocolError, QueueFull, StartError
from proto.framing import CONTROL_DOWN, CONTROL_UP, DATA_DOWN, DATA_UP, MAX_CONTROL_BYTES
from proto.ids import StageName
from proto.messages import Call, CallReply, Failed, Heartbeat, Submit
from proto.sockets import Port, endpoint_of, is_loopback, split_endpoint, tune
from proto.tensors import Buffer

log = logging.getLogger("omni.master")

News = Tell | CallDone | MembershipChanged
T = TypeVar("T")

INBOX: Final = 4096
INBOX_BATCH: Final = 128
"""Events taken from the inbox in one go before the sockets get their turn."""

NEWS_BATCHES: Final = 1024
LAST_WORDS_MS: Final = 200
"""How long the stages' Shutdown may take to leave this process."""

ROUTER_PARTS: Final = 2  # identity and header


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the sockets listen, with the ports that the system picked."""

    control: str
    data: str


class MasterShell:
    """`start` returns when the sockets are bound; `stop` when the thread has ended. Both are called once, by one thread."""

    def __init__(self, deploy: Deploy) -> None:
        self.deploy = deploy
        self.news: janus.Queue[list[News]] = janus.Queue(NEWS_BATCHES)
        self._inbox: janus.Queue[Event] = janus.Queue(INBOX)
        self._bound: Future[Endpoints] = Future()
        self._thread = threading.Thread(target=self._run, name="omni-master", daemon=True)
        self._pending: list[News] = []
        self._held: deque[list[News]] = deque()  # batches that did not fit into `news`
        self._timer: asyncio.TimerHandle | None = None

    # --- for other threads --------------------------------------------------------------------------------------------

    def start(self) -> Endpoints:
        """Bind and run. Raises `StartError` when an address can't be bound."""
        self._thread.start()
        return self._bound.result()

    def post(self, event: Event) -> None:
        """Hand an event to the core. Raises `QueueFull` when the thread does not keep up."""
        try:
            self._inbox.sync_q.put_nowait(event)
        except janus.SyncQueueFull:
            raise QueueFull("the master does not keep up with its callers; try again", retry_after_s=1.0) from None

    def ask(self, question: Callable[[MasterCore, float], T]) -> "Future[T]":
        """Evaluate `question(core, now)` in the thread. It must only look."""
        answer: Future[T] = Future()

        def evaluate() -> None:
            try:
                answer.set_result(question(self._core, time.monotonic()))
            except Exception as error:  # noqa: BLE001 - the asker gets whatever its question raised
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(evaluate)
        return answer

    def news_taken(self) -> None:
        """The caller's side took a batch: there may be room for held ones."""
        if self._held:
            self._loop.call_soon_threadsafe(self._flush)

    def stop(self, reason: str) -> None:
        """Fail what runs, tell every stage to go, close the sockets, end the thread."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended by itself: it could not bind
                self._loop.call_soon_threadsafe(self._end, reason)
            self._thread.join()

    def _end(self, reason: str) -> None:
        if not self._stopped.done():
            self._stopped.set_result(reason)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped: asyncio.Future[str] = self._loop.create_future()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            try:
                self._bind(context)
            except (zmq.ZMQError, ValueError, StartError) as error:
                self._bound.set_exception(StartError(self._why_not_bound(error)))
                return
            inbox = asyncio.create_task(self._read_inbox())
            reason = await self._stopped
            inbox.cancel()
            self._handle(StopAsked(reason))
            await self._inbox.aclose()
        finally:
            context.destroy(linger=LAST_WORDS_MS)

    def _bind(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        spec = self.deploy.master
        host, port = split_endpoint(spec.bind)
        if not is_loopback(host):
            if not spec.insecure:
                raise StartError(
                    "only loopback may be bound without authentication; set master.insecure: true to allow it"
                )
            log.warning("INSECURE: %s takes stages from any host, without authentication", spec.bind)
        sockets = []
        for wanted, frame_limit in ((port, MAX_CONTROL_BYTES), (spec.data_port, self.deploy.limits.max_frame_bytes)):
            sock = context.socket(zmq.ROUTER)
            tune(sock, max_frame_bytes=frame_limit, ipv6=":" in host)
            sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
            sock.bind(f"tcp://{host}:{wanted or '*'}")
            sockets.append(sock)
        endpoints = Endpoints(*map(endpoint_of, sockets))
        _, data_port = split_endpoint(endpoints.data)
        self._core = MasterCore(
            self.deploy,
            new_session=lambda: secrets.token_urlsafe(24),
            config_hash=self._config_hash,
            data_port=data_port,
            now=time.monotonic(),
        )
        self._control = Outbox(
            Port(sockets[0], self._loop, self._on_control, ROUTER_PARTS), self._loop, self._peer_gone
        )
        self._data = Outbox(Port(sockets[1], self._loop, self._on_data, ROUTER_PARTS), self._loop, self._peer_gone)
        self._bound.set_result(endpoints)

    def _why_not_bound(self, error: Exception) -> str:
        spec = self.deploy.master
        if not isinstance(error, zmq.ZMQError):
            return f"master.bind {spec.bind}: {error}"
        data = f" (or master.data_port {spec.data_port})" if spec.data_port else ""
        return (
            f"master.bind {spec.bind}{data}: {error.strerror}; another omni-master may run here:"
            " end it, or set master.bind to a free address (port 0 picks one)"
        )

    def _config_hash(self, stage: StageName) -> str:
        return hashlib.sha256(msgspec.msgpack.encode(self.deploy.stages[stage])).hexdigest()[:16]

    # --- events -------------------------------------------------------------------------------------------------------

    async def _read_inbox(self) -> None:
        queue = self._inbox.async_q
        while True:
            self._handle(await queue.get(), rearm=False)
            with contextlib.suppress(janus.AsyncQueueEmpty):
                for _ in range(INBOX_BATCH):
                    self._handle(queue.get_nowait(), rearm=False)
            self._arm()
            await asyncio.sleep(0)  # the sockets' turn

    def _on_control(self, frames: list[Buffer]) -> None:
        peer = bytes(frames[0])
        try:
            message, _ = CONTROL_UP.decode(frames[1:])
        except ProtocolError as error:
            self._handle(JunkReceived(peer, str(error)))
            return
        self._handle(ControlReceived(peer, message), rearm=not isinstance(message, Heartbeat))

    def _on_data(self, frames: list[Buffer]) -> None:
        peer = bytes(frames[0])
        try:
            message, tensors = DATA_UP.decode(frames[1:])
        except ProtocolError as error:
            self._handle(JunkReceived(peer, str(error)))
            return
        self._handle(DataReceived(peer, message, tensors), rearm=False)

    def _peer_gone(self, peer: bytes, reason: str) -> None:
        self._handle(PeerGone(peer, reason))

    def _handle(self, event: Event, *, rearm: bool = True) -> None:
        try:
            for action in self._core.handle(event, time.monotonic()):
                self._carry_out(action)
        except Exception as error:  # one event that breaks a rule must not end the service for all others
            log.exception("the master could not handle %s", type(event).__name__)
            if isinstance(event, Submitted):
                text = f"the master failed on this request: {type(error).__name__}: {error}"
                self._carry_out(Tell(event.request, Errored(ErrorInfo(ErrorCode.INTERNAL, text))))
        if rearm:
            self._arm()

    def _arm(self) -> None:
        """See to it that a Tick comes in time. One that comes early does no harm, so only earlier times are armed."""
        at = self._core.deadline()
        if at is None:
            return
        when = self._loop.time() + max(0.0, at - time.monotonic())
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._handle(Tick())

    # --- actions ------------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, SendData):
            try:
                frames = DATA_DOWN.encode(action.message, action.tensors)
            except ProtocolError as error:
                self._undeliverable(action, error)
                return
            self._data.send(action.peer, frames)
        elif isinstance(action, SendControl):
            try:
                frames = CONTROL_DOWN.encode(action.message)
            except ProtocolError as error:
                self._undeliverable(action, error)
                return
            self._control.send(action.peer, frames)
        else:
            if not self._pending:
                self._loop.call_soon(self._flush)
            self._pending.append(action)

    def _undeliverable(self, action: SendData | SendControl, error: ProtocolError) -> None:
        """What is too large to be sent is answered as its receiver would: with a failure, of this request or call alone."""
        log.error("%s", error)
        message = action.message
        if isinstance(message, Submit):
            failed = Failed(request=message.request, epoch=message.epoch, seq=0, error=error.info)
            self._loop.call_soon(self._handle, DataReceived(action.peer, failed))
        elif isinstance(message, Call):
            reply = CallReply(epoch=message.epoch, call=message.call, ok=False, error=str(error))
            self._loop.call_soon(self._handle, ControlReceived(action.peer, reply))

    def _flush(self) -> None:
        """Give news to the caller's side, in order, and hold the stages back while that has no room."""
        if self._pending:
            self._held.append(self._pending)
            self._pending = []
        while self._held:
            try:
                self.news.sync_q.put_nowait(self._held[0])
            except janus.SyncQueueFull:
                self._data.port.pause()
                return
            self._held.popleft()
        self._data.port.resume()
