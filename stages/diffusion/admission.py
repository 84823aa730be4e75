"""When a waiting request may start: a policy, asked by the scheduler. No torch here."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Queue:
    """What a policy sees: requests waiting, seconds that the first has waited, requests at work, free places."""

    waiting: int
    waited_s: float
    running: int
    free: int


class Admission(Protocol):
    def wait_s(self, queue: Queue) -> float:
        """Seconds that the first request should still wait; 0 lets it start now."""
        ...


class AtOnce:
    """Start whoever comes as soon as there is a place. Newcomers join those at work at their next step."""

    def wait_s(self, queue: Queue) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class ForCompany:
    """An idle stage waits up to `seconds` for others to come, so that they start together and share all their steps.
    It stops waiting when they fill its places; a stage at work never waits."""

    seconds: float

    def wait_s(self, queue: Queue) -> float:
        if queue.running or queue.waiting >= queue.free:
            return 0.0
        return max(0.0, self.seconds - queue.waited_s)
