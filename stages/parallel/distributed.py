"""The ranks' process group in torch.distributed: gloo between CPUs, and the accelerators' own library besides.

All ranks of a replica are on one host and talk over loopback. They find each other at a port that the leader has bound
before it started the others, so nobody can take it. In a process that is no rank of a group there is nothing to agree upon.
"""

import datetime
import os
import socket
import sys
from typing import Final

import torch
import torch.distributed as dist

from stages.parallel.messages import Seat

_BACKENDS: Final = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
_LOOPBACK: Final = "lo" if sys.platform == "linux" else "lo0"


def join(seat: Seat, device: torch.device, listener: socket.socket | None = None) -> None:
    """Wait for the other ranks and become one of them; the leader with its `listener`, which this takes over. Raises what
    torch raises if they do not come in time."""
    timeout = datetime.timedelta(seconds=seat.timeout)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    os.environ["LOCAL_RANK"] = str(seat.rank)  # by which the libraries choose the device
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    leads = {} if listener is None else {"master_listen_fd": listener.detach()}
    dist.init_process_group(
        _BACKENDS[device.type],
        store=dist.TCPStore(
            "127.0.0.1", seat.port, seat.degree, seat.rank == 0, timeout, wait_for_workers=False, **leads
        ),
        rank=seat.rank,
        world_size=seat.degree,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.pop("LOCAL_RANK", None)


def least(value: int) -> int:
    """The smallest of all ranks' values. All must call it."""
    if not dist.is_initialized():
        return value
    values: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return min(one for one in values if one is not None)


def side_by_side(part: torch.Tensor, dim: int) -> torch.Tensor:
    """All ranks' parts, which have one shape, joined along `dim` in their order. All must call it."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim)


def from_leader(tensor: torch.Tensor) -> None:
    """Fill `tensor` with the first rank's, or give it out there. Of any dtype; it must be contiguous. All must call it."""
    if tensor.numel():
        flat = tensor.as_strided((tensor.numel(),), (1,))  # a size of 1 may have any stride, which no view takes
        dist.broadcast(flat.view(torch.uint8), 0)
