"""A worker's two sockets to its master: the handshake, and typed messages both ways. No decisions about requests here.

Each join has sockets of its own: nothing of an earlier session can be heard in, or sent into, a later one.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import zmq

from proto.errors import ProtocolError, StartError
from proto.framing import CONTROL_DOWN, CONTROL_UP, DATA_DOWN, DATA_UP, MAX_CONTROL_BYTES
from proto.messages import Attach, Attached, ControlDown, ControlUp, DataDown, DataUp, Goodbye, Hello, Refuse, Welcome
from proto.sockets import Port, Sent, split_endpoint, tune
from proto.tensors import Buffer, WireTensor, check_frame

log = logging.getLogger("omni.stage")

RETRY_REFUSED_S: Final = 1.0
HINT_AFTER_S: Final = 5.0
ASK_AGAIN_S: Final = (5.0, 10.0, 20.0, 40.0, 60.0)
"""A master that went away may have taken our Hello with it, so it is said again after so long, the last one for ever.
Saying it twice is harmless, since it has a nonce; but while there is no master, each one waits in the socket."""

ATTACH_S: Final = 15.0
HEADER_PARTS: Final = 1


class Refused(StartError):
    """The master will not have this worker, and asking again would not help."""


@dataclass(slots=True)
class Handlers:
    control: Callable[[ControlDown], None]
    data: Callable[[DataDown, Sequence[WireTensor]], None]


class Connection:
    """One session. `junk` counts frames that were no messages."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", url: str) -> None:
        self._context = context
        self._url = url
        self._loop = asyncio.get_running_loop()
        self._greeting: asyncio.Queue[Welcome | Refuse] = asyncio.Queue()
        self._attaches = 0  # sent
        self._attached = 0  # answered
        self._attached_again = asyncio.Event()
        self._handlers: Handlers | None = None
        self._early: list[tuple[DataDown, Sequence[WireTensor]]] = []
        self.junk = 0
        host, _ = split_endpoint(url)
        self._host = host
        sock = self._socket(MAX_CONTROL_BYTES)
        try:
            sock.connect(url)
        except zmq.ZMQError as error:
            sock.close()
            raise Refused(f"the master's address {url!r} cannot be connected to: {error.strerror}") from None
        self._control = Port(sock, self._loop, self._on_control, HEADER_PARTS)
        self._data: Port | None = None
        self._max_frame_bytes = 0

    def _socket(self, max_frame_bytes: int) -> "zmq.Socket[bytes]":
        sock = self._context.socket(zmq.DEALER)
        tune(sock, max_frame_bytes=max_frame_bytes, ipv6=":" in self._host)
        sock.setsockopt(zmq.RECONNECT_IVL, 100)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        return sock

    # --- joining ------------------------------------------------------------------------------------------------------

    async def join(self, hello: Hello) -> Welcome:
        """Say hello until the master is there and has a slot.

        Raises `Refused` when it never will, and ConnectionError when its data socket does not answer.
        """
        welcome = await self._ask(hello)
        self._max_frame_bytes = welcome.limits.max_frame_bytes
        url = f"tcp://{self._host}:{welcome.data_port}"
        sock = self._socket(welcome.limits.max_frame_bytes)
        sock.connect(url)
        self._data = Port(sock, self._loop, self._on_data, HEADER_PARTS)
        self._attach = Attach(session=welcome.session, epoch=welcome.epoch)
        try:
            async with asyncio.timeout(ATTACH_S):
                await self.settle()
        except TimeoutError:
            self.send_control(Goodbye(epoch=welcome.epoch, reason="its data connection did not come up"))
            raise ConnectionError(
                f"the master's data socket {url} does not answer; it must be reachable, like the control socket"
            ) from None
        return welcome

    async def _ask(self, hello: Hello) -> Welcome:
        hint = self._loop.call_later(
            HINT_AFTER_S, log.warning, "no answer from a master at %s yet; waiting for it", self._url
        )
        reason = ""
        try:
            while True:
                answer = await self._answer_to(hello)
                hint.cancel()
                if isinstance(answer, Welcome):
                    return answer
                if isinstance(answer, Refuse):
                    if not answer.retry:
                        raise Refused(
                            f"the master at {self._url} refuses this worker: {answer.reason}", stage=hello.stage
                        )
                    if answer.reason != reason:  # once, however long it lasts
                        reason = answer.reason
                        log.warning("the master says: %s; asking again every %g s", reason, RETRY_REFUSED_S)
                    await asyncio.sleep(RETRY_REFUSED_S)  # the slot is taken: only asking again can tell
        finally:
            hint.cancel()

    async def _answer_to(self, hello: Hello) -> Welcome | Refuse | Attached:
        for patience in itertools.chain(ASK_AGAIN_S, itertools.repeat(ASK_AGAIN_S[-1])):
            await self._control.send_wait(CONTROL_UP.encode(hello))
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self._greeting.get(), patience)
        raise AssertionError("there is always a next time")

    async def settle(self) -> None:
        """Until the master has handled all data sent so far, and whatever it had sent before is here.

        Data is kept in order, so its answer to one more Attach says both.
        """
        await self.send_data(self._attach)
        self._attaches += 1
        wanted = self._attaches
        while self._attached < wanted:
            self._attached_again.clear()
            await self._attached_again.wait()

    def stay_attached(self) -> None:
        """Say once more whose data connection this is.

        ZeroMQ replaces a broken connection without a word, and the master does not know the new one; from this it learns
        that there is one, and that what was under way on the old one may be lost.
        """
        if self._data is not None and self._data.send(DATA_UP.encode(self._attach)) is Sent.OK:
            self._attaches += 1

    def serve(self, handlers: Handlers) -> None:
        """From now on messages go to `handlers`; those that came since `join` come first."""
        self._handlers = handlers
        for message, tensors in self._early:
            handlers.data(message, tensors)
        self._early.clear()

    # --- messages -----------------------------------------------------------------------------------------------------

    def send_control(self, message: ControlUp) -> None:
        """Control messages are small and rare: when even they do not fit, the master is as good as gone."""
        self._control.send(CONTROL_UP.encode(message))

    async def send_data(self, message: DataUp, tensors: Sequence[WireTensor] = ()) -> None:
        """Waits while the master does not keep up. Raises `ProtocolError`, before anything is sent, for what the wire
        cannot carry: the master would end the connection."""
        for tensor in tensors:
            check_frame(tensor.ref, self._max_frame_bytes)
        if self._data is not None:
            await self._data.send_wait(DATA_UP.encode(message, tensors))

    def _on_control(self, frames: list[Buffer]) -> None:
        try:
            message, _ = CONTROL_DOWN.decode(frames)
        except ProtocolError as error:
            self._drop(error)
            return
        if isinstance(message, Welcome | Refuse) and self._handlers is None:
            self._greeting.put_nowait(message)
        elif self._handlers is not None:
            self._handlers.control(message)

    def _on_data(self, frames: list[Buffer]) -> None:
        try:
            message, tensors = DATA_DOWN.decode(frames)
        except ProtocolError as error:
            self._drop(error)
            return
        if isinstance(message, Attached):
            self._attached += 1
            self._attached_again.set()
        elif self._handlers is not None:
            self._handlers.data(message, tensors)
        else:
            self._early.append((message, tensors))

    def _drop(self, error: ProtocolError) -> None:
        self.junk += 1
        log.warning("dropped a frame from the master: %s", error)

    def close(self, linger_s: float = 0.0) -> None:
        """What was sent gets `linger_s` seconds to leave this process, once the context ends."""
        self._control.close(linger_s)
        if self._data is not None:
            self._data.close(linger_s)


def new_nonce() -> str:
    return secrets.token_hex(8)
