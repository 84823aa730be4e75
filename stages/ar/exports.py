"""What other stages get from a prefill: hidden states and keys and values, as tensors for an edge.

The tensors are the model's own, not copies, where they lie on the CPU: a cache grows by new tensors and never writes
into those it had.
"""

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from proto.deploy import Kind
from proto.errors import StageFailed
from proto.torch_tensors import to_wire
from stages.engine import OutgoingPayload


def hidden_payload(hidden: torch.Tensor) -> OutgoingPayload:
    """Tensor `hidden`: last-layer states of all prompt tokens, after the final norm, (1, T, D)."""
    meta = {"tokens": hidden.shape[1], "size": hidden.shape[2], "dtype": _name(hidden.dtype)}
    return OutgoingPayload(Kind.HIDDEN, {"hidden": to_wire(hidden)}, meta)


def kv_payload(cache: Cache, layers: tuple[int, ...], tokens: int) -> OutgoingPayload:
    """Tensors `k.<layer>` and `v.<layer>`, (1, kv_heads, T, head_dim), keys with their positions already applied.

    `position_offset` is the position of the first token, `prefill` says that the tokens are the prompt's and no more.
    Raises `StageFailed` for a layer that does not keep every token.
    """
    tensors = {}
    for layer in layers:
        keys, values = _keys_and_values(cache, layer)
        if keys.shape[-2] != tokens:
            raise StageFailed(
                f"layer {layer} keeps {keys.shape[-2]} of the prompt's {tokens} tokens (a sliding window);"
                " name the layers that keep all of them in engine.kv_layers",
                field="engine.kv_layers",
            )
        tensors[f"k.{layer}"], tensors[f"v.{layer}"] = to_wire(keys), to_wire(values)
    first, _ = _keys_and_values(cache, layers[0])
    meta = {
        "layers": list(layers),
        "heads": first.shape[1],
        "head_dim": first.shape[3],
        "tokens": tokens,
        "dtype": _name(first.dtype),
        "position_offset": 0,
        "prefill": True,
    }
    return OutgoingPayload(Kind.KV, tensors, meta)


def _keys_and_values(cache: Cache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    kept = cache.layers[layer]
    if not isinstance(kept, DynamicLayer):
        raise StageFailed(
            f"layer {layer} keeps no keys and values; name layers that do in engine.kv_layers", field="engine.kv_layers"
        )
    return kept.keys, kept.values


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
