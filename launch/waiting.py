"""Shows what a starting pipeline waits for: changing lines on a terminal, or each new line once when piped."""

import re
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console
from rich.status import Status
from rich.text import Text

_PERCENT: Final = re.compile(r" \(\d+%\)")


class Waiting:
    """`lines` gives everything that is waited for now: "waiting for stage painter (1 of 2 replicas) [painter/0: ...]"."""

    def __init__(self, console: Console, lines: Callable[[], Sequence[str]]) -> None:
        self._console = console
        self._lines = lines
        self._status = Status("starting", console=console) if console.is_terminal else None
        self._last: dict[str, str] = {}

    def __enter__(self) -> "Waiting":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, line: str) -> None:
        """`line` is new, or one of several that are."""
        if self._status is not None:
            # Text: a note in brackets is no markup
            self._status.update(Text("\n".join(self._lines() or [line])))
            return
        stage = line.partition(" (")[0]
        without_percent = _PERCENT.sub("", line)
        if self._last.get(stage) != without_percent:
            self._last[stage] = without_percent
            self._console.out(without_percent, highlight=False)
