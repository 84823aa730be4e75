"""Inputs that are tensors or pictures: from wire tensors to what a pipeline takes, on its device and in its dtype.

Invariant: the pipeline gets copies. What arrived may be memory of ZeroMQ's or shared, and pipelines write in place.
"""

from collections.abc import Sequence

import torch
from PIL import Image

from proto.deploy import Kind
from proto.errors import InvalidRequest, StageFailed
from proto.messages import Images, Tensor, Tokens
from proto.numpy_tensors import from_wire as numpy_from_wire
from proto.params import Json
from proto.tensors import Dtype, WireTensor
from proto.torch_tensors import from_wire
from stages.diffusion import library
from stages.diffusion.loading import Painter
from stages.engine import Job, PulledPayload

_MASKS = ("{}_mask", "{}_attention_mask")
PICTURES = ("image", "mask_image")
"""Inputs that a pipeline gets as PIL images."""


def build(job: Job, painter: Painter) -> dict[str, Json]:
    """Arguments for the job's image, its tensors and its payloads, with the masks that belong to them."""
    found: dict[str, torch.Tensor] = {}
    arguments: dict[str, Json] = {}
    for name, value in job.inputs.items():
        if isinstance(value, Images):
            wires = [_wire_tensor(job, index, name, painter) for index in (value.tensor, *value.more)]
            arguments[name] = _pictures(wires, name, painter)
        elif isinstance(value, Tensor):
            found[name] = from_wire(_wire_tensor(job, value.tensor, name, painter))
        elif isinstance(value, Tokens):
            found[name] = torch.tensor(value.ids, dtype=torch.int64)
    for name, payload in job.payloads.items():
        if payload.descriptor.kind == Kind.KV.value:
            arguments[name] = _keys_and_values(payload, name, painter)
        elif name in PICTURES:
            arguments[name] = _pictures([_main_tensor(payload, name, painter)], name, painter)
        else:
            found.update(_payload_tensors(payload, name, painter))
    rows = {name: _with_rows(name, _placed(tensor, painter)) for name, tensor in found.items()}
    _complete_masks(rows, painter)
    arguments.update({n: list(t) if n in painter.signature.lists else t for n, t in rows.items()})
    return arguments


def _problem(painter: Painter, name: str, text: str) -> InvalidRequest:
    return InvalidRequest(f"stage {painter.stage}: input {name}: {text}", stage=painter.stage, field=name)


def _wire_tensor(job: Job, index: int, name: str, painter: Painter) -> WireTensor:
    if index >= len(job.tensors):
        raise _problem(painter, name, f"names tensor {index}, but the request has {len(job.tensors)}")
    return job.tensors[index]


def _main_tensor(payload: PulledPayload, name: str, painter: Painter) -> WireTensor:
    """The tensor named as the input, or the only one."""
    if name in payload.tensors:
        return payload.tensors[name]
    if len(payload.tensors) == 1:
        return next(iter(payload.tensors.values()))
    names = ", ".join(payload.tensors) or "nothing"
    raise _problem(painter, name, f"the payload must hold one tensor or one of that name; it holds {names}")


def _payload_tensors(payload: PulledPayload, name: str, painter: Painter) -> dict[str, torch.Tensor]:
    """The main tensor, and further ones that are arguments by their own names, such as a mask or pooled embeddings."""
    further = {n: from_wire(t) for n, t in payload.tensors.items() if n != name and len(payload.tensors) > 1}
    for other in further:
        if other not in painter.signature.tensors:
            raise _problem(painter, name, f"the payload's tensor {other!r} is no argument of {painter.info.model}")
    return {**further, name: from_wire(_main_tensor(payload, name, painter))}


