"""Computes a plan on a stock model: the only place where the AR stage runs one.

`PagedRunner` packs all chunks into one row of tokens, without padding, and lets the model's layers attend over pages
(`stages.ar.attention`). `StockRunner` gives each sequence a cache of transformers' own and a forward of its own: slower,
for the models whose layers keep more than keys and values (state spaces, short convolutions), and what the paged one is
checked against when a stage starts. Both give the same logits.

Why not transformers' own continuous batching (`generate_batch`, 5.24)? It serves well what it serves: packed forwards,
paged cache with prefix sharing, chunked prefill, for text in and tokens out, and its attention interface and
`logits_to_keep` are what this runner stands on. It gives no hidden states and no keys and values, takes no embeddings, has
no hook between steps (so no abort that frees at once, no grammar, no seed of a request's own), never reports a request
that was cancelled, cannot refuse what never fits, and on a CPU builds one [tokens, all keys] mask for all sequences
together. Measured with SmolLM2-135M in float32 on one core, CPU seconds: 8 prompts of 128 tokens 1.95 here, 2.34 there,
2.15 in `generate`; a decoding step of 8 answers 0.13, 0.17, 0.13. `tests/bench/bench_ar.py` prints all side by side.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from proto.errors import StageFailed
from stages import sleeping
from stages.ar.attention import BATCH, NAME, Backend, Batch, Layer, Piece, Traits
from stages.ar.loras import adapters_of
from stages.ar.scheduler import Chunk, Track
from stages.ar.zeros import zeros


@dataclass(frozen=True, slots=True)
class Output:
    """`logits`: (S, V), one row for each chunk that is the `last` of its track, in the plan's order, in the model's dtype.
    `hidden`: states of each chunk's tokens, (1, count, D), those of several layers side by side, if they were asked for.
    `scores`: logits after every token of the chunks that were to be scored, (count, V), by the chunk's number."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()
    scores: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a forward is to give beyond the logits of last tokens. `hidden`: which of transformers' `hidden_states`;
    `scored`: numbers of the chunks whose every token's logits are wanted."""

    hidden: tuple[int, ...] = ()
    scored: frozenset[int] = frozenset()


LOGITS_ONLY: Final = Wish()


def joined(outputs: Sequence[Output], wish: Wish) -> Output:
    """Of forwards of one chunk each, as if they had been one. `wish` is that of all together."""
    none = outputs[0].logits[:0]  # stands for the states of a chunk whose sequence did not ask for them
    states = tuple(output.hidden[0] if output.hidden else none for output in outputs) if wish.hidden else ()
    scores = {number: output.scores[0] for number, output in enumerate(outputs) if 0 in output.scores}
    return Output(torch.cat([output.logits for output in outputs]), states, scores)


