"""One request at work: the pipeline's `__call__` in a fiber that parks at each denoising step.

The boundary is the pipeline's `callback_on_step_end` where it has one. Where it has none, it is the end of its scheduler's
`step`: each request has a scheduler of its own, so wrapping that one instance is seen by nobody else.
"""

import copy
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from diffusers import DiffusionPipeline, SchedulerMixin

from proto.messages import Progress
from proto.params import DiffusionParams, Json
from stages.diffusion import arguments, library, outputs
from stages.diffusion.fiber import Fiber
from stages.diffusion.loading import Painter
from stages.diffusion.outputs import Artifact
from stages.engine import Finished, Job


class Boundary(NamedTuple):
    """`step` of `total` denoising steps is done."""

    step: int
    total: int


@dataclass(slots=True)
class _Marks:
    """When the parts of the work began and ended (`time.perf_counter`). Kept while the request runs."""

    started: float
    first_forward: float | None = None
    last_step: float | None = None
    steps: int = 0
    latents: torch.Tensor | None = None


@dataclass(slots=True)
class PaintRequest:
    """A checked job. Waiting until `start`, then at work until `advance` gives its outputs."""

    job: Job
    params: DiffusionParams
    painter: Painter
    queued_at: float = field(default_factory=time.perf_counter)
    _marks: _Marks | None = None
    _fiber: Fiber[Boundary, dict[str, Artifact]] | None = None

    def start(self) -> float:
        """Leave the queue: nothing is computed yet. Seconds spent in it."""
        self._marks = _Marks(started=time.perf_counter())
        self._fiber = Fiber(f"paint-{self.job.request}", self._paint)
        return self._marks.started - self.queued_at

    def advance(self) -> Progress | Finished:
        """Run to the next step boundary or to the end. Raises what the pipeline raised."""
        fiber, marks = self._at_work()
        boundary = fiber.resume()
        if boundary is not None:
            return Progress(step=boundary.step, total=boundary.total)
        self._fiber = None  # it refers to this request: end the circle, or the tensors would stay
        return outputs.finish(self.job, fiber.result(), _detail(marks))

    def abort(self) -> None:
        """Stop at the boundary where it stands; its thread has ended when this returns."""
        if self._fiber is not None:
            self._fiber.abort()
            self._fiber = None

    @property
    def steps(self) -> int:
        """Denoising steps done."""
        return 0 if self._marks is None else self._marks.steps

    def saw_forward(self) -> None:
        """Called before each forward of the denoiser."""
        if self._marks is not None and self._marks.first_forward is None:
            self._marks.first_forward = time.perf_counter()

    def _at_work(self) -> tuple[Fiber[Boundary, dict[str, Artifact]], _Marks]:
        if self._fiber is None or self._marks is None:
            raise RuntimeError(f"request {self.job.request} has not been started")
        return self._fiber, self._marks

    def _paint(self, park: Callable[[Boundary], None]) -> dict[str, Artifact]:
        """The fiber's body."""
        _, marks = self._at_work()
        with torch.inference_mode():  # holds for one thread only
            pipe = private_copy(self.painter.pipe)
            seeds = arguments.choose_seeds(self.params)
            kwargs = arguments.build(self.job, self.params, seeds, self.painter)
            if (kind := outputs.output_type(self.job, self.painter)) is not None:
                kwargs["output_type"] = kind
            kwargs.update(_stop_at_steps(pipe, self.painter, marks, park))
            try:
                returned = pipe(**kwargs)
            finally:
                _unwrap_steps(pipe)
            used = seeds if "generator" in kwargs else ()
            return outputs.collect(returned, marks.latents, self.job, self.params, used, self.painter)


def private_copy(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """A pipeline that shares the modules but has attributes and schedulers of its own: both keep one call's state."""
    mine = copy.copy(pipe)
    for name, scheduler in library.schedulers(pipe).items():
        object.__setattr__(mine, name, copy.deepcopy(scheduler))  # the class's own setattr writes to the shared config
    mine.set_progress_bar_config(disable=True)
    return mine


def _stop_at_steps(
    pipe: DiffusionPipeline, painter: Painter, marks: _Marks, park: Callable[[Boundary], None]
) -> dict[str, Json]:
    """Make `pipe`, one request's own, stop at its steps; the arguments that its call needs for that."""

    def step_done(latents: Json, scheduler: SchedulerMixin | None) -> None:
        if painter.device.type != "cpu":
            torch.accelerator.synchronize()  # or the host would run ahead, and a step seem done that is not
        marks.steps += 1
        marks.last_step = time.perf_counter()
        marks.latents = latents if isinstance(latents, torch.Tensor) else None
        park(Boundary(marks.steps, max(marks.steps, library.planned_steps(pipe, scheduler))))

    found = library.schedulers(pipe)
    if "callback_on_step_end" in painter.signature:

        def at_step_end(_pipe: Json, _step: int, _timestep: Json, tensors: Mapping[str, Json]) -> Mapping[str, Json]:
            step_done(tensors.get("latents"), found.get("scheduler"))
            return tensors

        return {"callback_on_step_end": at_step_end}
    for scheduler in found.values():
        _wrap_step(scheduler, step_done)
    return {}


def _wrap_step(scheduler: SchedulerMixin, step_done: Callable[[Json, SchedulerMixin | None], None]) -> None:
    step = scheduler.step

    @functools.wraps(step)  # pipelines look at its signature
    def step_and_stop(*args: Json, **kwargs: Json) -> Json:
        result = step(*args, **kwargs)
        step_done(result[0], scheduler)
        return result

    object.__setattr__(scheduler, "step", step_and_stop)


def _unwrap_steps(pipe: DiffusionPipeline) -> None:
    """A wrapped step refers to its own scheduler and pipeline; without it both go when the request does."""
    for scheduler in library.schedulers(pipe).values():
        vars(scheduler).pop("step", None)


def _detail(marks: _Marks) -> dict[str, float]:
    """Seconds up to the first forward, of the steps, and after the last one."""
    ended = time.perf_counter()
    last = ended if marks.last_step is None else marks.last_step
    first = last if marks.first_forward is None else min(marks.first_forward, last)
    return {"encode": first - marks.started, "denoise": last - first, "decode": ended - last}
