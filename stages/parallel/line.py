"""A follower's way to its leader, and what a role does with it.

Invariant: of each command the leader hears once, that its part was done here or what it raised.
"""

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn, Protocol

from stages.engine import LoadContext
from stages.parallel.messages import Arrived, Do, Done, FromFollower, Go, Seat, ToFollower, hear, packed


class LeaderGone(BaseException):
    """There is nobody to do anything for."""


class Line:
    """`seat` is this follower's."""

    def __init__(self, seat: Seat, pipe: Connection) -> None:
        self.seat = seat
        self._pipe = pipe

    def meet(self) -> None:
        """Once, when loaded: wait until all ranks have come here."""
        self._say(Arrived())
        assert isinstance(self._heard(), Go)

    def serve(self, do: Callable[[object], None]) -> NoReturn:
        """Do what the leader sends, until it is gone. What `do` raises is told: in all ranks it is a request's fault."""
        while True:
            order = self._heard()
            assert isinstance(order, Do)
            error = None
            try:
                do(order.command)
            except Exception as raised:  # noqa: BLE001 - only the leader knows whether this rank is alone with it
                error = f"{type(raised).__name__}: {raised}"
            self._say(Done(order.number, error))

    def _heard(self) -> ToFollower | FromFollower:
        try:
            return hear(self._pipe)
        except (EOFError, OSError):
            raise LeaderGone from None

    def _say(self, message: Arrived | Done) -> None:
        try:
            self._pipe.send_bytes(packed(message))
        except OSError:
            raise LeaderGone from None


class Role(Protocol):
    """Loads, meets the other ranks, and serves. Raises if it cannot load."""

    def __call__(self, context: LoadContext, line: Line) -> None: ...
