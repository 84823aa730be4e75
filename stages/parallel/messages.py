"""What the ranks of one replica say to each other, pickled, through a pair of connected sockets that nobody else holds."""

from dataclasses import dataclass

from stages.engine import LoadContext


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank sits. `store` is the file by which the ranks find each other."""

    rank: int
    degree: int
    store: str
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
