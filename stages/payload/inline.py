"""Pictures, sound and tokens between their two forms: values inside a message, and payloads on an edge.

Engines see one form only: a value whose tensor is one of the job's. KV, hidden states and latents stay payloads.
"""

from collections.abc import Mapping

from proto.deploy import Kind
from proto.errors import ProtocolError
from proto.messages import Audio, Images, Tensor, Value, Video
from proto.params import Json
from proto.tensors import WireTensor
from stages.engine import OutgoingPayload, PulledPayload

_KIND = {Images: Kind.IMAGE, Audio: Kind.AUDIO, Video: Kind.VIDEO, Tensor: Kind.LATENTS}


def tensor_index(value: Value) -> int | None:
    """Which tensor a value names; None for values without one."""
    return value.tensor if isinstance(value, Images | Audio | Video | Tensor) else None


def payload_of(output: str, value: Value, tensor: WireTensor) -> OutgoingPayload:
    """The payload form of a value that names `tensor`."""
    meta: dict[str, int | float | list[int]] = {}
    if isinstance(value, Images | Audio | Video):
        meta["seeds"] = list(value.seeds)
    if isinstance(value, Audio):
        meta["sample_rate"] = value.sample_rate
    if isinstance(value, Video):
        meta["fps"] = value.fps
    kind = next(kind for form, kind in _KIND.items() if isinstance(value, form))
    return OutgoingPayload(kind, {output: tensor}, meta)


def inline_value(pulled: PulledPayload, tensors: list[WireTensor]) -> Value | None:
    """The value form of a payload, its tensor appended to `tensors`; None for kinds that stay payloads.

    Raises `ProtocolError` for one that lacks what its kind needs.
    """
    payload = pulled.descriptor
    if payload.kind not in (Kind.IMAGE.value, Kind.AUDIO.value, Kind.VIDEO.value):
        return None
    try:
        value = _value(payload.kind, payload.meta, len(tensors))
        tensors.append(next(iter(pulled.tensors.values())))
    except (LookupError, TypeError, ValueError, StopIteration) as error:
        raise ProtocolError(
            f"the payload of stage {payload.source} is no {payload.kind}: {type(error).__name__}: {error}"
        ) from None
    return value


def _value(kind: str, meta: Mapping[str, Json], index: int) -> Value:
    seeds = tuple(map(int, meta.get("seeds", ())))
    if kind == Kind.AUDIO.value:
        return Audio(tensor=index, sample_rate=int(meta["sample_rate"]), seeds=seeds)
    if kind == Kind.VIDEO.value:
        return Video(tensor=index, fps=float(meta["fps"]), seeds=seeds)
    return Images(tensor=index, seeds=seeds)
