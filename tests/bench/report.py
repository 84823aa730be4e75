"""What every bench needs: the machine in one line, figures from alternating rounds, a table.

Figures are medians of rounds that alternate between the candidates, so that a busy minute on the machine hits all of
them alike. A bench prints; it never judges a time.
"""

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

Key = TypeVar("Key")


def machine(*packages: str) -> str:
    """Processor, cores, memory, system, Python and the versions of `packages`, in one line."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    parts = [_processor(), f"{cores} cores", f"{gib:.0f} GiB", f"{platform.system()} {platform.release()}"]
    return ", ".join([*parts, f"Python {platform.python_version()}", *versions, f"load {load:.1f}"])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100) of at least one value, linear between neighbours."""
    ordered = sorted(values)
    spot = (len(ordered) - 1) * q / 100
    low = int(spot)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (spot - low)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def alternate(candidates: Mapping[Key, Callable[[], float]], rounds: int) -> dict[Key, list[float]]:
    """One figure of each candidate per round, in turn; the order flips every round. The first round is thrown away."""
    figures: dict[Key, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        names = list(candidates) if turn % 2 else list(reversed(list(candidates)))
        for name in names:
            figure = candidates[name]()
            if turn:
                figures[name].append(figure)
    return figures


def seconds_per_call(function: Callable[[], object], calls: int) -> float:
    """Mean seconds of one of `calls` calls."""
    started = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - started) / calls


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Plain text: the first column to the left, the others to the right; floats with three significant digits."""
    cells = [list(header), *[[_cell(value) for value in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join(["", title, lines[0], "-" * len(lines[0]), *lines[1:]])


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
