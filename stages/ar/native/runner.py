"""The paged runner, with answers computed in C where that can be done."""

from collections.abc import Sequence

import numpy as np
import torch

from stages.ar.native.decoder import Decoder
from stages.ar.runner import LOGITS_ONLY, Output, PagedRunner, Wish
from stages.ar.scheduler import Chunk, Track


class NativeRunner:
    """Chunks of one token go through `decoder`, all others (and all, where more than logits is wished for) through
    `paged`, on the same pages. A step with both is two forwards."""

    paged = True

    def __init__(self, paged: PagedRunner, decoder: Decoder) -> None:
        self._paged = paged
        self._decoder = decoder

    def run(self, chunks: Sequence[Chunk], wish: Wish = LOGITS_ONLY) -> Output:
        single = wish == LOGITS_ONLY and self._decoder.current()
        answers = sum(chunk.count == 1 for chunk in chunks) if single else 0
        if not answers or any(self._paged.embedded(chunk) for chunk in chunks[:answers]):
            return self._paged.run(chunks, wish)
        logits = self._answers(chunks[:answers])
        if answers == len(chunks):
            return Output(logits)
        rest = self._paged.run(chunks[answers:]).logits
        return Output(torch.cat([logits, rest.to(logits.dtype)]))

    def embed(self, track: Track, embeds: torch.Tensor) -> None:
        self._paged.embed(track, embeds)

    def keys_and_values(self, track: Track, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._paged.keys_and_values(track, layer, tokens)

    def wipe(self, pages: Sequence[int]) -> None:
        self._paged.wipe(pages)

    def forget(self, track: Track) -> None:
        self._paged.forget(track)

    def _answers(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits of those that are the last of their tracks, (S, V), float32."""
        places = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
        ids = np.fromiter((chunk.track.tokens[chunk.start] for chunk in chunks), np.int64, len(chunks))
        tables = torch.from_numpy(self._paged.tables(chunks, int(places.max()) + 1))
        with torch.inference_mode():
            logits = self._decoder.step(torch.from_numpy(ids), torch.from_numpy(places), tables)
            if all(chunk.last for chunk in chunks):
                return logits
            return logits[torch.tensor([row for row, chunk in enumerate(chunks) if chunk.last], dtype=torch.int64)]
