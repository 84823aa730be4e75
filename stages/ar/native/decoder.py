"""A stock model's weights as the C library reads them, and one step on them.

`Decoder` takes models whose layers are those of the Llama family (Llama, Mistral, Qwen2, Qwen3, Phi3, SmolLM2, ...): by
what their modules are called and made of, never by the model's name. Whether it computes the same as the model itself is
tried when a stage starts, like everything else (`stages.ar.pool`). The pages are the paged runner's own, so a sequence
goes from one way of computing to the other from step to step.

Invariant: what C points to is kept alive here. The model's modules are not touched; what replaces one of them later (a
shard) must stop the use of its decoder, which `current` tells.
"""

import ctypes
from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from stages.ar.attention import Layer as Pages
from stages.ar.loras import base_of
from stages.ar.native import library as c

TILE: Final = 16
STATIC_ROPE: Final = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not depend on how long the sequences of a step are."""


class Unfit(Exception):
    """Why a model cannot be decoded in C, in words."""


class Shape(Protocol):
    """What `stages.ar.pool` measures of an attention layer."""

    @property
    def window(self) -> int | None: ...


class Decoder:
    """`shapes[i]`, `pages[i]` and `scales[i]` are those of attention layer i. Raises `Unfit`, and `library.Unavailable`."""

    def __init__(
        self,
        model: PreTrainedModel,
        pages: Sequence[Pages],
        windows: Sequence[int | None],
        scales: Sequence[float],
        context: int,
    ) -> None:
        if model.dtype not in (torch.float32, torch.bfloat16) or model.device.type != "cpu":
            raise Unfit(f"it is {model.dtype} on {model.device}; C has float32 and bfloat16 on a CPU")
        self._library = c.library()
        self._kept: list[torch.Tensor] = []
        self._pages = pages
        base = model.base_model
        layers = list(_module(base, "layers", nn.ModuleList))
        self._embed = model.get_input_embeddings()
        self._found: list[tuple[nn.Module, str, nn.Module]] = []
        head = model.get_output_embeddings()
        if head is None or len(layers) != len(pages):
            raise Unfit("its layers or its head are not where they are looked for")
        made = [self._layer(*one) for one in zip(layers, pages, windows, scales, strict=True)]
        self._layers = (c.Layer * len(made))(*made)
        cosines, sines = _angles(_module(base, "rotary_emb", nn.Module), context, model.dtype)
        attention = layers[0].self_attn
        first = pages[0]
        heads, size = int(model.config.num_attention_heads), int(first.keys.shape[3])
        self.vocabulary = int(head.weight.shape[0])
        self._model = c.Model(
            head=self._matrix([head]),
            norm=self._floats(_norm(base, "norm").weight),
            cosines=self._floats(cosines),
            sines=self._floats(sines),
            layers=self._layers,
            count=len(made),
            hidden=head.weight.shape[1],
            heads=heads,
            kv_heads=first.keys.shape[2],
            head_size=size,
            rotary=cosines.shape[1],
            inner=made[0].down.k,
            page=first.keys.shape[1],
            eps=_eps(base.norm),
            bf16=model.dtype == torch.bfloat16,
            gelu=_gelu(layers[0].mlp),
        )
        self._check(attention, made, heads, size)

    def current(self) -> bool:
        """Whether the model's modules are still those that were packed. Adapters are no matter here: sequences that use
        one are computed elsewhere."""
        return all(base_of(getattr(parent, name)) is child for parent, name, child in self._found)

    def find_pages(self) -> None:
        """After the pages have got other memory."""
        for layer, pages in zip(self._layers, self._pages, strict=True):
            layer.keys, layer.values = pages.keys.data_ptr(), pages.values.data_ptr()

    def step(self, ids: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """Logits (rows, V), float32, of one token for each row. `ids` and `positions` (rows,), `tables` (rows, P): int64;
        a row's table holds the pages of all of its tokens, this one included."""
        rows = ids.shape[0]
        x = self._embed(ids).to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        logits = torch.empty(rows, self._model.head.n, dtype=torch.float32)
        positions, tables = positions.contiguous(), tables.contiguous()
        step = c.Step(x.data_ptr(), positions.data_ptr(), tables.data_ptr(), rows, tables.shape[1], logits.data_ptr())
        if self._library.omni_decode(ctypes.byref(self._model), ctypes.byref(step), torch.get_num_threads()):
            raise MemoryError(f"no memory to decode {rows} tokens")
        return logits[:, : self.vocabulary]

    # --- packing ------------------------------------------------------------------------------------------------------

    def _layer(self, layer: nn.Module, pages: Pages, window: int | None, scale: float) -> c.Layer:
        attention, mlp = _module(layer, "self_attn", nn.Module), _module(layer, "mlp", nn.Module)
        known = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        for name, child in layer.named_children():
            if name not in known and any(True for _ in child.parameters()):
                raise Unfit(f"its layers have a part called {name}")
        return c.Layer(
            qkv=self._matrix(self._linears(attention, ("qkv_proj",), ("q_proj", "k_proj", "v_proj"))),
            out=self._matrix(self._linears(attention, ("o_proj",))),
            gate_up=self._matrix(self._linears(mlp, ("gate_up_proj",), ("gate_proj", "up_proj"))),
            down=self._matrix(self._linears(mlp, ("down_proj",))),
            norm1=self._floats(_norm(layer, "input_layernorm").weight),
            norm2=self._floats(_norm(layer, "post_attention_layernorm").weight),
            q_norm=self._floats(_norm(attention, "q_norm").weight) if hasattr(attention, "q_norm") else None,
            k_norm=self._floats(_norm(attention, "k_norm").weight) if hasattr(attention, "k_norm") else None,
            keys=pages.keys.data_ptr(),
            values=pages.values.data_ptr(),
            scale=scale,
            window=window or 0,
        )

    def _linears(self, parent: nn.Module, *choices: Sequence[str]) -> list[nn.Module]:
        for names in choices:
            if all(hasattr(parent, name) for name in names):
                found = [getattr(parent, name) for name in names]
                self._found += zip([parent] * len(names), names, found, strict=True)
                return found
        raise Unfit(f"its {type(parent).__name__} has no {' or '.join('/'.join(one) for one in choices)}")

    def _matrix(self, linears: Sequence[nn.Module]) -> c.Matrix:
        """Packed, one under the other."""
        weights = []
        for one in linears:
            weight = getattr(one, "weight", None)
            if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or type(weight.detach()) is not torch.Tensor:
                raise Unfit(f"a {type(one).__name__} is not a plain linear layer")
            if weight.shape[0] % TILE and len(linears) > 1:
                raise Unfit(f"a linear layer has {weight.shape[0]} outputs, not a multiple of {TILE}")
            weights.append(weight.detach())
        weight = (torch.cat(weights) if len(weights) > 1 else weights[0]).contiguous()
        rows, columns = weight.shape
        padded = (-(-rows // TILE) * TILE, -(-columns // 2) * 2)
        packed = torch.zeros(padded, dtype=weight.dtype)
        self._library.omni_pack(weight.data_ptr(), packed.data_ptr(), rows, columns, weight.dtype == torch.bfloat16)
        self._kept.append(packed)
        biases = [one.bias for one in linears]
        bias = None
        if any(one is not None for one in biases):
            whole = [torch.zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
            bias = self._floats(
                torch.nn.functional.pad(torch.cat([one.float() for one in whole]), (0, padded[0] - rows))
            )
        return c.Matrix(packed.data_ptr(), bias, *padded)

    def _floats(self, values: torch.Tensor) -> int:
        kept = values.detach().to(torch.float32, copy=True).contiguous()
        self._kept.append(kept)
        return int(kept.data_ptr())

    def _check(self, attention: nn.Module, made: Sequence[c.Layer], heads: int, size: int) -> None:
        """Sizes that C takes for granted."""
        model = self._model
        kv_heads = model.kv_heads
        if any((model.hidden % TILE, size % TILE, model.inner % TILE, heads % kv_heads, model.rotary % 2)):
            raise Unfit(f"a size of its layers is not a multiple of {TILE}")
        for layer, pages in zip(made, self._pages, strict=True):
            fine = layer.qkv.n == (heads + 2 * kv_heads) * size and layer.qkv.k == model.hidden
            fine &= layer.out.n == model.hidden and layer.out.k == heads * size
            fine &= layer.gate_up.n == 2 * model.inner and layer.down.k == model.inner
            fine &= pages.keys.shape == pages.values.shape == self._pages[0].keys.shape
            if not fine or model.rotary > size:
                raise Unfit("its layers differ in size")
        if getattr(attention, "sinks", None) is not None:
            raise Unfit("its attention has sinks")


def _module(parent: nn.Module, name: str, kind: type[nn.Module]) -> nn.Module:
    child = getattr(parent, name, None)
    if not isinstance(child, kind):
        raise Unfit(f"its {type(parent).__name__} has no {name}")
    return child


def _norm(parent: nn.Module, name: str) -> nn.Module:
    norm = _module(parent, name, nn.Module)
    if not type(norm).__name__.endswith("RMSNorm") or getattr(norm, "bias", None) is not None:
        raise Unfit(f"its {name} is a {type(norm).__name__}")
    return norm


def _eps(norm: nn.Module) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))


def _gelu(mlp: nn.Module) -> bool:
    name = type(getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))).__name__
    if name in ("SiLUActivation", "SiLU"):
        return False
    if name in ("GELUTanh", "PytorchGELUTanh", "NewGELUActivation"):
        return True
    raise Unfit(f"its layers use {name}")


def _angles(rotary: nn.Module, context: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position, (context, rotary size) each, as the model's own module gives them."""
    kind = getattr(rotary, "rope_type", None)
    if kind not in STATIC_ROPE:
        raise Unfit(f"its rotary embedding is {kind}")
    with torch.inference_mode():
        cosines, sines = rotary(torch.zeros(1, 1, 1, dtype=dtype), torch.arange(context).unsqueeze(0))
    return cosines[0], sines[0]
