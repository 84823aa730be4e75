"""How much memory is in use, was in use at most, and is free: one gauge for each kind of device.

A CUDA gauge asks torch's allocator, so it is exact. On a CPU there is no such thing: the gauge asks the system for the
resident memory of the process and for its high-water mark, which include all that any library takes. Two things follow.
What the C library keeps of freed memory is in use for the system: so it is given back when an idle stage gets work, and
what is kept under load counts as taken by those at work. And threads beside the engine's are in it, but they take little.
"""

import ctypes
import os
import resource
from pathlib import Path
from typing import Final, Protocol

import torch

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_FORGET_PEAK: Final = b"5"  # see proc(5), clear_refs
_CGROUPS: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


class Gauge(Protocol):
    """All values are bytes."""

    def settle(self) -> None:
        """Give back what is only kept for later. Takes milliseconds, and what is given back must be got again."""
        ...

    def rest(self) -> None:
        """`settle`, if `used` would count what is only kept."""
        ...

    def used(self) -> int: ...

    def restart(self) -> None:
        """Forget the peak."""
        ...

    def peak(self) -> int:
        """Most that was in use since `restart`."""
        ...

    def free(self) -> int:
        """What nobody uses now."""
        ...


class CudaGauge:
    """What tensors take, by torch's caching allocator; free is what it may still get of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def rest(self) -> None:
        pass  # what is kept for later is not counted

    def used(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def free(self) -> int:
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0] + kept)


class ProcessGauge:
    """Resident memory of this process. Raises `OSError` where the system does not tell or cannot forget a peak."""

    def __init__(self) -> None:
        self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the GNU C library only
        self.restart()

    def __del__(self) -> None:
        for file in (vars(self).get("_clear"), vars(self).get("_statm")):
            if file is not None:
                os.close(file)

    def settle(self) -> None:
        if self._trim is not None:
            self._trim(0)

    def rest(self) -> None:
        self.settle()

    def used(self) -> int:
        return int(os.pread(self._statm, 128, 0).split()[1]) * _PAGE

    def restart(self) -> None:
        os.pwrite(self._clear, _FORGET_PEAK, 0)

    def peak(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def free(self) -> int:
        """Of the machine or of the control group, whichever has less."""
        return min(_available(), _cgroup_free(Path("/sys/fs/cgroup")))


class Watch:
    """What calls take above what the idle stage has. Without a gauge always 0."""

    def __init__(self, gauge: Gauge | None) -> None:
        self.gauge = gauge
        self._idle = 0

    def idle(self) -> None:
        """Nobody is at work yet."""
        if self.gauge is not None:
            self.gauge.rest()
            self._idle = self.gauge.used()

    def begin(self) -> None:
        """A call is about to be made."""
        if self.gauge is not None:
            self.gauge.restart()

    def taken(self) -> int:
        """Bytes in use at most since `begin`, above those of the idle stage."""
        return 0 if self.gauge is None else max(0, self.gauge.peak() - self._idle)


def gauge_for(device: torch.device) -> Gauge | None:
    """None where a device's memory cannot be measured."""
    if device.type == "cuda":
        return CudaGauge(device)
    try:
        return ProcessGauge() if device.type == "cpu" else None
    except OSError:
        return None


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * _PAGE


def _cgroup_free(root: Path) -> int:
    """What the control group's limit leaves; cached files make room when they must. Without a limit: no bound."""
    for limit, usage, cached in _CGROUPS:
        try:
            most = (root / limit).read_text().strip()
            used = int((root / usage).read_text())
            stat = (root / usage).with_name("memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if most.isdigit():
            files = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith(f"{cached} ")), 0)
            return max(0, int(most) - used + files)
    return 1 << 62
