"""YAML text as a small tree of nodes that know their line. No meaning is given to keys here.

Scalars follow YAML 1.2's core rules, so `on`, `yes`, `1:30` and dates are text and `1e-4` is a number; but numbers are
finite. Invariant: no mapping has a key twice; a repeated one is a problem that names both lines.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from launch.origins import Layer, Origin, Problem, join, refusal
from proto.params import Json

ScalarValue = bool | int | float | str | None
MAX_NODES: Final = 100_000  # aliases may make a small file large
MAX_DEPTH: Final = 64
MAX_CHARS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Scalar:
    origin: Origin
    value: ScalarValue


@dataclass(frozen=True, slots=True)
class ListNode:
    origin: Origin
    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Entry:
    """`origin` is the key's."""

    origin: Origin
    node: "Node"


@dataclass(frozen=True, slots=True)
class MapNode:
    """`base` is what stood in the place of a mapping to which overrides added keys; a shorthand, if it is right at all."""

    origin: Origin
    entries: Mapping[str, Entry] = field(default_factory=dict)
    base: Scalar | None = None


Node = Scalar | ListNode | MapNode

_TAG = "tag:yaml.org,2002:"
_NULL, _BOOL, _INT, _FLOAT, _STR = (f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str"))
_PATTERNS = {
    _NULL: re.compile(r"^(?:~|null|Null|NULL|)$"),
    _BOOL: re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"),
    _INT: re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    _FLOAT: re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"),
}


class _Resolver(BaseResolver):
    """YAML 1.2's core schema, less the numbers that are not finite."""


for _tag, _pattern in _PATTERNS.items():
    _Resolver.add_implicit_resolver(_tag, _pattern, None)


class _Loader(Reader, Scanner, Parser, Composer, _Resolver):
    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        _Resolver.__init__(self)


def parse(text: str, file: str, problems: list[Problem], layer: Layer = Layer.FILE) -> Node:
    """The tree of one YAML document; an empty one is a null. Adds repeated keys and the like to `problems`.

    Raises `DeployError` for text that is not YAML at all.
    """
    if len(text) > MAX_CHARS:
        raise refusal(
            [Problem(Origin(layer, file, 1, 1), "", f"longer than {MAX_CHARS} characters: not a deploy file")]
        )
    try:
        root = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        said = "; ".join(part for part in (error.context, error.problem) if part)
        raise refusal([Problem(Origin(layer, file, line, column), "", f"not valid YAML: {said}")]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"not valid YAML: the character U+{ord(text[error.position]):04X} is not allowed"
        raise refusal([Problem(Origin(layer, file, line, 1), "", message)]) from error
    except RecursionError as error:
        raise refusal([Problem(Origin(layer, file, 1, 1), "", "nested too deeply")]) from error
    if root is None:
        return Scalar(Origin(layer, file, 1, 1), None)
    return _Builder(file, layer, problems).build(root, "")


@dataclass
class _Builder:
    file: str
    layer: Layer
    problems: list[Problem]
    above: set[int] = field(default_factory=set)
    count: int = 0

    def build(self, node: yaml.Node, path: str) -> Node:
        origin = self._origin(node)
        self.count += 1
        if self.count > MAX_NODES:
            raise refusal([Problem(origin, path, f"more than {MAX_NODES} values, with aliases written out")])
        if isinstance(node, yaml.ScalarNode):
            return Scalar(origin, self._scalar(node, path, origin))
        if id(node) in self.above:
            raise refusal([Problem(origin, path, "this value contains itself through an alias")])
        if node.tag not in (f"{_TAG}seq", f"{_TAG}map"):
            self.problems.append(Problem(origin, path, f"the tag {node.tag} is not allowed here; leave it out"))
        if len(self.above) >= MAX_DEPTH:
            raise refusal([Problem(origin, "", f"nested more than {MAX_DEPTH} levels deep")])
        self.above.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return ListNode(origin, tuple(self.build(item, f"{path}[{at}]") for at, item in enumerate(node.value)))
            return MapNode(origin, self._entries(node, path))
        finally:
            self.above.discard(id(node))

    def _entries(self, node: yaml.Node, path: str) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for key, value in node.value:
            origin = self._origin(key)
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(Problem(origin, path, "a key must be text, not a list or mapping"))
                continue
            name = str(key.value)
            if name in entries:
                what = "repeated stage name" if path == "stages" else "repeated key"
                message = f"{what}; the first is on line {entries[name].origin.line}"
                self.problems.append(Problem(origin, join(path, name), message))
            elif name == "<<":
                self.problems.append(
                    Problem(origin, join(path, name), "merge keys are not supported; repeat the values")
                )
            else:
                entries[name] = Entry(origin, self.build(value, join(path, name)))
        return entries

    def _scalar(self, node: yaml.ScalarNode, path: str, origin: Origin) -> ScalarValue:
        text = str(node.value)
        if node.tag == _STR:
            return text
        pattern = _PATTERNS.get(node.tag)
        if pattern is None or not pattern.match(text):
            message = f"the tag {node.tag.replace(_TAG, '!!')} is not allowed here; leave it out"
            self.problems.append(Problem(origin, path, message))
            return text
        if node.tag == _NULL:
            return None
        if node.tag == _BOOL:
            return text.lower() == "true"
        if node.tag == _INT:
            return self._integer(text, path, origin)
        number = float(text)
        if not math.isfinite(number):
            self.problems.append(Problem(origin, path, f"the number {text} is too large"))
        return number

    def _integer(self, text: str, path: str, origin: Origin) -> int:
        if len(text) > 40:
            self.problems.append(Problem(origin, path, "a number of more than 40 digits"))
            return 0
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)

    def _origin(self, node: yaml.Node) -> Origin:
        return Origin(self.layer, self.file, node.start_mark.line + 1, node.start_mark.column + 1)


def plain(node: Node) -> Json:
    """The values of a tree alone."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, ListNode):
        return [plain(item) for item in node.items]
    return {key: plain(entry.node) for key, entry in node.entries.items()}
