"""`--set stages.painter.replicas=2`: values laid over the tree of the deploy file. Pure; the reader checks the result."""

from collections.abc import Sequence

from launch.origins import Layer, Origin, Problem
from launch.yaml_tree import Entry, MapNode, Node, Scalar, parse, plain
from proto.errors import DeployError
from proto.params import Json
from proto.suggest import hint

SET = Origin(Layer.SET)


def apply(root: Node, overrides: Sequence[str], problems: list[Problem]) -> Node:
    """The tree with each `KEY=VALUE` in it; later ones win. The value is YAML; a key may be new, a mapping is replaced."""
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            message = f"{override!r} is not of the form KEY=VALUE, such as stages.painter.replicas=2"
            problems.append(Problem(SET, "", message))
            continue
        try:
            value = parse(text, "", problems, Layer.SET)
        except DeployError:
            problems.append(Problem(SET, path, f"the value {text!r} is not valid YAML"))
            continue
        root = _laid_over(root, keys, value, "", problems)
    return root


def _laid_over(node: Node, keys: Sequence[str], value: Node, path: str, problems: list[Problem]) -> Node:
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    here = f"{path}.{key}" if path else key
    if isinstance(node, Scalar):
        node = MapNode(SET, {}, None if node.value is None else node)
    if not isinstance(node, MapNode):
        problems.append(Problem(SET, here, f"{path} is a list; set it as a whole: {path}=[...]"))
        return node
    below = node.entries.get(key)
    if below is None and path == "stages" and rest and rest[0] != "kind":
        problems.append(Problem(SET, here, f"there is no stage {key!r}; {hint(key, node.entries, 'stages')}"))
        return node
    child = _laid_over(below.node if below else MapNode(SET), rest, value, here, problems)
    origin = SET if below is None or not rest else below.origin
    return MapNode(node.origin, {**node.entries, key: Entry(origin, child)}, node.base)


def parse_value(text: str) -> Json:
    """A value typed on the command line, as YAML has it: 7, 0.5, true, a word. What is no YAML is a text."""
    problems: list[Problem] = []
    try:
        value = plain(parse(text, "", problems, Layer.SET))
    except DeployError:
        return text
    return text if problems else value