def _keys_and_values(payload: PulledPayload, name: str, painter: Painter) -> dict[str, torch.Tensor]:
    """A language model's cache as the pipeline takes it: `k.<layer>` and `v.<layer>`, (1, heads, tokens, head_dim)."""
    wanted = library.denoiser_setting(painter.pipe, "kv_layers") or ()
    missing = [layer for layer in wanted if f"k.{layer}" not in payload.tensors or f"v.{layer}" not in payload.tensors]
    if missing:
        raise StageFailed(
            f"stage {painter.stage}: {painter.info.model} reads the keys and values of layers {list(wanted)}, and"
            f" {payload.descriptor.source} sent none of layer {missing[0]}; set"
            f" stages.{payload.descriptor.source}.engine.kv_layers to {list(wanted)}",
            stage=painter.stage,
            field=name,
        )
    if payload.descriptor.meta.get("position_offset", 0) != 0:
        raise _problem(painter, name, "its first token must stand at position 0")
    return {key: _placed(from_wire(tensor), painter) for key, tensor in payload.tensors.items()}


def _placed(tensor: torch.Tensor, painter: Painter) -> torch.Tensor:
    dtype = painter.dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(painter.device, dtype, copy=True)


def _with_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Embeddings (tokens, width), masks and ids (tokens) and pooled vectors (width) of one request get their batch axis."""
    alone = 2 if name.endswith("prompt_embeds") and "pooled" not in name else 1
    return tensor.unsqueeze(0) if name != "latents" and tensor.ndim == alone else tensor


def _complete_masks(rows: dict[str, torch.Tensor], painter: Painter) -> None:
    """Embeddings that come without a mask are all meant. The two of a guided pair get one length, where masks allow it."""
    masked = {name: mask for name in rows if (mask := _mask_name(name, painter)) is not None}
    for name, mask in masked.items():
        if mask not in rows:
            rows[mask] = torch.ones(rows[name].shape[:2], dtype=torch.int64, device=painter.device)
    lengths = [rows[name].shape[1] for name in masked]
    for name, mask in masked.items():
        missing = max(lengths) - rows[name].shape[1]
        if missing:
            rows[name] = torch.nn.functional.pad(rows[name], (0, 0, 0, missing))
            rows[mask] = torch.nn.functional.pad(rows[mask], (0, missing))


def _mask_name(name: str, painter: Painter) -> str | None:
    if name not in ("prompt_embeds", "negative_prompt_embeds") or name in painter.signature.lists:
        return None
    short = name.removesuffix("_embeds")
    return painter.signature.first(_MASKS[0].format(name), _MASKS[1].format(short))


def _pictures(wires: Sequence[WireTensor], name: str, painter: Painter) -> Image.Image | list[Image.Image]:
    """PIL images of uint8 tensors (n, height, width, channels); a single one is given alone. A mask is "L"."""
    is_mask = name == "mask_image"
    channels, mode = ((1, 3), "L") if is_mask else ((3, 4), painter.recipe.image_mode)
    pictures = []
    for wire in wires:
        shape = wire.ref.shape
        if wire.ref.dtype is not Dtype.U8 or len(shape) != 4 or shape[3] not in channels or 0 in shape:
            form = f"(n, height, width, {channels[0]} or {channels[1]})"
            raise _problem(painter, name, f"must be uint8 {form}, not {wire.ref.dtype.value} {shape}")
        array = numpy_from_wire(wire)
        pictures += [Image.fromarray(one[:, :, 0] if shape[3] == 1 else one).convert(mode) for one in array]
    return pictures[0] if len(pictures) == 1 else pictures


def count_pictures(job: Job, name: str) -> int:
    """How many pictures the job brings as that input, as far as its tensors say."""
    return sum(wire.ref.shape[0] if len(wire.ref.shape) == 4 else 1 for wire in _picture_wires(job, name))


def picture_sizes(job: Job, name: str) -> list[tuple[int, int]]:
    """(height, width) of each tensor of pictures that the job brings as that input."""
    shapes = [wire.ref.shape for wire in _picture_wires(job, name)]
    return [(shape[1], shape[2]) for shape in shapes if len(shape) == 4]


def _picture_wires(job: Job, name: str) -> list[WireTensor]:
    value, payload = job.inputs.get(name), job.payloads.get(name)
    if isinstance(value, Images):
        return [job.tensors[index] for index in (value.tensor, *value.more) if index < len(job.tensors)]
    return [] if payload is None else list(payload.tensors.values())[:1]
