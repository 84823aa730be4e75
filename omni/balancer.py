"""Which replica gets the next work. Policies only: in-flight counts are the orchestrator's own, never a replica's word."""

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from proto.deploy import Balance


class Candidate(NamedTuple):
    """A ready replica with room. `in_flight` is what the master gave it and has not got back."""

    replica: int
    in_flight: int


class Balancer(Protocol):
    def choose(self, candidates: Sequence[Candidate]) -> int:
        """The replica number of one of `candidates`, which are not empty and in ascending order."""
        ...


class Random:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, candidates: Sequence[Candidate]) -> int:
        return self._rng.choice(candidates).replica


class RoundRobin:
    """The next replica after the last one chosen; joining and leaving replicas do not disturb the turn."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Sequence[Candidate]) -> int:
        later = [c.replica for c in candidates if c.replica > self._last]
        self._last = later[0] if later else candidates[0].replica
        return self._last


class LeastLoaded:
    """The fewest requests in flight; equals take turns."""

    def __init__(self) -> None:
        self._ties = RoundRobin()

    def choose(self, candidates: Sequence[Candidate]) -> int:
        least = min(c.in_flight for c in candidates)
        return self._ties.choose([c for c in candidates if c.in_flight == least])


def make_balancer(policy: Balance, rng: random.Random) -> Balancer:
    if policy is Balance.RANDOM:
        return Random(rng)
    return RoundRobin() if policy is Balance.ROUND_ROBIN else LeastLoaded()
