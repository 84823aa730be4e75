"""Results of text encoders, kept by the content of what they were given; the one used longest ago goes first.

Invariant: what is kept takes at most `capacity` bytes, and nobody else holds its tensors: they are copied in and out.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from proto.params import Json
from stages.diffusion.collate import CannotSplit
from stages.diffusion.content import Opaque, freeze
from stages.diffusion.parking import Call


class PromptCache:
    """`capacity` in bytes; 0 keeps nothing."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[Hashable, tuple[Json, int]] = OrderedDict()
        self.hits = 0
        self.misses = 0
        self.size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Json:
        """A copy of what is kept under the key, or None."""
        found = self._kept.get(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return copied(found[0])

    def put(self, key: Hashable, value: Json) -> None:
        """Keep a copy, unless it is larger than the whole cache or holds what cannot be copied, or no prompt's tensors."""
        try:
            size = size_of(value)
            if not 0 < size <= self._capacity or key in self._kept:
                return
            self._kept[key] = (copied(value), size)
        except CannotSplit:
            return
        self.size += size
        while self.size > self._capacity:
            _, (_, freed) = self._kept.popitem(last=False)
            self.size -= freed

    def clear(self) -> None:
        self._kept.clear()
        self.size = 0

    def forget(self) -> None:
        """Clear, and begin to count anew."""
        self.clear()
        self.hits = self.misses = 0


def prompt_key(call: Call) -> Hashable | None:
    """The content of an encoder's call, or None if it holds what cannot be compared."""
    if call.rest:
        return None
    try:
        return call.site.name, freeze(dict(call.arguments))
    except Opaque:
        return None


def copied(value: Json) -> Json:
    """A copy that shares no tensor. Raises `CannotSplit` for what is not made of tensors and plain values."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        parts = {name: copied(entry) for name, entry in value.items()}
        return parts if type(value) is dict else type(value)(**parts)
    if type(value) in (list, tuple):
        return type(value)(copied(entry) for entry in value)
    if isinstance(value, DiagonalGaussianDistribution):
        return type(value)(value.parameters.clone(), value.deterministic)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CannotSplit(f"a {type(value).__name__}")


def size_of(value: Json) -> int:
    """Bytes of the tensors inside; an encoded picture, which is a distribution, counts for none."""
    if isinstance(value, torch.Tensor):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(size_of(entry) for entry in value.values())
    if isinstance(value, list | tuple):
        return sum(size_of(entry) for entry in value)
    return 0
