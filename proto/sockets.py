"""One ZeroMQ socket on one asyncio loop: messages in by callback, messages out without ever blocking.

The socket's file descriptor is edge-triggered: it says that *something* changed, once. So whoever touches the socket
must look at its events again afterwards. That rule is kept here and nowhere else. Used by master and stages alike.
"""

import asyncio
import enum
import re
import socket
from collections.abc import Callable, Sequence
from typing import Final, cast

import zmq

from proto.frames import receive_frames, send_frames
from proto.tensors import Buffer

BATCH: Final = 128
"""Messages read in one go before other callbacks get their turn."""


class Sent(enum.Enum):
    OK = "ok"
    FULL = "full"  # the peer does not keep up; try again later
    GONE = "gone"  # no such peer any more


class Port:
    """Owns `sock`. `on_message(frames)` gets each message whole: for a ROUTER the first frame is the peer's identity.

    The first `small` frames of a message (identity, header) come as bytes, the others as memoryviews of ZeroMQ's memory.
    """

    def __init__(
        self,
        sock: "zmq.Socket[bytes]",
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[list[Buffer]], None],
        small: int,
    ) -> None:
        self._sock = sock
        self._loop = loop
        self._on_message = on_message
        self._small = small
        self._paused = False
        self._due = False  # `_drain` or `_look` is on the loop's list already
        self._draining = False  # `_drain` is running, and will look at the socket again
        self._turn = asyncio.Lock()
        self._room: asyncio.Future[None] | None = None  # set while somebody waits for room
        self._fd = sock.fileno()
        loop.add_reader(self._fd, self._drain)
        self._drain_soon()

    def send(self, frames: Sequence[Buffer]) -> Sent:
        """Send one message now or say why not. A frame must not be written into afterwards."""
        try:
            send_frames(self._sock, frames, zmq.NOBLOCK)
            status = Sent.OK
        except zmq.Again:
            status = Sent.FULL
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.ENOTSOCK, zmq.ETERM):
                raise
            status = Sent.GONE
        if not (self._due or self._draining or self._paused):
            self._due = True
            self._loop.call_soon(self._look)  # once for all that is sent in this turn of the loop
        return status

    async def send_wait(self, frames: Sequence[Buffer]) -> Sent:
        """`send`, but wait while the peer is full; senders that wait keep their order. For a socket with a single peer."""
        if not self._turn.locked() and (status := self.send(frames)) is not Sent.FULL:
            return status
        async with self._turn:
            while (status := self.send(frames)) is Sent.FULL:
                if self._events() & zmq.POLLOUT:
                    continue  # room came since, and its edge is gone: nothing would wake us
                self._room = self._loop.create_future()
                await self._room
            return status

    def pause(self) -> None:
        """Read no more until `resume`: back-pressure on the peers."""
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._drain_soon()

    def _drain_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._drain)

    def _look(self) -> None:
        """Sending may have swallowed the edge of a message that came in meanwhile."""
        self._due = False
        if self._events() & zmq.POLLIN:
            self._drain()
        else:
            self._wake_sender()

    def _drain(self) -> None:
        self._due = False
        self._draining = more = True
        try:
            more = self._receive()
        finally:
            self._draining = False
            if more:
                self._drain_soon()
        self._wake_sender()  # after receiving, which may have swallowed the edge that said there is room

    def _wake_sender(self) -> None:
        if self._room is not None and not self._room.done() and self._events() & zmq.POLLOUT:
            self._room.set_result(None)

    def _receive(self) -> bool:
        """Hand over what is there, up to a batch. Whether there may be more."""
        for _ in range(BATCH):
            if self._paused or self._sock.closed:
                return False
            try:
                frames = receive_frames(self._sock, self._small, zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._on_message(frames)
        return True

    def _events(self) -> int:
        return 0 if self._sock.closed else cast(int, self._sock.getsockopt(zmq.EVENTS))

    def close(self, linger_s: float = 0.0) -> None:
        """What was sent and has not left yet gets `linger_s` seconds, which the end of the context waits for."""
        if not self._sock.closed:
            if self._room is not None and not self._room.done():
                self._room.set_result(None)  # who waits will find the socket gone
            self._loop.remove_reader(self._fd)
            self._sock.close(linger=int(linger_s * 1000))


def endpoint_of(sock: "zmq.Socket[bytes]") -> str:
    """Where a bound socket listens, with the port that the system picked."""
    return sock.getsockopt_string(zmq.LAST_ENDPOINT)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """("127.0.0.1", 5570) of "tcp://127.0.0.1:5570"; brackets of an IPv6 host are kept. Raises ValueError."""
    scheme, sep, rest = endpoint.partition("://")
    host, colon, port = rest.rpartition(":")
    number = "0" if port == "*" else port
    if scheme != "tcp" or not (sep and colon and host) or not re.fullmatch("[0-9]{1,5}", number) or int(number) > 65535:
        raise ValueError(f"{endpoint!r} is not tcp://HOST:PORT")
    return host, int(number)


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine only."""
    bare = host.strip("[]")
    if bare == "localhost":
        return True
    try:
        packed = socket.inet_pton(socket.AF_INET6 if ":" in bare else socket.AF_INET, bare)
    except OSError:
        return False
    return packed[0] == 127 if len(packed) == 4 else packed == b"\0" * 15 + b"\1"


def tune(sock: "zmq.Socket[bytes]", *, max_frame_bytes: int, queue: int = 1000, ipv6: bool = False) -> None:
    """The options that every socket here needs: bounded queues, bounded frames, no lingering, dead links noticed."""
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, queue)
    sock.setsockopt(zmq.RCVHWM, queue)
    sock.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    sock.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
    if ipv6:
        sock.setsockopt(zmq.IPV6, 1)