class Runner(Protocol):
    paged: bool

    def run(self, chunks: Sequence[Chunk], wish: Wish = LOGITS_ONLY) -> Output:
        """Compute these chunks. May be done again with the same ones, if it raised."""
        ...

    def embed(self, track: Track, embeds: torch.Tensor) -> None:
        """The track's first tokens are no tokens: these embeddings (T, D) stand for them. Until it is forgotten."""
        ...

    def keys_and_values(self, track: Track, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a track's first tokens, (1, KV heads, tokens, head size), with positions applied; nobody writes to them
        again. Raises `StageFailed` for a layer that does not keep them."""
        ...

    def wipe(self, pages: Sequence[int]) -> None:
        """Make these pages harmless: they hold what is not a number."""
        ...

    def forget(self, track: Track) -> None:
        """The track is done or gone."""
        ...

    def sleep(self) -> "Slept":
        """Give the pages' memory back, with what is in them, and an accelerator's with the weights, until `wake`."""
        ...

    def wake(self) -> None:
        """Have the weights again, and empty pages. Raises what PyTorch raises if there is no memory."""
        ...


class Slept(NamedTuple):
    """Bytes of pages that were given back, and of weights that went to the host."""

    pages: int
    weights: int


class _Model:
    """The call that both runners make."""

    def __init__(self, model: PreTrainedModel, attention: str) -> None:
        self._model = model
        self._attention = attention
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._headless = not model.can_generate()

    def __call__(self, rows: torch.Tensor, **inputs: Any) -> Any:
        """Logits of `rows` only, (1, rows, V), and what else the model gives. One without a head gives its states."""
        if self._model.config._attn_implementation != self._attention:
            self._model.set_attn_implementation(self._attention)
        if self._keeps:
            return self._model(**inputs, logits_to_keep=rows)
        out = self._model(**inputs)
        whole = out.last_hidden_state if self._headless else out.logits
        out.logits = whole[:, rows]
        return out

    def to_host(self, device: torch.device) -> int:
        """The weights. Bytes that were moved: none from a CPU, where they are."""
        return sleeping.to_host([self._model], device)

    def to_device(self, device: torch.device) -> None:
        sleeping.to_device([self._model], device)

    def embedded(self, ids: torch.Tensor, places: Sequence[tuple[int, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The model's argument for `ids` (1, T), of which some are only places of given embeddings (t, D) from row on."""
        if not places:
            return {"input_ids": ids}
        embeds = self._model.get_input_embeddings()(ids).clone()
        for row, given in places:
            embeds[0, row : row + len(given)] = given
        return {"inputs_embeds": embeds}


class PagedRunner:
    """`layers[i]` are the pages of attention layer i. `context` is the most tokens of a sequence."""

    paged = True

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[Layer], backend: Backend, *, seats: int, context: int
    ) -> None:
        self._call = _Model(model, NAME)
        self._layers = layers
        self._backend = backend
        self._page = layers[0].keys.shape[1]
        self._device = layers[0].keys.device
        self._tables = _Tables(seats, -(-context // self._page))
        self._given = _Given()
        self.sizes: Sequence[
            int
        ] = ()  # forwards of answers only get rows of nobody's until they have one of these sizes

    def run(self, chunks: Sequence[Chunk], wish: Wish = LOGITS_ONLY) -> Output:
        batch, ids, positions = self._pack(chunks)
        firsts = list(accumulate((chunk.count for chunk in chunks), initial=0))
        lasts = [end - 1 for chunk, end in zip(chunks, firsts[1:], strict=True) if chunk.last]
        scored = [row for number in sorted(wish.scored) for row in range(firsts[number], firsts[number + 1])]
        rows = [*lasts, *scored]
        places = self._given.places(chunks, firsts)
        token = BATCH.set(_Forward(self._layers, self._backend, batch))
        try:
            with torch.inference_mode(), adapters_of(chunks, self._device):
                out = self._call(
                    torch.tensor(rows or [0], device=self._device),
                    **self._call.embedded(ids, places),
                    position_ids=positions,
                    use_cache=False,
                    output_hidden_states=bool(wish.hidden),
                )
        finally:
            BATCH.reset(token)
        counts = [chunk.count for chunk in chunks]
        states = _states(out, wish)[:, : firsts[-1]].split(counts, dim=1) if wish.hidden else ()
        numbers = sorted(wish.scored)
        parts = out.logits[0, len(lasts) : len(rows)].split([counts[number] for number in numbers]) if numbers else ()
        return Output(out.logits[0, : len(lasts)], tuple(states), dict(zip(numbers, parts, strict=True)))

    def embed(self, track: Track, embeds: torch.Tensor) -> None:
        self._given.add(track, embeds)

    def keys_and_values(self, track: Track, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = torch.tensor(track.pages, device=self._device)
        both = (self._layers[layer].keys, self._layers[layer].values)
        keys, values = (one[pages].flatten(0, 1)[:tokens].transpose(0, 1).unsqueeze(0).contiguous() for one in both)
        return keys, values

    def wipe(self, pages: Sequence[int]) -> None:
        where = torch.tensor(pages, dtype=torch.int64, device=self._device)
        for layer in self._layers:
            layer.keys[where] = 0
            layer.values[where] = 0

    def forget(self, track: Track) -> None:
        self._tables.drop(track)
        self._given.drop(track)

    def embedded(self, chunk: Chunk) -> bool:
        """Whether some of the chunk's tokens are given as embeddings."""
        return bool(self._given.places([chunk], [0]))

    def tables(self, chunks: Sequence[Chunk], longest: int) -> NDArray[np.int64]:
        """The pages of each chunk's sequence, (chunks, pages of `longest` tokens), padded with page 0 or what was there."""
        seats = [self._tables.seat(chunk.track) for chunk in chunks]
        return self._tables.array[seats, : -(-longest // self._page)]

    def sleep(self) -> Slept:
        tensors = [one for layer in self._layers for one in (layer.keys, layer.values)]
        self._shapes = [one.shape for one in tensors]
        freed = sum(int(one.nbytes) for one in tensors)
        for one in tensors:
            one.set_()  # the same tensor, for those who have it, without memory
        return Slept(freed, self._call.to_host(self._device))

    def wake(self) -> None:
        self._call.to_device(self._device)
        tensors = [one for layer in self._layers for one in (layer.keys, layer.values)]
        for one, shape in zip(tensors, self._shapes, strict=True):
            one.set_(zeros(*shape, dtype=one.dtype, device=self._device))

    def _spare(self, answers: int, chunks: int) -> int:
        """Rows to add to a forward of so many chunks."""
        if answers < chunks:
            return 0
        return next((size - answers for size in self.sizes if size >= answers), 0)

    def _pack(self, chunks: Sequence[Chunk]) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        """Ids and positions, (1, T) each, and where everything goes."""
        size, device = self._page, self._device
        answers = sum(chunk.count == 1 for chunk in chunks)
        seats = [self._tables.seat(chunk.track) for chunk in chunks]
        ids: list[int] = []
        for chunk in chunks:
            ids += chunk.track.tokens[chunk.start : chunk.end]
        counts = np.fromiter((chunk.count for chunk in chunks), np.int64, len(chunks))
        starts = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
        firsts = counts.cumsum() - counts
        positions = np.arange(len(ids)) + np.repeat(starts - firsts, counts)
        table = self._tables.array
        slots = table[np.repeat(seats, counts), positions // size] * size + positions % size
        spare = self._spare(answers, len(chunks))
        longest = int(starts[:answers].max()) + 1 if answers else 0
        pieces = tuple(
            Piece(
                int(first), chunk.count, chunk.start, torch.from_numpy(table[seat, : -(-chunk.end // size)]).to(device)
            )
            for first, chunk, seat in list(zip(firsts, chunks, seats, strict=True))[answers:]
        )
        tables, lengths = table[seats[:answers], : -(-longest // size)], starts[:answers] + 1
        if spare:  # rows of page 0, which is nobody's
            ids += [0] * spare
            slots, positions = np.pad(slots, (0, spare)), np.pad(positions, (0, spare))
            tables, lengths = np.pad(tables, ((0, spare), (0, 0))), np.pad(lengths, (0, spare), constant_values=1)
        batch = Batch(
            slots=torch.from_numpy(slots).to(device),
            tables=torch.from_numpy(tables).to(device),
            lengths=torch.from_numpy(lengths).to(device),
            pieces=pieces,
        )
        return (
            batch,
            torch.tensor([ids], dtype=torch.int64, device=device),
            torch.from_numpy(positions[None]).to(device),
        )


@dataclass(frozen=True, slots=True)
class _Forward:
    """Answers the attention calls of one forward."""

    layers: Sequence[Layer]
    backend: Backend
    batch: Batch

    def __call__(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, traits: Traits
    ) -> torch.Tensor:
        layer = self.layers[index]
        layer.keys.view(-1, *layer.keys.shape[2:]).index_copy_(0, self.batch.slots, key)
        layer.values.view(-1, *layer.values.shape[2:]).index_copy_(0, self.batch.slots, value)
        return self.backend.attend(query, key, value, layer, self.batch, traits)


class _Tables:
    """The page tables of the sequences that run, as one array, so that a step copies what is new and no more."""

    def __init__(self, seats: int, width: int) -> None:
        self.array: Final = np.zeros((seats, width), dtype=np.int64)
        self._free = list(range(seats))
        self._seat_of: dict[int, tuple[Track, int]] = {}
        self._known: dict[int, tuple[list[int], int]] = {}  # a list of pages, and how many of them are in the array

    def seat(self, track: Track) -> int:
        """The row of this track, up to date."""
        key = id(track)
        if key not in self._seat_of:
            if not self._free:
                self._make_room()
            self._seat_of[key] = (track, self._free.pop())
        seat = self._seat_of[key][1]
        pages, copied = self._known.get(key, ([], 0))
        if pages is not track.pages:
            copied = 0
        if copied < len(track.pages):
            self.array[seat, copied : len(track.pages)] = track.pages[copied:]
            self._known[key] = (track.pages, len(track.pages))
        return seat

    def drop(self, track: Track) -> None:
        self._known.pop(id(track), None)
        seat = self._seat_of.pop(id(track), None)
        if seat is not None:
            self._free.append(seat[1])

    def _make_room(self) -> None:
        """Preempted tracks need no row."""
        for track, _ in list(self._seat_of.values()):
            if not track.seated:
                self.drop(track)


class _Given:
    """Embeddings that stand for the first tokens of tracks."""

    def __init__(self) -> None:
        self._of: dict[int, torch.Tensor] = {}

    def add(self, track: Track, embeds: torch.Tensor) -> None:
        self._of[id(track)] = embeds

    def drop(self, track: Track) -> None:
        self._of.pop(id(track), None)

    def places(self, chunks: Sequence[Chunk], firsts: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        """Rows of the packed tokens from which on embeddings stand, and these."""
        if not self._of:
            return []
        found = [(first, self._of.get(id(chunk.track)), chunk) for first, chunk in zip(firsts, chunks, strict=False)]
        return [
            (first, given[chunk.start : chunk.end])
            for first, given, chunk in found
            if given is not None and chunk.start < len(given)
        ]


def _states(out: Any, wish: Wish) -> torch.Tensor:
    """The wished layers' states side by side, (1, T, layers * D)."""
    layers = [out.hidden_states[layer] for layer in wish.hidden]
    return layers[0] if len(layers) == 1 else torch.cat(layers, dim=-1)


class StockRunner:
    """One cache and one forward for each sequence."""

    paged = False

    def __init__(self, model: PreTrainedModel, device: torch.device, attention: str) -> None:
        self._call = _Model(model, attention)
        self._model = model
        self._device = device
        self._caches: dict[int, Cache] = {}
        self._given = _Given()

    def run(self, chunks: Sequence[Chunk], wish: Wish = LOGITS_ONLY) -> Output:
        outs = [self._one(chunk, wish, scored=number in wish.scored) for number, chunk in enumerate(chunks)]
        logits = [out.logits[0, -1:] for chunk, out in zip(chunks, outs, strict=True) if chunk.last]
        states = tuple(_states(out, wish) for out in outs) if wish.hidden else ()
        scores = {number: outs[number].logits[0] for number in wish.scored}
        return Output(torch.cat(logits) if logits else outs[0].logits[0, :0], states, scores)

    def embed(self, track: Track, embeds: torch.Tensor) -> None:
        self._given.add(track, embeds)

    def _one(self, chunk: Chunk, wish: Wish, *, scored: bool) -> Any:
        key = id(chunk.track)
        if chunk.start == 0:
            self._caches[key] = DynamicCache(config=self._model.config)
        cache = self._caches[key]
        ids = torch.tensor([chunk.track.tokens[chunk.start : chunk.end]], dtype=torch.int64, device=self._device)
        rows = range(chunk.count) if scored else [chunk.count - 1]
        with torch.inference_mode(), adapters_of([chunk], self._device):
            out = self._call(
                torch.tensor(rows, device=self._device),
                **self._call.embedded(ids, self._given.places([chunk], [0])),
                cache=cache,
                use_cache=True,
                output_hidden_states=bool(wish.hidden),
            )
        if cache.get_seq_length() != chunk.end:
            raise StageFailed(f"{type(self._model).__name__} does not use a key-value cache; the AR engine needs one")
        return out

    def keys_and_values(self, track: Track, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self._caches[id(track)].layers[layer]
        field = "engine.kv_layers"
        if not isinstance(kept, DynamicLayer):
            raise StageFailed(f"layer {layer} keeps no keys and values; name layers that do in {field}", field=field)
        if kept.keys.shape[-2] < tokens:
            raise StageFailed(
                f"layer {layer} keeps {kept.keys.shape[-2]} of {tokens} tokens (a sliding window); name the layers that"
                f" keep all of them in {field}",
                field=field,
            )
        return kept.keys[:, :, :tokens], kept.values[:, :, :tokens]

    def wipe(self, pages: Sequence[int]) -> None:
        """Each sequence has a cache of its own: there is nothing to wipe."""

    def sleep(self) -> Slept:
        return Slept(0, self._call.to_host(self._device))

    def wake(self) -> None:
        self._call.to_device(self._device)

    def forget(self, track: Track) -> None:
        self._caches.pop(id(track), None)
        self._given.drop(track)
