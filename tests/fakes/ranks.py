"""A follower's role for tests: does what it is told, and imports nothing that takes time."""

import os
import signal
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from proto.errors import StartError
from stages.engine import LoadContext
from stages.parallel.line import Line


class Fault(Enum):
    NONE = auto()
    RAISE = auto()
    EXIT = auto()
    STOP = auto()


@dataclass(frozen=True, slots=True)
class Note:
    """Append `text` and this follower's rank to `path`; then, in rank `rank`, the fault."""

    path: str
    text: str
    fault: Fault = Fault.NONE
    rank: int = 1


def follow(context: LoadContext, line: Line) -> None:
    """`engine.use` of the stage says how the load goes."""
    how = context.spec.engine.use
    if how == "tests:unfit" and line.seat.rank == 2:
        raise StartError(f"rank {line.seat.rank} has no {context.device}")
    if how == "tests:dies" and line.seat.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def do(command: object) -> None:
        assert isinstance(command, Note)
        with Path(command.path).open("a") as file:
            file.write(f"{command.text} {line.seat.rank} {context.device}\n")
        fault = command.fault if command.rank == line.seat.rank else Fault.NONE
        if fault is Fault.RAISE:
            raise ValueError(f"{command.text}, as the test asked")
        if fault is Fault.EXIT:
            os._exit(9)
        if fault is Fault.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)

    line.meet()
    line.serve(do)
