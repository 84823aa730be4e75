"""What every rank of an AR stage but the first does: load its share of the model, and compute what it is told to."""

from typing import NoReturn

from stages.ar.ranks import FollowingRunner
from stages.ar.startup import start
from stages.devices import usable_device
from stages.engine import LoadContext
from stages.parallel.distributed import join
from stages.parallel.line import Line


def follow(context: LoadContext, line: Line) -> NoReturn:
    """A `stages.parallel.line.Role`. Raises `StartError`."""
    join(line.seat, usable_device(context))
    parts = start(context, line)
    line.serve(FollowingRunner(parts.runner, parts.heads).do)
