"""What the types of the deploy's structs mean to a reader of YAML: their words, units, bounds and shorthands.

Everything is read off the structs through `msgspec.inspect`, so a new field needs nothing here. Pure.
"""

import enum
import re
from collections.abc import Sequence

import msgspec.inspect as mi

from launch import units
from launch.yaml_tree import ListNode, MapNode, Node, Scalar
from proto.deploy import SHORTHAND

_CHOICE = re.compile(r"^\^\(([\w|-]+)\)\$$")
INT64 = 1 << 63


def bare(kind: mi.Type) -> tuple[mi.Type, str | None]:
    """The type without its annotations, and its unit if it has one."""
    if isinstance(kind, mi.Metadata):
        return kind.type, (kind.extra or {}).get("unit")
    return kind, None


def shorthand(kind: mi.StructType) -> mi.Field | None:
    """The field that text in the place of the mapping stands for."""
    for field in kind.fields:
        if isinstance(field.type, mi.Metadata) and (field.type.extra or {}).get(SHORTHAND):
            return field
    return None


def options(kind: mi.Type) -> tuple[mi.Type, ...]:
    """The members of a union other than null; of another type, itself."""
    inner, _ = bare(kind)
    return (
        tuple(one for one in inner.types if not isinstance(one, mi.NoneType))
        if isinstance(inner, mi.UnionType)
        else (kind,)
    )


def nullable(kind: mi.Type) -> bool:
    inner, _ = bare(kind)
    return isinstance(inner, mi.NoneType | mi.AnyType) or (
        isinstance(inner, mi.UnionType) and any(isinstance(one, mi.NoneType) for one in inner.types)
    )


def choices(kind: mi.Type) -> list[str] | None:
    """The words that are valid, for an enum or a pattern such as `^(a|b)$`."""
    if isinstance(kind, mi.EnumType):
        return [str(member.value) for member in members(kind)]
    if isinstance(kind, mi.StrType) and kind.pattern and (match := _CHOICE.match(kind.pattern)):
        return match[1].split("|")
    return None


def members(kind: mi.EnumType) -> list[enum.Enum]:
    return list(kind.cls)


def describe(kind: mi.Type) -> str:
    """What may be written, in words: "an integer >= 1"."""
    inner, unit = bare(kind)
    words = choices(inner)
    if words is not None:
        return f"one of {', '.join(words)}"
    match inner:
        case mi.BoolType():
            return "true or false"
        case mi.IntType() | mi.FloatType():
            number = units.describe(unit) if unit else "an integer" if isinstance(inner, mi.IntType) else "a number"
            bounds = _bounds(inner)
            return f"{number}, {bounds}" if unit and bounds else f"{number} {bounds}".strip()
        case mi.StrType():
            return f"text that matches {inner.pattern}" if inner.pattern else "text"
        case mi.VarTupleType() | mi.ListType():
            return f"a list of {describe(inner.item_type)}"
        case mi.UnionType():
            return " or ".join(describe(one) for one in options(inner))
        case mi.StructType():
            return "text or a mapping" if shorthand(inner) else "a mapping"
        case mi.DictType():
            return "a mapping"
        case _:
            return "a value"


def _bounds(kind: mi.IntType | mi.FloatType) -> str:
    limits = ((">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le))
    return " and ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)


def in_range(value: float, kind: mi.IntType | mi.FloatType) -> bool:
    """Within the type's bounds, and no larger than the wire can carry."""
    return (
        (kind.gt is None or value > kind.gt)
        and (kind.ge is None or value >= kind.ge)
        and (kind.lt is None or value < kind.lt)
        and (kind.le is None or value <= kind.le)
        and (isinstance(kind, mi.FloatType) or -INT64 <= value < INT64)
    )


def text_fits(text: str, kind: mi.StrType) -> bool:
    return (
        (kind.pattern is None or re.fullmatch(kind.pattern, text) is not None)
        and len(text) >= (kind.min_length or 0)
        and (kind.max_length is None or len(text) <= kind.max_length)
    )


def found(node: Node) -> str:
    """What stands there instead, in words."""
    match node:
        case MapNode(base=base):
            return "a mapping" if base is None else found(base)
        case ListNode():
            return "a list"
        case Scalar(value=None):
            return "nothing"
        case Scalar(value=bool() as value):
            return str(value).lower()
        case Scalar(value=str() as value):
            return repr(value if len(value) <= 80 else value[:77] + "...")
        case Scalar(value=value):
            return str(value)


def variants(kinds: Sequence[mi.Type]) -> list[mi.StructType] | None:
    """The structs of a union that is told apart by a tag; None for any other type."""
    structs = [kind for kind in kinds if isinstance(kind, mi.StructType) and kind.tag_field]
    return structs if len(structs) == len(kinds) > 1 else None
