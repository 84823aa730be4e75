"""What one request cost: seconds of work by phase, its share only, and counts of its steps and rows.

The seconds of a call that several requests shared are divided by their rows, so the requests of a stage add up to the
stage's own time. The memory that it took is divided in the same way. What is left of a request's run time it spent waiting
for others.
"""

from dataclasses import dataclass, field

from stages.diffusion.scheduler import Phase


@dataclass(slots=True)
class Meter:
    """`steps`: denoising steps done. `forwards`: calls of denoisers it took part in, `rows` those it brought into them,
    `rows_shared` of these the ones that were not alone there. `cache_hits`: prompts that were encoded before. `peaks`:
    bytes of memory that its calls took at most above those of the idle stage."""

    queue_s: float = 0.0
    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    steps: int = 0
    forwards: int = 0
    rows: int = 0
    rows_shared: int = 0
    cache_hits: int = 0
    peaks: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))

    def worked(self, phase: Phase, seconds: float) -> None:
        """Time that was all this request's."""
        self.seconds[phase] += seconds

    def called(self, phase: Phase, seconds: float, rows: int, total: int, memory: int = 0) -> None:
        """A call of `total` rows took `seconds` and, above the idle stage's, so many bytes of `memory`; `rows` of them are
        this request's; all of it, if there are no rows at all."""
        share = rows / total if total else 1.0
        self.seconds[phase] += seconds * share
        self.peaks[phase] = max(self.peaks[phase], memory * share)
        if phase is Phase.DENOISE:
            self.forwards += 1
            self.rows += rows
            self.rows_shared += rows if rows < total else 0

    def detail(self) -> dict[str, float]:
        """For `Finished.detail`: seconds under the names of the phases, `step` those of one denoising step on average, and
        counts. `peak_memory_bytes` is the largest of `peaks`."""
        return {
            "queue": self.queue_s,
            **{phase.value: seconds for phase, seconds in self.seconds.items()},
            "step": self.seconds[Phase.DENOISE] / max(1, self.steps),
            "steps": self.steps,
            "forwards": self.forwards,
            "rows": self.rows,
            "rows_shared": self.rows_shared,
            "cache_hits": self.cache_hits,
            "peak_memory_bytes": round(max(self.peaks.values())),
        }
