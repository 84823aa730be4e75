"""Durations and sizes as people write them. Pure.

Seconds: `10`, `0.5`, "500ms", "2m". Bytes: `1024`, "512MB" (powers of 1000), "2GiB" (powers of 1024).
Invariant: `parse(format_value(value, unit), unit) == value`.
"""

import re
from decimal import Decimal
from typing import Final

from proto.deploy import DURATION, SIZE

_UNITS: Final[dict[str, dict[str, Decimal]]] = {
    DURATION: {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)},
    SIZE: {
        "B": Decimal(1),
        **{f"{prefix}B": Decimal(1000) ** power for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
        **{f"{prefix}iB": Decimal(1024) ** power for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
    },
}
_WRITTEN = re.compile(r"^([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)$")


def parse(text: str, unit: str) -> float | None:
    """Seconds or bytes; None if `text` is not a number with one of the units. May be a fraction of a byte."""
    match = _WRITTEN.match(text) if len(text) <= 40 else None
    scale = _UNITS[unit].get(match[2]) if match else None
    return None if match is None or scale is None else _number(Decimal(match[1]) * scale)


def describe(unit: str) -> str:
    """For messages: what may be written."""
    if unit == DURATION:
        return "a duration such as 10s, 500ms, 2m or 1h"
    return "a size such as 512MB or 2GiB"


def format_value(value: float, unit: str) -> str:
    """The shortest exact way to write it, with a unit."""
    if unit == DURATION:
        milliseconds = Decimal(repr(value)) * 1000
        whole = value < 1 and milliseconds == int(milliseconds)
        return f"{int(milliseconds)}ms" if whole else f"{Decimal(repr(value)).normalize():f}s"
    for name, scale in sorted(_UNITS[SIZE].items(), key=lambda item: -item[1]):
        if value >= scale and value % int(scale) == 0:
            return f"{int(value) // int(scale)}{name}"
    return f"{int(value)}B"


def _number(value: Decimal) -> float:
    return int(value) if value == int(value) else float(value)
