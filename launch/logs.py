"""Logging of both commands: plain lines on stderr, each with the time and who speaks."""

import logging

from rich.console import Console


def set_up_logs(who: str, verbose: bool, quiet: bool = False, console: Console | None = None) -> None:
    """`who` stands in every line: "master", or the stage's name. `quiet` keeps to warnings.

    A `console` that shows progress must be given: lines that are written past it would be mixed with its moving line.
    """
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO,
        format=f"%(asctime)s {who} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        handlers=None if console is None else [_ConsoleHandler(console)],
        force=True,
    )
    if not verbose:
        for noisy in ("httpx", "httpcore", "urllib3", "uvicorn", "asyncio", "transformers", "diffusers", "torchao"):
            logging.getLogger(noisy).setLevel(logging.ERROR)


class _ConsoleHandler(logging.Handler):
    """Whole lines above whatever moves on the console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.out(self.format(record), highlight=False)
