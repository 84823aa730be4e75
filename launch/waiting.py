"""Shows what a starting pipeline waits for: one changing line a terminal, or each new line once when piped."""

import re
from typing import Final

from rich.console import Console
from rich.status import Status

_PERCENT: Final = re.compile(r" \(\d+%\)")


class Waiting:
    def __init__(self, console: Console) -> None:
        self._console = console
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
        """`line` as `AsyncOmni.start` gives it: "waiting for stage painter (1 of 2 replicas) [painter/0: ...]"."""
        if self._status is not None:
            self._status.update(line)
            return
        stage = line.partition(" (")[0]
        without_percent = _PERCENT.sub("", line)
        if self._last.get(stage) != without_percent:
            self._last[stage] = without_percent
            self._console.out(without_percent, highlight=False)
