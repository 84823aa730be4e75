"""What other stages get from a prefill: hidden states and keys and values, as tensors for an edge.

Keys and values are copied out of the pages, which go on to others; hidden states are the model's own tensors.
"""

import torch

from proto.deploy import Kind
from proto.errors import StageFailed
from proto.torch_tensors import to_wire
from stages.ar.runner import Runner
from stages.ar.scheduler import Track
from stages.engine import OutgoingPayload


def hidden_payload(hidden: torch.Tensor) -> OutgoingPayload:
    """Tensor `hidden`: last-layer states of all prompt tokens, after the final norm, (1, T, D)."""
    meta = {"tokens": hidden.shape[1], "size": hidden.shape[2], "dtype": _name(hidden.dtype)}
    return OutgoingPayload(Kind.HIDDEN, {"hidden": to_wire(hidden)}, meta)


def kv_payload(runner: Runner, track: Track, layers: tuple[int, ...], tokens: int) -> OutgoingPayload:
    """Tensors `k.<layer>` and `v.<layer>`, (1, kv_heads, T, head_dim), keys with their positions already applied.

    `position_offset` is the position of the first token, `prefill` says that the tokens are the prompt's and no more.
    Raises `StageFailed` for a layer that does not keep every token.
    """
    tensors = {}
    shape: torch.Size | None = None
    dtype = ""
    for layer in layers:
        keys, values = runner.keys_and_values(track, layer, tokens)
        tensors[f"k.{layer}"], tensors[f"v.{layer}"] = to_wire(keys), to_wire(values)
        if shape is None:
            shape, dtype = keys.shape, _name(keys.dtype)
    if shape is None:
        raise StageFailed("engine.kv_layers is empty", field="engine.kv_layers")
    meta = {
        "layers": list(layers),
        "heads": shape[1],
        "head_dim": shape[3],
        "tokens": tokens,
        "dtype": dtype,
        "position_offset": 0,
        "prefill": True,
    }
    return OutgoingPayload(Kind.KV, tensors, meta)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
