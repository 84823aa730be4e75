"""Where a value of the deploy came from, and a problem that names such a place. Plain data."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from proto.errors import DeployError


class Layer(enum.Enum):
    """From the strongest to the weakest."""

    SET = "--set"
    FILE = "file"
    FOLDER = "model folder"
    DEFAULT = "default"
    MODEL = "model default"


@dataclass(frozen=True, slots=True)
class Origin:
    """`file`, `line` and `column` (both from 1) are of a YAML file, line 0 is the whole; for a model folder, `file` says what was seen there."""

    layer: Layer
    file: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        if self.layer is Layer.FILE:
            return f"{self.file}:{self.line}" if self.line else self.file
        return self.file or self.layer.value


@dataclass(frozen=True, slots=True)
class Problem:
    """`path` is the dotted key path; "" for the file as a whole."""

    origin: Origin
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.path}: {self.message}" if self.path else f"{self.origin}: {self.message}"


def refusal(problems: Iterable[Problem]) -> DeployError:
    """One error that says them all, a line each, in the order of the file."""
    ordered = sorted(problems, key=lambda one: (one.origin.layer is Layer.SET, one.origin.line, one.origin.column))
    first = ordered[0].path
    parts = first.split(".")
    stage = parts[1] if parts[0] == "stages" and len(parts) > 1 else None
    return DeployError("\n".join(dict.fromkeys(map(str, ordered))), stage=stage, field=first or None)


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
