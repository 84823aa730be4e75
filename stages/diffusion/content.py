"""Values as keys: equal for equal content, tensors by their bytes. For what must be the same before it may be shared."""

from collections.abc import Hashable, Mapping, MutableMapping

import torch
import xxhash
from torch.utils.weak import WeakTensorKeyDictionary

from proto.params import Json


class Opaque(Exception):
    """An object of which nothing is known: it can be compared with no other."""


_BIG = 1 << 14
"""Bytes from which on a digest is remembered as long as its tensor lives: position ids are the same object at all steps."""

_known: MutableMapping[torch.Tensor, bytes] = WeakTensorKeyDictionary()


def freeze(value: Json) -> Hashable:
    """A key of the value. Tensors on an accelerator are copied to the host for it. Raises `Opaque`."""
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device):
        return type(value).__name__, value
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, digest(value)
    if type(value) in (list, tuple, torch.Size):
        return type(value).__name__, tuple(freeze(entry) for entry in value)
    if isinstance(value, Mapping) and type(value) is dict:
        return "dict", tuple((name, freeze(entry)) for name, entry in sorted(value.items(), key=lambda kv: str(kv[0])))
    raise Opaque(type(value).__name__)


def digest(tensor: torch.Tensor) -> bytes:
    """XXH3-128 of the tensor's values."""
    if tensor.device.type == "cpu" and tensor.nbytes < _BIG:
        return _digest(tensor)
    found = _known.get(tensor)
    if found is None:
        found = _known[tensor] = _digest(tensor)
    return found


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1).cpu()
    if flat.numel() == 1:
        flat = flat.clone(memory_format=torch.contiguous_format)  # one that was expanded has no stride to view it by
    return xxhash.xxh3_128_digest(flat.view(torch.uint8).numpy() if flat.numel() else b"")
