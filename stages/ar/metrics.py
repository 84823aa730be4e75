"""What an AR stage counts and times, for the RPC `stats` and for /metrics. Plain numbers; nothing here costs a step anything."""

from dataclasses import dataclass, field

from proto.figures import Figures, Histogram
from proto.params import Json
from stages.ar.scheduler import Scheduler
from stages.ar.sequence import Clocks


@dataclass(slots=True)
class Metrics:
    """Since the stage started."""

    queue: Histogram = field(default_factory=lambda: Histogram("queue_seconds"))
    first_token: Histogram = field(default_factory=lambda: Histogram("first_token_seconds"))
    inter_token: Histogram = field(default_factory=lambda: Histogram("inter_token_seconds"))
    finished: int = 0
    failed: int = 0
    generated: int = 0  # tokens

    def token(self, clocks: Clocks, now: float) -> None:
        """A token has come at `now`."""
        self.generated += 1
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
            "running": len(scheduler.running) + len(scheduler.resting),
            "resting": len(scheduler.resting),
            "finished": self.finished,
            "failed": self.failed,
            "kv_pages": blocks.usable,
            "kv_pages_used": blocks.owned,
            "kv_pages_cached": blocks.cached,
            "page_tokens": blocks.size,
            "preemptions": counters.preemptions,
            "prompt_tokens": counters.prompt_tokens,
            "prefix_hit_tokens": counters.hit_tokens,
            "generated_tokens": self.generated,
            "resumed_tokens": counters.resumed_tokens,
            "kept_tokens": counters.kept_tokens,
            "queue_s": _report(self.queue),
            "first_token_s": _report(self.first_token),
            "inter_token_s": _report(self.inter_token),
        }

    def figures(self, scheduler: Scheduler) -> Figures:
        blocks, counters = scheduler.blocks, scheduler.counters
        numbers = {
            "prompt_tokens": counters.prompt_tokens,
            "prefix_hit_tokens": counters.hit_tokens,
            "generated_tokens": self.generated,
            "preemptions": counters.preemptions,
            "kv_pages": blocks.usable,
            "kv_pages_used": blocks.owned,
            "kv_pages_cached": blocks.cached,
        }
        spreads = {"first_token_seconds": self.first_token.spread, "inter_token_seconds": self.inter_token.spread}
        return Figures({name: float(number) for name, number in numbers.items()}, spreads)


def _report(times: Histogram) -> Json:
    """Seconds: how many, their mean, the last and the longest."""
    return {"count": times.count, "mean": times.mean, "last": times.last, "longest": times.longest}
