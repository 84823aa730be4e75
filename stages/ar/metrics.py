"""What an AR stage counts and times, for the RPC `stats`. Plain numbers; nothing here costs a step anything."""

from dataclasses import dataclass, field

from proto.params import Json
from stages.ar.scheduler import Scheduler
from stages.ar.sequence import Clocks


@dataclass(slots=True)
class Times:
    """Seconds: how many, their sum, the last and the longest."""

    count: int = 0
    total: float = 0.0
    last: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.last = seconds
        self.longest = max(self.longest, seconds)

    def report(self) -> Json:
        mean = self.total / self.count if self.count else 0.0
        return {"count": self.count, "mean": mean, "last": self.last, "longest": self.longest}


@dataclass(slots=True)
class Metrics:
    """Since the stage started."""

    queue: Times = field(default_factory=Times)  # arrival to first step
    first_token: Times = field(default_factory=Times)  # arrival to first token
    inter_token: Times = field(default_factory=Times)  # one token to the next of the same answer
    finished: int = 0
    failed: int = 0

    def token(self, clocks: Clocks, now: float) -> None:
        """A token has come at `now`."""
        if clocks.first is None:
            clocks.first = now
            self.first_token.add(now - clocks.arrived)
        elif clocks.last is not None:
            self.inter_token.add(now - clocks.last)
        clocks.last = now

    def report(self, scheduler: Scheduler) -> Json:
        blocks, counters = scheduler.blocks, scheduler.counters
        return {
            "queued": len(scheduler.waiting),
            "running": len(scheduler.running),
            "finished": self.finished,
            "failed": self.failed,
            "kv_pages": blocks.usable,
            "kv_pages_used": blocks.owned,
            "kv_pages_cached": blocks.cached,
            "page_tokens": blocks.size,
            "preemptions": counters.preemptions,
            "prompt_tokens": counters.prompt_tokens,
            "prefix_hit_tokens": counters.hit_tokens,
            "queue_s": self.queue.report(),
            "first_token_s": self.first_token.report(),
            "inter_token_s": self.inter_token.report(),
        }
