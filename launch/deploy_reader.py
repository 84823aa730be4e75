"""A YAML tree into deploy structs, by walking both side by side.

Every problem is noted with its place and the walk goes on, so that one run shows them all. Where a value cannot be used
its default stands in, so that the rest can still be checked; the result is only to be used if `problems` stays empty.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec.inspect as mi

from launch import units
from launch.deploy_types import (
    bare,
    choices,
    describe,
    found,
    in_range,
    members,
    nullable,
    options,
    shorthand,
    text_fits,
    variants,
)
from launch.origins import Origin, Problem, join
from launch.yaml_tree import Entry, ListNode, MapNode, Node, Scalar, plain
from proto.deploy import Deploy
from proto.suggest import hint, nearest

Loaded: TypeAlias = Any
"""A value of whatever type the struct's field has, or `BROKEN`."""

Siblings: TypeAlias = Sequence[tuple[str, mi.StructType]]
"""The structs that stand in the same place in stages of other kinds, by kind."""

BROKEN: Final = object()
_YES_NO: Final = {"yes": True, "on": True, "y": True, "no": False, "off": False, "n": False}


class DeployReader:
    """Reads one tree. `origins` has the place of every key that was written, by dotted path; `broken` those of no use."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self.origins: dict[str, Origin] = {}
        self.broken: set[str] = set()

    def read(self, root: Node) -> Deploy | None:
        """The deploy, or None if not even its outline can be used."""
        kind = mi.type_info(Deploy)
        assert isinstance(kind, mi.StructType)
        self._check_text(root, "")
        value = self._struct(root, kind, "", root.origin, ())
        return value if isinstance(value, Deploy) else None

    def _check_text(self, node: Node, path: str) -> None:
        """Half of a surrogate pair is a character for Python, but no process, file or socket can be told of it. It comes
        of an escape in YAML, or of bytes in a name that are not UTF-8."""
        if isinstance(node, Scalar):
            if isinstance(node.value, str) and not _is_text(node.value):
                self._note(node.origin, path, f"{node.value!a:.100} holds half of a surrogate pair, which is no text")
        elif isinstance(node, ListNode):
            for at, item in enumerate(node.items):
                self._check_text(item, f"{path}[{at}]")
        else:
            for key, entry in node.entries.items():
                if not _is_text(key):
                    self._note(entry.origin, path, f"{key!a:.100} holds half of a surrogate pair, which is no text")
                self._check_text(entry.node, join(path, key))

    def _note(self, origin: Origin, path: str, message: str) -> Loaded:
        self.problems.append(Problem(origin, path, message))
        return BROKEN

    def _value(self, node: Node, kind: mi.Type, path: str, origin: Origin, siblings: Siblings = ()) -> Loaded:
        self.origins[path] = origin
        value = self._read(node, kind, path, origin, siblings)
        if value is BROKEN:
            self.broken.add(path)
        return value

    def _read(self, node: Node, kind: mi.Type, path: str, origin: Origin, siblings: Siblings) -> Loaded:
        if isinstance(node, Scalar) and node.value is None and nullable(kind):
            return None
        kinds = options(kind)
        tagged = variants(kinds)
        if tagged is not None:
            return self._tagged(node, tagged, path, origin)
        if len(kinds) > 1:
            return self._any_scalar(node, kind, kinds, path, origin)
        inner, unit = bare(kinds[0])
        match inner:
            case mi.StructType():
                return self._struct(node, inner, path, origin, siblings)
            case mi.DictType():
                return self._dict(node, inner, path, origin)
            case mi.VarTupleType():
                return self._list(node, inner, path, origin)
            case mi.AnyType():
                return self._data(node, path)
            case _:
                return self._scalar(node, inner, unit, path, origin)

    # --- mappings -----------------------------------------------------------------------------------------------------

    def _tagged(self, node: Node, kinds: list[mi.StructType], path: str, origin: Origin) -> Loaded:
        field = str(kinds[0].tag_field)
        names = [str(kind.tag) for kind in kinds]
        if not isinstance(node, MapNode) or node.base is not None:
            return self._note(origin, path, f"expected a mapping with a `{field}`, found {found(node)}")
        entry = node.entries.get(field)
        if entry is None:
            return self._note(origin, join(path, field), f"missing; one of {', '.join(names)}")
        name = entry.node.value if isinstance(entry.node, Scalar) else None
        self.origins[join(path, field)] = entry.origin
        if not isinstance(name, str) or name not in names:
            message = f"expected one of {', '.join(names)}, found {found(entry.node)}"
            meant = nearest(name, names) if isinstance(name, str) else None
            return self._note(
                entry.origin, join(path, field), message + (f"; did you mean {meant!r}?" if meant else "")
            )
        chosen = kinds[names.index(name)]
        others = [(str(kind.tag), kind) for kind in kinds if kind is not chosen]
        rest = MapNode(node.origin, {key: value for key, value in node.entries.items() if key != field})
        return self._struct(rest, chosen, path, origin, others)

    def _struct(self, node: Node, kind: mi.StructType, path: str, origin: Origin, siblings: Siblings) -> Loaded:
        entries = self._entries(node, kind, path, origin)
        if entries is None:
            return BROKEN
        fields = {field.encode_name: field for field in kind.fields}
        values: dict[str, Loaded] = {}
        meant: set[str] = set()
        for key, entry in entries.items():
            field = fields.get(key)
            if field is None:
                meant.add(self._unknown(key, entry, kind, path, siblings))
                continue
            beside = [(name, one) for name, other in siblings if (one := _struct_at(other, key))]
            value = self._value(entry.node, field.type, join(path, key), entry.origin, beside)
            if value is not BROKEN:
                values[field.name] = value
        for key, field in fields.items():
            if field.required and field.name not in values:
                if key not in entries and key not in meant:
                    self._note(origin, join(path, key), f"missing; {describe(field.type)} is needed")
                if not isinstance(bare(field.type)[0], mi.StrType):
                    return BROKEN
                values[field.name] = ""
        try:
            return kind.cls(**values)
        except ValueError as error:
            return self._note(origin, path, str(error))

    def _entries(self, node: Node, kind: mi.StructType, path: str, origin: Origin) -> dict[str, Entry] | None:
        """The mapping's entries, with a shorthand written out; None if it is no mapping."""
        short = shorthand(kind)
        base, entries = (node.base, node.entries) if isinstance(node, MapNode) else (node, {})
        if base is None:
            return dict(entries)
        if short is not None and isinstance(base, Scalar) and isinstance(base.value, str):
            return {short.encode_name: Entry(base.origin if base is not node else origin, base), **entries}
        is_empty = isinstance(base, Scalar) and base.value is None
        remedy = "; leave the key out to use the defaults" if is_empty and path else ""
        self._note(origin, path, f"expected {describe(kind)}, found {found(base)}{remedy}")
        return None

    def _unknown(self, key: str, entry: Entry, kind: mi.StructType, path: str, siblings: Siblings) -> str:
        """Note an unknown key; the key that was meant, or ""."""
        names = [field.encode_name for field in kind.fields]
        where = join(path, key)
        having = [name for name, other in siblings if key in (field.encode_name for field in other.fields)]
        inside = [
            f"{field.encode_name}.{key}"
            for field in kind.fields
            if (deeper := _struct_at(kind, field.encode_name)) and key in (one.encode_name for one in deeper.fields)
        ]
        if having:
            whose = "those of method" if kind.tag_field == "method" else "stages of kind"
            self._note(entry.origin, where, f"unknown key; only {whose} {' or '.join(having)} have it")
        elif inside and nearest(key, names) is None:
            self._note(entry.origin, where, f"unknown key; did you mean {inside[0]!r}?")
        else:
            self._note(entry.origin, where, f"unknown key; {hint(key, names, 'valid keys')}")
            return nearest(key, names) or ""
        return ""

    def _dict(self, node: Node, kind: mi.DictType, path: str, origin: Origin) -> Loaded:
        if not isinstance(node, MapNode) or node.base is not None:
            return self._note(origin, path, f"expected a mapping, found {found(node)}")
        if len(node.entries) < (kind.min_length or 0):
            return self._note(origin, path, f"expected at least {kind.min_length} entry, found none")
        if kind.max_length is not None and len(node.entries) > kind.max_length:
            return self._note(origin, path, f"expected at most {kind.max_length} entries, found {len(node.entries)}")
        values: dict[str, Loaded] = {}
        key_type, _ = bare(kind.key_type)
        for key, entry in node.entries.items():
            if isinstance(key_type, mi.StrType) and not text_fits(key, key_type):
                self._note(entry.origin, join(path, key), f"the name must be {describe(key_type)}")
            value = self._value(entry.node, kind.value_type, join(path, key), entry.origin)
            if value is not BROKEN:
                values[key] = value
        return values

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _list(self, node: Node, kind: mi.VarTupleType, path: str, origin: Origin) -> Loaded:
        if not isinstance(node, ListNode):
            is_item = isinstance(node, Scalar) and node.value is not None
            remedy = f"; write [{found(node)}]" if is_item else ""
            return self._note(origin, path, f"expected {describe(kind)}, found {found(node)}{remedy}")
        if kind.max_length is not None and len(node.items) > kind.max_length:
            return self._note(origin, path, f"expected at most {kind.max_length} items, found {len(node.items)}")
        values = [
            self._read(item, kind.item_type, f"{path}[{at}]", item.origin, ()) for at, item in enumerate(node.items)
        ]
        return BROKEN if BROKEN in values else tuple(values)

    def _any_scalar(self, node: Node, kind: mi.Type, kinds: Sequence[mi.Type], path: str, origin: Origin) -> Loaded:
        """A union of plain types: the value keeps the type that YAML gave it."""
        names: dict[type, type[mi.Type]] = {
            bool: mi.BoolType,
            int: mi.IntType,
            float: mi.FloatType,
            str: mi.StrType,
        }
        value = node.value if isinstance(node, Scalar) else None
        wanted = names.get(type(value))
        for one in kinds:
            inner, unit = bare(one)
            if wanted is not None and isinstance(inner, wanted):
                return self._scalar(node, inner, unit, path, origin)
        return self._note(origin, path, f"expected {describe(kind)}, found {found(node)}")

    def _data(self, node: Node, path: str) -> Loaded:
        """Data whose meaning is not ours. Its leaves get their origins too."""
        if isinstance(node, MapNode):
            for key, entry in node.entries.items():
                self._value(entry.node, mi.AnyType(), join(path, key), entry.origin)
        return plain(node)

    def _scalar(self, node: Node, kind: mi.Type, unit: str | None, path: str, origin: Origin) -> Loaded:
        value = node.value if isinstance(node, Scalar) else None
        match kind:
            case mi.BoolType() if isinstance(value, bool):
                return value
            case mi.IntType() | mi.FloatType():
                number = _number(value, kind, unit)
                if number is not None and in_range(number, kind):
                    return number
            case mi.StrType() if isinstance(value, str) and text_fits(value, kind):
                return value
            case mi.EnumType():
                for member in members(kind):
                    if member.value == value:
                        return member
        end = ""
        words = choices(kind)
        if words is not None and isinstance(value, str) and (meant := nearest(value, words)):
            end = f"; did you mean {meant!r}?"
        elif isinstance(kind, mi.BoolType) and isinstance(value, str) and value.lower() in _YES_NO:
            end = f"; write {str(_YES_NO[value.lower()]).lower()}"
        elif isinstance(kind, mi.StrType) and words is None and isinstance(value, int | float):
            end = "; put it in quotes to make it text"
        wanted = describe(mi.Metadata(kind, extra={"unit": unit}) if unit else kind)
        return self._note(origin, path, f"expected {wanted}, found {found(node)}{end}")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _struct_at(kind: mi.StructType, key: str) -> mi.StructType | None:
    """The struct in field `key`, if it has one."""
    for field in kind.fields:
        if field.encode_name == key:
            inner, _ = bare(field.type)
            return inner if isinstance(inner, mi.StructType) else None
    return None


def _number(value: Loaded, kind: mi.IntType | mi.FloatType, unit: str | None) -> float | None:
    """The number that was meant, or None. A float is never taken for an integer, nor true for 1."""
    if isinstance(value, str) and unit:
        value = units.parse(value, unit)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(kind, mi.FloatType):
        return float(value) if abs(value) < 1e300 else None
    return value if isinstance(value, int) else None
