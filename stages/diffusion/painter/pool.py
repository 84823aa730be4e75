"""The captions that training draws from at a time, with their keys and values; some are replaced now and then.

Reading a caption costs about as much as training on one picture, so a caption is used for several pictures, each with
places and sizes of its own. Invariant: row n of `keys`, `values` and `mask` belongs to `captions[n]`.
"""

import random
from dataclasses import dataclass

import numpy as np
import torch

from stages.diffusion.painter.captions import Caption, Captions
from stages.diffusion.painter.kv import TextKV, Thinker
from stages.diffusion.painter.scenes import place, render


@dataclass(frozen=True, slots=True)
class Batch:
    """`pictures` (B, 3, S, S), -1 to 1, and the text of each."""

    pictures: torch.Tensor
    text: TextKV


class Pool:
    """`size` captions of `source`, of at most `length` tokens each. Longer ones are passed over."""

    def __init__(self, thinker: Thinker, source: Captions, size: int, length: int, rng: random.Random) -> None:
        self._thinker = thinker
        self._source = source
        self._length = length
        self._rng = rng
        self._next = 0
        self.size = size
        self.captions: list[Caption] = []
        self._kv: TextKV | None = None
        self._empty = thinker.read([""], length)

    def refresh(self, count: int) -> None:
        """Put `count` new captions in the place of the oldest, or at the end while there are fewer than `size`."""
        fresh: list[Caption] = []
        while len(fresh) < count:
            caption = self._source.draw()
            if self._thinker.tokens(caption.text) <= self._length:
                fresh.append(caption)
        read = self._thinker.read([caption.text for caption in fresh], self._length)
        if self._kv is None:
            self._kv = TextKV(
                *(part.new_zeros(self.size, *part.shape[1:]) for part in (read.keys, read.values, read.mask))
            )
        for n, caption in enumerate(fresh):
            if len(self.captions) < self.size:
                self.captions.append(caption)
                at = len(self.captions) - 1
            else:
                self.captions[self._next] = caption
                at, self._next = self._next, (self._next + 1) % self.size
            self._kv.keys[at], self._kv.values[at], self._kv.mask[at] = read.keys[n], read.values[n], read.mask[n]

    def batch(self, rows: int, unconditional: float) -> Batch:
        """Pictures of captions drawn from the pool; the part `unconditional` of them with the empty caption's text."""
        assert self._kv is not None
        picked = [self._rng.randrange(len(self.captions)) for _ in range(rows)]
        layouts = [self.captions[n].layout for n in picked]
        drawn = np.stack([render(one.background, place(one, self._rng)) for one in layouts])
        pictures = torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 127.5 - 1
        keys, values, mask = self._kv.keys[picked], self._kv.values[picked], self._kv.mask[picked]
        for n in range(rows):
            if self._rng.random() < unconditional:
                keys[n], values[n], mask[n] = self._empty.keys[0], self._empty.values[0], self._empty.mask[0]
        return Batch(pictures, TextKV(keys, values, mask))
