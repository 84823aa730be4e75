"""What engines count and time for operators: the names that a heartbeat may carry, and what they mean in /metrics.

A stage sends counts since its start and histograms in the buckets that stand here; the master shows them as they are. So a
name that is not here is dropped by the master: a stage cannot make up metrics.
"""

import bisect
import enum
import math
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta


class Sort(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


class Figure(NamedTuple):
    sort: Sort
    help: str


FIGURES: Final[Mapping[str, Figure]] = {
    # AR stages
    "prompt_tokens": Figure(Sort.COUNTER, "Tokens of prompts that were let in"),
    "prefix_hit_tokens": Figure(Sort.COUNTER, "Tokens of prompts whose KV was there already"),
    "generated_tokens": Figure(Sort.COUNTER, "Tokens of answers"),
    "preemptions": Figure(Sort.COUNTER, "Sequences that gave their KV pages back to others, to be read again later"),
    "kv_pages": Figure(Sort.GAUGE, "Pages of the KV pool"),
    "kv_pages_used": Figure(Sort.GAUGE, "Pages that running sequences own"),
    "kv_pages_cached": Figure(Sort.GAUGE, "Pages that nobody owns and that hold known prefixes"),
    # diffusion stages
    "denoise_steps": Figure(Sort.COUNTER, "Denoising steps of requests"),
    "denoiser_forwards": Figure(Sort.COUNTER, "Forwards of denoisers, however many requests shared them"),
    "prompt_cache_hits": Figure(Sort.COUNTER, "Prompts that had been encoded before"),
    "prompt_cache_misses": Figure(Sort.COUNTER, "Prompts that had to be encoded"),
    "prompt_cache_bytes": Figure(Sort.GAUGE, "Size of the encoded prompts that are kept"),
}

HISTOGRAMS: Final[Mapping[str, tuple[str, tuple[float, ...]]]] = {
    "queue_seconds": (
        "Arrival at the stage to the first step",
        (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
    ),
    "first_token_seconds": (
        "Arrival at the stage to the first token",
        (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60, 120),
    ),
    "inter_token_seconds": (
        "One token of an answer to the next",
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10),
    ),
}
"""Each: its help, and the upper bounds of its buckets in seconds, the last one without bound left out."""

_Counts = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=64)]


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Observations of one histogram. `counts[i]` are those in bucket i, the last one unbounded; `total` is their sum."""

    counts: _Counts
    total: float


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Numbers by the names in `FIGURES`, spreads by those in `HISTOGRAMS`."""

    numbers: Annotated[dict[Annotated[str, Meta(max_length=64)], float], Meta(max_length=256)] = {}
    spreads: Annotated[dict[Annotated[str, Meta(max_length=64)], Spread], Meta(max_length=64)] = {}


class Histogram:
    """Observations of the histogram of this name, since the start; and the last and the longest."""

    __slots__ = ("_bounds", "_counts", "count", "last", "longest", "name", "total")

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self._bounds: Final = HISTOGRAMS[name][1]
        self._counts = [0] * (len(self._bounds) + 1)
        self.count = 0
        self.total = self.last = self.longest = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, seconds)] += 1
        self.count += 1
        self.total += seconds
        self.last = seconds
        self.longest = max(self.longest, seconds)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def spread(self) -> Spread:
        return Spread(tuple(self._counts), self.total)


def known(figures: Figures) -> Figures:
    """What of it has a name here, a finite value and the right number of buckets."""
    return Figures(
        {name: value for name, value in figures.numbers.items() if name in FIGURES and math.isfinite(value)},
        {
            name: spread
            for name, spread in figures.spreads.items()
            if name in HISTOGRAMS and len(spread.counts) == len(HISTOGRAMS[name][1]) + 1 and math.isfinite(spread.total)
        },
    )
