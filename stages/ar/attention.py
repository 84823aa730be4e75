"""Attention over pages: what a stock model calls instead of its own, and how it computes.

The runner puts a `Batch` into `BATCH` and calls the model; every attention layer then calls `paged_attention`, which
writes the new keys and values into the layer's pages and lets the backend attend. The rows of a batch are tokens, packed:
first one row for each sequence that only continues its answer, then the chunks of prompts, one after another.

Two backends. `SdpaBackend` gathers the pages that a row needs and uses PyTorch's scaled_dot_product_attention: it runs on
every device. `FlashBackend` reads the pages in place through flash-attn, on CUDA, where that is installed. Measured on a
CPU for 16 rows, 256 tokens each, 9 heads on 3: pages gathered into a buffer that stays and SDPA on them, 0.76 ms a layer
in bfloat16 with one thread; an SDPA for each sequence, 0.93; two matmuls and a softmax, 1.4; `pages[table]` into new
memory instead of the buffer costs another 0.5. Query heads that share a KV head are rows of one product.

Invariant: a row reads the tokens of its own sequence up to itself, in the layer's window, and nothing else.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface

from proto.errors import StageFailed

NAME: Final = "omni_paged"
"""What `config._attn_implementation` is called while the paged runner has the model."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What one layer asks of its attention. `window`: a row sees itself and so many tokens less one before it."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # (heads,)


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of one prompt: rows `first` to `first + count` are its tokens `start` to `start + count`."""

    first: int
    count: int
    start: int
    pages: torch.Tensor  # int64, those of tokens 0 to start + count


@dataclass(slots=True)
class Batch:
    """One forward. `slots`: (T,), page * page size + place, where each row's keys and values go.

    `tables`: (n, P) pages of the rows that continue an answer, padded with page 0; `lengths`: (n,) their tokens, the new
    one included.
    """

    slots: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    pieces: tuple[Piece, ...]
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)  # of the answers' rows, by window

    @property
    def answers(self) -> int:
        return int(self.tables.shape[0])


@dataclass(frozen=True, slots=True)
class Layer:
    """Pages of one layer: (pages, page size, KV heads, head size), each."""

    keys: torch.Tensor
    values: torch.Tensor


class Backend(Protocol):
    """Attends; `query` is (T, heads, head size), the new keys and values are in the pages. Returns (T, heads, size)."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: Layer, batch: Batch, traits: Traits
    ) -> torch.Tensor: ...


class Attending(Protocol):
    """What answers an attention call during a forward: the paged runner's pages, or the probe that measures a model."""

    def __call__(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, traits: Traits
    ) -> torch.Tensor: ...


BATCH: Final[ContextVar[Attending]] = ContextVar("omni_paged_batch")
"""Set for the time of one forward. Not an argument of the model's: not every model hands unknown ones down."""


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **rest: object,
) -> tuple[torch.Tensor, None]:
    """For `transformers.AttentionInterface`: query (1, heads, T, size), key and value (1, KV heads, T, size)."""
    if attention_mask is not None or position_bias is not None:
        raise StageFailed(
            f"{type(module).__name__} has a mask or a position bias of its own, which pages cannot honour"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    traits = Traits(scale, sliding_window, softcap, s_aux)
    out = BATCH.get()(
        int(module.layer_idx), query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), traits
    )
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)


class SdpaBackend:
    """See the module's docstring. Owns the buffers that pages are gathered into."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, int, str], torch.Tensor] = {}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: Layer, batch: Batch, traits: Traits
    ) -> torch.Tensor:
        outs = []
        if batch.answers:
            outs.append(self._answers(query[: batch.answers], layer, batch, traits))
        for piece in batch.pieces:
            rows = slice(piece.first, piece.first + piece.count)
            if piece.start == 0:
                keys, values = key[rows], value[rows]
            else:
                keys, values = self._gather(layer, piece.pages, piece.start + piece.count)
            outs.append(_piece(query[rows], keys, values, piece, traits))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _answers(self, query: torch.Tensor, layer: Layer, batch: Batch, traits: Traits) -> torch.Tensor:
        """One row for each sequence: query (n, heads, size)."""
        n, heads, size = query.shape
        kv_heads = layer.keys.shape[2]
        tokens = batch.tables.shape[1] * layer.keys.shape[1]
        keys, values = self._gather(layer, batch.tables.reshape(-1), None)
        keys = keys.view(n, tokens, kv_heads, -1).transpose(1, 2)
        values = values.view(n, tokens, kv_heads, -1).transpose(1, 2)
        grouped = query.reshape(n, kv_heads, heads // kv_heads, size)
        mask = batch.masks.get(traits.window)
        if mask is None:
            mask = batch.masks[traits.window] = _answers_mask(batch, tokens, traits.window, query.dtype)
        return _attend(grouped, keys, values, mask, traits).reshape(n, heads, -1)

    def _gather(self, layer: Layer, pages: torch.Tensor, tokens: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these pages one after another, (tokens, KV heads, size); None is all tokens."""
        both: list[torch.Tensor] = []
        for source in (layer.keys, layer.values):
            width = source.shape[1] * source.shape[2] * source.shape[3]
            out = self._buffer(source, len(both), pages.shape[0] * width).view(pages.shape[0], *source.shape[1:])
            torch.index_select(source, 0, pages, out=out)
            both.append(out.view(-1, *source.shape[2:])[:tokens])
        return both[0], both[1]

    def _buffer(self, like: torch.Tensor, which: int, size: int) -> torch.Tensor:
        key = (like.dtype, which, str(like.device))
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(2 * size, dtype=like.dtype, device=like.device)
        return buffer[:size]


