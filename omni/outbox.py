"""Sends to many peers over one ROUTER without ever blocking, and without growing for a peer that does not read.

Invariant: messages to one peer leave in the order in which they were given; what waits for one peer is bounded, and a
peer beyond the bound, or one that ZeroMQ no longer knows, is reported once per failure and loses what waited for it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from proto.sockets import Port, Sent
from proto.tensors import Buffer

MAX_MESSAGES: Final = 4096
MAX_BYTES: Final = 256 << 20
RETRY_S: Final = 0.005
"""ZeroMQ does not say when *this* peer of a ROUTER has room again, so a full one is tried at this interval, while it is."""


class Outbox:
    def __init__(self, port: Port, loop: asyncio.AbstractEventLoop, on_gone: Callable[[bytes, str], None]) -> None:
        self.port = port
        self._loop = loop
        self._on_gone = on_gone
        self._waiting: dict[bytes, deque[list[Buffer]]] = {}
        self._bytes: dict[bytes, int] = {}
        self._retry: asyncio.TimerHandle | None = None

    def send(self, peer: bytes, frames: list[Buffer]) -> None:
        """Send now, or as soon as the peer has room."""
        waiting = self._waiting.get(peer)
        if waiting is not None:
            self._wait(peer, waiting, frames)
            return
        status = self.port.send([peer, *frames])
        if status is Sent.GONE:
            self._lose(peer, "its connection is gone")
        elif status is Sent.FULL:
            self._wait(peer, self._waiting.setdefault(peer, deque()), frames)

    def _wait(self, peer: bytes, waiting: deque[list[Buffer]], frames: list[Buffer]) -> None:
        size = self._bytes.get(peer, 0) + sum(map(len, frames))
        if len(waiting) >= MAX_MESSAGES or (waiting and size > MAX_BYTES):
            self._lose(peer, f"it does not read: {len(waiting)} messages, {size} bytes wait for it")
            return
        waiting.append(frames)
        self._bytes[peer] = size
        if self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._send_waiting)

    def _send_waiting(self) -> None:
        self._retry = None
        for peer, waiting in list(self._waiting.items()):
            while waiting:
                status = self.port.send([peer, *waiting[0]])
                if status is Sent.FULL:
                    break
                if status is Sent.GONE:
                    self._lose(peer, "its connection is gone")
                    break
                self._bytes[peer] -= sum(map(len, waiting.popleft()))
            if not waiting:
                self._forget(peer)
        if self._waiting:
            self._retry = self._loop.call_later(RETRY_S, self._send_waiting)

    def _lose(self, peer: bytes, reason: str) -> None:
        self._forget(peer)
        # Not from here: the caller is in the middle of carrying out actions of an earlier event.
        self._loop.call_soon(self._on_gone, peer, reason)

    def _forget(self, peer: bytes) -> None:
        self._waiting.pop(peer, None)
        self._bytes.pop(peer, None)
