"""`omni-master explain`: every resolved value of a deploy, and where it came from."""

import json
import re
from typing import Final

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch import units
from launch.deploy_file import Resolved
from launch.flatten import Leaf, flatten
from launch.origins import Layer
from launch.yaml_tree import parse, plain
from proto.errors import DeployError
from proto.params import Json

_PAIR: Final = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")


def explain(resolved: Resolved) -> list[tuple[str, str, str]]:
    """(dotted key path, value as YAML would write it, origin) of every value, in the deploy's order.

    The origin is "default", "FILE:LINE", "--set", "model default" (null here: the model's own value applies), or for a
    bare model what was seen in its folder.
    """
    return [(leaf.path, written(leaf), str(resolved.origins[leaf.path])) for leaf in flatten(resolved.deploy)]


def show(resolved: Resolved, console: Console) -> None:
    """A table on a terminal; piped, one `key: value  # origin` a line."""
    rows = explain(resolved)
    if not console.is_terminal:
        for key, value, origin in rows:
            console.out(f"{key}: {value}  # {origin}", highlight=False)
        return
    weak = {Layer.DEFAULT.value, Layer.MODEL.value}
    table = Table("key", "value", "from", title=f"{resolved.deploy.name} ({resolved.path})", title_justify="left")
    for key, value, origin in rows:
        table.add_row(Text(key), Text(value), Text(origin), style="dim" if origin in weak else None)
    console.print(table)


def written(leaf: Leaf) -> str:
    """The value as it could stand in the YAML; reading it again gives the same value."""
    if leaf.unit is not None and isinstance(leaf.value, int | float):
        return units.format_value(leaf.value, leaf.unit)
    return _yaml(leaf.value)


def _yaml(value: Json) -> str:
    """One line of YAML. PyYAML's own words where our stricter reader understands them the same way, else JSON's, which
    are YAML too."""
    text = str(yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False))
    text = text.removesuffix("...\n").strip()
    try:
        same = "\n" not in text and plain(parse(text, "", [])) == value
    except DeployError:
        same = False
    return text if same else _PAIR.sub(_whole, json.dumps(value, ensure_ascii=True))


def _whole(pair: re.Match[str]) -> str:
    """JSON writes a character beyond 16 bits as two halves, YAML as one number."""
    character: str = json.loads('"' + pair[0] + '"')
    return f"\\U{ord(character):08x}"
