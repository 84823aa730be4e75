"""hypothesis strategies for wire messages, read off the struct types themselves, so that a new field is covered at once."""

import functools
import math
import operator
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from proto.framing import DataLane, Lane
from proto.messages import DataMessage
from proto.tensors import Dtype, TensorRef, WireTensor

_SAFE_TEXT = st.characters(exclude_categories=("Cs",))
_JSON_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(_SAFE_TEXT, max_size=8)
)
json_data = st.recursive(
    _JSON_LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(_SAFE_TEXT, max_size=5), inner, max_size=3),
    max_leaves=6,
)
"""What the wire calls data: null, booleans, numbers, strings, lists and string-keyed maps."""


def union_members(union: object) -> tuple[type[msgspec.Struct], ...]:
    """The message types of a lane's union."""
    info = inspect.type_info(union)
    members = info.types if isinstance(info, inspect.UnionType) else (info,)
    return tuple(member.cls for member in members if isinstance(member, inspect.StructType))


def messages(union: object) -> st.SearchStrategy[msgspec.Struct]:
    """Any message of a union. What it says of tensors is only well formed, see `whole_messages`."""
    return st.one_of([structs(cls) for cls in union_members(union)])


@functools.cache
def structs(cls: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    """Instances that a decoder accepts; fields with defaults are sometimes left out."""
    if cls is TensorRef:
        return tensor_refs()
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    required = {f.name: _of(f.type) for f in info.fields if f.required}
    optional = {f.name: _of(f.type) for f in info.fields if not f.required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda fields: cls(**fields))


@st.composite
def tensor_refs(draw: st.DrawFn) -> TensorRef:
    """Small shapes of 0 to 4 dimensions, dimensions of 0 among them."""
    return TensorRef(draw(st.sampled_from(Dtype)), tuple(draw(st.lists(st.integers(0, 3), max_size=4))))


@st.composite
def whole_messages(draw: st.DrawFn, union: object) -> tuple[msgspec.Struct, list[WireTensor]]:
    """A message with the frames that it describes; values name tensors that are there."""
    message = draw(messages(union))
    if not isinstance(message, DataMessage):
        return message, []
    refs = draw(st.lists(tensor_refs(), max_size=3))
    named = _largest_index(msgspec.to_builtins(message))
    if named is not None:
        refs = [*refs, draw(tensor_refs())]
        message = msgspec.convert(_clamp(msgspec.to_builtins(message), len(refs)), type(message))
        assert isinstance(message, DataMessage)
    tensors = [WireTensor(ref, draw(st.binary(min_size=ref.nbytes, max_size=ref.nbytes))) for ref in refs]
    return msgspec.structs.replace(message, tensors=tuple(refs)), tensors


def frames_of(lane: Lane[Any], whole: tuple[Any, list[WireTensor]]) -> list[bytes]:
    """The frames as they come out of a socket."""
    message, tensors = whole
    frames = lane.encode(message, tensors) if isinstance(lane, DataLane) else lane.encode(message)
    return [bytes(frame) for frame in frames]


_IN_VALUE = "tensor"
_FURTHER = "more"


def _largest_index(data: object) -> int | None:
    found = [_largest_index(item) for item in _children(data)]
    if isinstance(data, dict) and isinstance(data.get(_IN_VALUE), int):
        found.append(data[_IN_VALUE])
        found += [index for index in data.get(_FURTHER, ()) if isinstance(index, int)]
    return max((index for index in found if index is not None), default=None)


def _clamp(data: object, count: int) -> object:
    if isinstance(data, dict):
        return {
            key: item % count
            if key == _IN_VALUE and isinstance(item, int)
            else [index % count for index in item]
            if key == _FURTHER and isinstance(item, list | tuple) and all(isinstance(index, int) for index in item)
            else _clamp(item, count)
            for key, item in data.items()
        }
    return [_clamp(item, count) for item in data] if isinstance(data, list | tuple) else data


def _children(data: object) -> list[object]:
    if isinstance(data, dict):
        return list(data.values())
    return list(data) if isinstance(data, list | tuple) else []


def _of(kind: inspect.Type) -> st.SearchStrategy[object]:
    """Values of one field's type, within its bounds."""
    match kind:
        case inspect.Metadata(type=inner):
            return _of(inner)
        case inspect.AnyType():
            return json_data
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=ge, le=le):
            return st.integers(-(2**63) if ge is None else ge, 2**63 - 1 if le is None else le)
        case inspect.FloatType():
            return _floats(kind)
        case inspect.StrType(pattern=str() as pattern):
            return st.from_regex(pattern, fullmatch=True).filter(lambda text: not text.endswith("\n"))
        case inspect.StrType(min_length=least, max_length=most):
            return st.text(_SAFE_TEXT, min_size=least or 0, max_size=min(most or 12, 12))
        case inspect.EnumType(cls=cls):
            return st.sampled_from(cls)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return st.lists(_of(item), max_size=3).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_of(key), _of(value), min_size=kind.min_length or 0, max_size=2)
        case inspect.UnionType(types=types):
            return functools.reduce(operator.or_, [_of(member) for member in types])
        case inspect.StructType(cls=cls):
            return st.deferred(lambda: structs(cls))
    raise NotImplementedError(f"no strategy for {kind}")


def _floats(kind: inspect.FloatType) -> st.SearchStrategy[float]:
    least = kind.ge if kind.ge is not None else kind.gt
    most = kind.le if kind.le is not None else kind.lt
    return st.floats(
        min_value=least,
        max_value=most,
        exclude_min=kind.gt is not None,
        exclude_max=kind.lt is not None,
        allow_nan=False,
        allow_infinity=False if least is None and most is None else None if math.inf in (least, most) else False,
    )
