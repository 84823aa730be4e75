"""What a pipeline's `__call__` takes, read from its signature. The library's own knowledge, so nothing here can go stale.

Invariant: a name in `plain` can be given JSON data; everything that holds tensors, images or callables is elsewhere.
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from proto.params import Json

_PLAIN = (bool, int, float, str, dict)
_TENSORS = (torch.Tensor, torch.FloatTensor, torch.LongTensor, torch.IntTensor)  # the last three are no subclasses
FRAME_RATES = ("fps", "frame_rate", "target_fps")
"""What pipelines call the frame rate of a video."""

_OWNED = frozenset(
    {"self", "prompt", "negative_prompt", "width", "height", "num_inference_steps", "strength", "generator"}
    | {"guidance_scale", "num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt", "batch_size"}
    | {"output_type", "return_dict", "callback", "callback_steps", "callback_on_step_end", "image", "latents"}
    | {"mask_image", "kv", "negative_kv", "callback_on_partial_output"}
    | {"callback_on_step_end_tensor_inputs", "prior_callback_on_step_end", "prior_callback_on_step_end_tensor_inputs"}
)
"""Arguments that the engine sets itself, from `DiffusionParams`, from inputs or by its contract."""


@dataclass(frozen=True, slots=True)
class CallSignature:
    """`names`: all arguments. `defaults`: those that have one. `plain`: those allowed in `params.extra`.
    `tuples`: plain ones that want a tuple. `tensors`: those that take a tensor, `lists` those that want a list of them."""

    names: frozenset[str]
    defaults: Mapping[str, Json]
    plain: frozenset[str]
    tuples: frozenset[str]
    tensors: frozenset[str]
    lists: frozenset[str]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def first(self, *names: str) -> str | None:
        """The first of `names` that the pipeline takes."""
        return next((name for name in names if name in self.names), None)


def read_signature(pipeline_class: type) -> CallSignature:
    """Read `pipeline_class.__call__`."""
    call: Callable[..., Json] = pipeline_class.__call__
    parameters = [
        p
        for p in inspect.signature(call).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"
    ]
    leaves = {p.name: tuple(_leaves(p.annotation)) for p in parameters}
    free = [p for p in parameters if p.name not in _OWNED]
    return CallSignature(
        names=frozenset(p.name for p in parameters),
        defaults={p.name: p.default for p in parameters if p.default is not p.empty},
        plain=frozenset(p.name for p in free if p.annotation is p.empty or set(leaves[p.name]) & set(_PLAIN)),
        tuples=frozenset(p.name for p in free if _is_tuple(p.annotation)),
        tensors=frozenset(name for name, found in leaves.items() if any(map(_is_tensor, found))),
        lists=frozenset(p.name for p in parameters if _wants_tensor_list(p.annotation)),
    )


def _origin(annotation: Json) -> Json:
    return typing.get_origin(annotation)


def _leaves(annotation: Json) -> Sequence[Json]:
    """The innermost types of an annotation; those of callables do not count."""
    origin, args = _origin(annotation), typing.get_args(annotation)
    if origin is Callable:
        return ()
    if not args:
        return (annotation,)
    return [leaf for arg in args for leaf in _leaves(arg)]


def _members(annotation: Json) -> Sequence[Json]:
    union = _origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _is_tensor(leaf: Json) -> bool:
    return leaf in _TENSORS


def _wants_tensor_list(annotation: Json) -> bool:
    members = _members(annotation)
    return not any(map(_is_tensor, members)) and any(
        _origin(m) is list and any(map(_is_tensor, typing.get_args(m))) for m in members
    )


def _is_tuple(annotation: Json) -> bool:
    kinds = {_origin(m) or m for m in _members(annotation)}
    return tuple in kinds and list not in kinds
