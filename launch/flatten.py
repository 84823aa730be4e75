"""A deploy as a flat list of its values, by dotted key path as in the YAML. Pure."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import msgspec.inspect as mi

from launch.deploy_types import bare, options, variants
from launch.origins import join
from proto.deploy import Deploy
from proto.params import Json


@dataclass(frozen=True, slots=True)
class Leaf:
    """`value` is plain data; `unit` is the unit of the field's type, if it has one."""

    path: str
    value: Json
    unit: str | None = None


def flatten(deploy: Deploy) -> Iterator[Leaf]:
    """Every value, in the order of the structs. Lists, empty mappings and null are leaves."""
    return _walk(deploy, mi.type_info(Deploy), "")


def _walk(value: Json, kind: mi.Type, path: str) -> Iterator[Leaf]:
    kinds = options(kind)
    tagged = variants(kinds)
    if tagged is not None and value is not None:
        chosen = next(one for one in tagged if one.cls is type(value))
        yield Leaf(join(path, str(chosen.tag_field)), chosen.tag)
        yield from _walk(value, chosen, path)
        return
    inner, unit = bare(kinds[0])
    if isinstance(inner, mi.StructType) and value is not None:
        values = msgspec.structs.asdict(value)
        for field in inner.fields:
            yield from _walk(values[field.name], field.type, join(path, field.encode_name))
    elif isinstance(value, dict) and value:
        deeper = inner.value_type if isinstance(inner, mi.DictType) else mi.AnyType()
        for key, below in value.items():
            yield from _walk(below, deeper, join(path, key))
    else:
        yield Leaf(path, _plain(value), unit if value is not None else None)


def _plain(value: Json) -> Json:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, msgspec.Struct):
        return {name: _plain(item) for name, item in msgspec.structs.asdict(value).items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
