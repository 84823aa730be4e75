"""What every rank of a diffusion stage but the first does: load the denoisers, its share of them, and make their forwards."""

from typing import NoReturn

from proto.deploy import DiffusionParallelSpec
from stages.devices import usable_device
from stages.diffusion.loading import load_denoisers
from stages.diffusion.ranks import following
from stages.diffusion.sharing import share
from stages.engine import LoadContext
from stages.parallel.distributed import join
from stages.parallel.line import Line


def follow(context: LoadContext, line: Line) -> NoReturn:
    """A `stages.parallel.line.Role`. Raises `StartError`, or what the library raises."""
    device, spec = usable_device(context), context.spec.parallel
    assert isinstance(spec, DiffusionParallelSpec)
    join(line.seat, device)
    denoisers = load_denoisers(context)
    for module in denoisers.values():
        share(module, spec, device)
    line.meet()
    line.serve(following(denoisers, device))
