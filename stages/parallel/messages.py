"""What the ranks of one replica say to each other, pickled, through a pair of connected sockets that nobody else holds."""

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection

from stages.engine import LoadContext


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank sits. `port` of loopback is where the ranks find each other; the leader has bound it."""

    rank: int
    degree: int
    port: int
    timeout: float

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.degree}"


@dataclass(frozen=True, slots=True)
class Begin:
    """To a follower, first: what it is to be. `role` is package.module:function; `context` reports to nobody."""

    seat: Seat
    role: str
    context: LoadContext


@dataclass(frozen=True, slots=True)
class Go:
    """To a follower: everybody has arrived."""


@dataclass(frozen=True, slots=True)
class Do:
    """To a follower: do your part of command `number`. `command` is the role's own."""

    number: int
    command: object


@dataclass(frozen=True, slots=True)
class Arrived:
    """From a follower: it has loaded, and waits for the others."""


@dataclass(frozen=True, slots=True)
class Done:
    """From a follower: its part of the command is done, or raised `error`."""

    number: int
    error: str | None


@dataclass(frozen=True, slots=True)
class Unfit:
    """From a follower, last: it could not load."""

    error: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Of a follower, in its leader's own process: nothing more will come of it, for this reason."""

    error: str


ToFollower = Begin | Go | Do
FromFollower = Arrived | Done | Unfit


def packed(message: ToFollower | FromFollower) -> bytes:
    """By the plain pickler: a connection's own would share tensors' memory instead of sending them."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def hear(pipe: Connection) -> ToFollower | FromFollower:
    """The next message, once it is there. Raises `EOFError` or `OSError` when the other side is gone."""
    message: ToFollower | FromFollower = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from a process of our own
    return message
