"""Partial results: what a pipeline gives of its output before it is done.

No pipeline of diffusers 0.42 does, but pipelines of one's own may, in either of two ways: `__call__` is a generator and yields
them, or it takes a `callback_on_partial_output` and calls it with one. Each is what a call returns: an output object, or the
images, frames or samples alone. Videos and sound come as pieces, which joined are the output; of images each takes the
place of the one before (`Recipe.appends` says otherwise).

The request stops after each, so that it is on its way to the caller before the work goes on.
"""

import inspect
from collections.abc import Callable, Sequence

import numpy as np

from proto.errors import StageFailed
from proto.messages import Audio, Partial, Video
from proto.numpy_tensors import from_wire
from proto.numpy_tensors import to_wire as numpy_to_wire
from proto.params import DiffusionParams, Json
from stages.diffusion import outputs, parking
from stages.diffusion.loading import Painter
from stages.diffusion.outputs import Artifact
from stages.engine import Emit, Job

CALLBACK = "callback_on_partial_output"


class Partials:
    """Those of one request: kept until `take`."""

    def __init__(self, job: Job, params: DiffusionParams, painter: Painter) -> None:
        self._job = job
        self._params = params
        self._painter = painter
        self._name = painter.recipe.media[0]
        appends = painter.recipe.appends
        self._append = self._name in ("video", "audio") if appends is None else appends
        self._seeds: tuple[int, ...] = ()
        self._count = 0
        self._pieces: list[Artifact] = []
        self._last: Json = None
        self._waiting: list[Emit] = []

    def arguments(self, seeds: tuple[int, ...]) -> dict[str, Callable[[Json], None]]:
        """What the pipeline's call needs to give some."""
        self._seeds = seeds
        return {CALLBACK: self._give} if CALLBACK in self._painter.signature else {}

    def result(self, returned: Json) -> Json:
        """What the call returned; of a generator, after it has been run to its end: the value that it returned, or
        None if it returned none."""
        if not inspect.isgenerator(returned):
            return returned
        try:
            while True:
                try:
                    value = next(returned)
                except StopIteration as end:
                    if end.value is None and not self._count:
                        raise StageFailed(
                            f"stage {self._painter.stage}: {self._painter.info.model} yielded nothing and returned nothing",
                            stage=self._painter.stage,
                        ) from None
                    return self._last if end.value is None and not self._append else end.value
                self._give(value)
        finally:
            returned.close()

    def joined(self) -> dict[str, Artifact]:
        """The output that all pieces make, for a generator that returned none."""
        first = self._pieces[0].value(0)
        if len(self._pieces) == 1:
            return {self._name: self._pieces[0]}
        axis = 1 if isinstance(first, Video) else 2 if isinstance(first, Audio) else 0
        arrays = [from_wire(piece.tensor) for piece in self._pieces]
        whole = numpy_to_wire(np.concatenate(arrays, axis=axis))
        return {self._name: Artifact(self._pieces[0].kind, whole, self._pieces[0].value, self._pieces[0].meta)}

    def take(self) -> Sequence[Emit]:
        """The events for those given since the last time."""
        taken, self._waiting = self._waiting, []
        return taken

    def _give(self, value: Json) -> None:
        """In the request's fiber."""
        artifact = outputs.artifact(self._name, value, self._params, self._seeds, self._painter)
        part = Partial(index=self._count, value=artifact.value(0), append=self._append)
        self._count += 1
        self._last = value
        if self._append:
            self._pieces.append(artifact)
        if self._name in self._job.emit:
            self._waiting.append(Emit(self._job.request, self._name, part, [artifact.tensor]))
        parking.stop_at(parking.PAUSE)