def attend_alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, traits: Traits) -> torch.Tensor:
    """One whole prompt by itself: (T, heads, size) and (T, KV heads, size) to (T, heads, size)."""
    count = query.shape[0]
    return _piece(query, key, value, Piece(0, count, 0, torch.empty(0, dtype=torch.int64)), traits)


def _piece(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, piece: Piece, traits: Traits) -> torch.Tensor:
    """A chunk: query (count, heads, size), keys (tokens, KV heads, size)."""
    groups = query.shape[1] // keys.shape[1]
    q = query.transpose(0, 1).unsqueeze(0)
    k = keys.repeat_interleave(groups, 1).transpose(0, 1).unsqueeze(0)
    v = values.repeat_interleave(groups, 1).transpose(0, 1).unsqueeze(0)
    tokens = keys.shape[0]
    windowed = traits.window is not None and traits.window < tokens
    if piece.start == 0 and not windowed and traits.softcap is None and traits.sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=piece.count > 1, scale=traits.scale)
    else:
        places = torch.arange(tokens, device=q.device)
        mine = torch.arange(piece.start, piece.start + piece.count, device=q.device).unsqueeze(1)
        seen = places <= mine
        if traits.window is not None:
            seen &= places > mine - traits.window
        out = _attend(q, k, v, _additive(seen, q.dtype), traits)
    return out[0].transpose(0, 1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, traits: Traits) -> torch.Tensor:
    """`q` (n, h, rows, size), `k` and `v` (n, h, tokens, size); `mask` broadcasts to (n, h, rows, tokens)."""
    if traits.softcap is None and traits.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=traits.scale)
    scores = torch.matmul(q, k.transpose(-1, -2)) * traits.scale
    if traits.softcap is not None:
        scores = torch.tanh(scores / traits.softcap) * traits.softcap
    scores = scores + mask
    if traits.sinks is not None:
        # The heads are h * rows of an answer's row, or h of a chunk: either way in the order of the sinks.
        per_row = traits.sinks.numel() // scores.shape[1]
        sinks = traits.sinks.to(scores.dtype).view(1, scores.shape[1], per_row, 1)
        scores = torch.cat([scores, sinks.expand(scores.shape[0], -1, scores.shape[2], -1)], dim=-1)
        return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32)[..., :-1].to(q.dtype), v)
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)


def _answers_mask(batch: Batch, tokens: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    places = torch.arange(tokens, device=batch.lengths.device)
    lengths = batch.lengths.unsqueeze(1)
    seen = places < lengths
    if window is not None:
        seen &= places >= lengths - window
    return _additive(seen, dtype)[:, None, None, :]


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


class FlashBackend:
    """flash-attn's `flash_attn_varlen_func` on the pages themselves, for answers and chunks in one call."""

    PAGE: Final = 256
    """Page sizes must be multiples of it."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function = function
        self._plan: tuple[int, Mapping[str, object]] = (0, {})

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: Layer, batch: Batch, traits: Traits
    ) -> torch.Tensor:
        if traits.sinks is not None:
            raise StageFailed("attention sinks need the SDPA backend; flash-attn has none")
        if self._plan[0] != id(batch):
            self._plan = (id(batch), _flash_plan(batch))
        window = (-1, -1) if traits.window is None else (traits.window - 1, 0)
        return self._function(
            query.contiguous(),
            layer.keys,
            layer.values,
            softmax_scale=traits.scale,
            causal=True,
            window_size=window,
            softcap=traits.softcap or 0.0,
            **self._plan[1],
        )


def _flash_plan(batch: Batch) -> Mapping[str, object]:
    """Row and token boundaries and one page table for all sequences of the batch."""
    device = batch.slots.device
    counts = [1] * batch.answers + [piece.count for piece in batch.pieces]
    lengths = [*batch.lengths.tolist(), *(piece.start + piece.count for piece in batch.pieces)]
    width = max([batch.tables.shape[1], *(piece.pages.shape[0] for piece in batch.pieces)])
    table = torch.zeros(len(counts), width, dtype=torch.int32, device=device)
    table[: batch.answers, : batch.tables.shape[1]] = batch.tables
    for row, piece in enumerate(batch.pieces, start=batch.answers):
        table[row, : piece.pages.shape[0]] = piece.pages
    ends = [F.pad(torch.tensor(one).cumsum(0), (1, 0)).to(device, torch.int32) for one in (counts, lengths)]
    return {
        "cu_seqlens_q": ends[0],
        "cu_seqlens_k": ends[1],
        "max_seqlen_q": max(counts),
        "max_seqlen_k": max(lengths),
        "block_table": table,
    }


def choose_backend(device: torch.device, dtype: torch.dtype, page: int) -> Backend:
    """flash-attn where it is installed and fits (CUDA, 16 bits, pages of 256), else SDPA."""
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and page % FlashBackend.PAGE == 0:
        try:
            from flash_attn import flash_attn_varlen_func
        except ImportError:
            return SdpaBackend()
        return FlashBackend(flash_attn_varlen_func)
    return SdpaBackend()
