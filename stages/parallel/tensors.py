"""Arguments of any kind from the first rank to the others: tensors through the process group, device to device, and what is
around them through the ranks' sockets.

Invariant: `give` in the first rank meets one `take` in each other, of the same bundle.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from proto.params import Json
from stages.parallel.distributed import from_leader


@dataclass(frozen=True, slots=True)
class Like:
    """What a tensor is, without its numbers. `hosted`: on the CPU, wherever the model is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    hosted: bool


@dataclass(frozen=True, slots=True)
class Bundle:
    """A value with its tensors taken out: they are in `tensors`, in the order in which they are given."""

    rest: bytes
    tensors: tuple[Like, ...]


class _Out(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class _In(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number]


def bundled(value: Json) -> tuple[Bundle, list[torch.Tensor]]:
    """The value in two parts. Raises what pickle raises for what it cannot take."""
    file = io.BytesIO()
    pickler = _Out(file)
    pickler.dump(value)
    likes = tuple(Like(tuple(one.shape), one.dtype, one.device.type == "cpu") for one in pickler.tensors)
    return Bundle(file.getvalue(), likes), pickler.tensors


def give(tensors: Sequence[torch.Tensor]) -> None:
    """In the first rank."""
    for tensor in tensors:
        from_leader(tensor.detach().contiguous())


def take(bundle: Bundle, device: torch.device) -> Json:
    """In another rank: the value, its tensors on `device` where the first rank had them on its own."""
    tensors = []
    for like in bundle.tensors:
        tensor = torch.empty(like.shape, dtype=like.dtype, device="cpu" if like.hosted else device)
        from_leader(tensor)
        tensors.append(tensor)
    return _In(io.BytesIO(bundle.rest), tensors).load()
