"""Sleep: weights leave the accelerator for the host's memory, so that something else can use it; wake brings them back.

On a CPU the weights are in the host's memory already, and stay: what sleep gives back there is what a stage keeps beside them
(caches), and it says so. Pages that nobody touches, the system may swap out by itself.
"""

import ctypes
import gc
from collections.abc import Iterable

import torch


def to_host(modules: Iterable[torch.nn.Module], device: torch.device) -> int:
    """Move weights from `device` to the host and give the accelerator's memory back. Bytes that were moved."""
    moved = 0
    for module in modules:
        moved += nbytes(module, device)
        if device.type != "cpu":
            module.to("cpu")
    release(device)
    return moved if device.type != "cpu" else 0


def to_device(modules: Iterable[torch.nn.Module], device: torch.device) -> None:
    """Bring them back."""
    if device.type != "cpu":
        for module in modules:
            module.to(device)


def nbytes(module: torch.nn.Module, device: torch.device) -> int:
    """Of its weights and buffers on `device`."""
    tensors = (*module.parameters(), *module.buffers())
    return sum(int(tensor.nbytes) for tensor in tensors if tensor.device.type == device.type)


def release(device: torch.device) -> None:
    """Give what is free to whom it came from: the accelerator's driver, or the system."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # no glibc: its memory allocator decides
        return
