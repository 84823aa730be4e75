"""The paged runner, with answers computed in C where that can be done."""

from collections.abc import Sequence

import numpy as np
import torch

from stages.ar.native.decoder import Decoder
from stages.ar.runner import LOGITS_ONLY, Output, PagedRunner, Slept, Wish
from stages.ar.scheduler import Chunk, Track


class NativeRunner:
    """Chunks of one token go through `decoder`, all others (and all, where more than logits is wished for) through
    `paged`, on the same pages. So do those that use an adapter. A step with both is two forwards."""

    paged = True

    def __init__(self, paged: PagedRunner, decoder: Decoder) -> None:
        self._paged = paged
        self._decoder = decoder

    def run(self, chunks: Sequence[Chunk], wish: Wish = LOGITS_ONLY) -> Output:
        single = wish == LOGITS_ONLY and self._decoder.current()
        answers = sum(chunk.count == 1 for chunk in chunks) if single else 0
        if not answers or any(self._paged.embedded(chunk) for chunk in chunks[:answers]):
            return self._paged.run(chunks, wish)
        here = [chunk for chunk in chunks[:answers] if chunk.track.lora is None]
        if len(here) < answers:
            return self._with_adapters(chunks, here)
        logits = self._answers(here)
        if answers == len(chunks):
            return Output(logits)
        rest = self._paged.run(chunks[answers:]).logits
        return Output(torch.cat([logits, rest.to(logits.dtype)]))

    def _with_adapters(self, chunks: Sequence[Chunk], here: Sequence[Chunk]) -> Output:
        """Only those in `here` are computed in C."""
        if not here:
            return self._paged.run(chunks)
        mine = {id(chunk) for chunk in here}
        rest = [chunk for chunk in chunks if id(chunk) not in mine]
        logits = self._answers(here)
        both = torch.cat([logits, self._paged.run(rest).logits.to(logits.dtype)])
        order = [id(chunk) for chunk in (*here, *rest) if chunk.last]
        return Output(both[[order.index(id(chunk)) for chunk in chunks if chunk.last]])

    def embed(self, track: Track, embeds: torch.Tensor) -> None:
        self._paged.embed(track, embeds)

    def keys_and_values(self, track: Track, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._paged.keys_and_values(track, layer, tokens)

    def wipe(self, pages: Sequence[int]) -> None:
        self._paged.wipe(pages)

    def forget(self, track: Track) -> None:
        self._paged.forget(track)

    def sleep(self) -> Slept:
        return self._paged.sleep()

    def wake(self) -> None:
        self._paged.wake()
        self._decoder.find_pages()

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
