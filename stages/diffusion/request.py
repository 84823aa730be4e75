"""One request at work: the pipeline's `__call__` in a fiber that parks at the sites of its modules.

A denoising step is noticed by the pipeline's `callback_on_step_end` where it has one. Where it has none, by the end of its
scheduler's `step`: each request has a scheduler of its own, so wrapping that one instance is seen by nobody else.
"""

import copy
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from diffusers import DiffusionPipeline, SchedulerMixin

from proto.params import DiffusionParams, Json, LoraUse, lora_use
from stages.diffusion import arguments, fiber, library, outputs, parking
from stages.diffusion.fiber import Fiber
from stages.diffusion.forms import Forms
from stages.diffusion.loading import Painter
from stages.diffusion.meter import Meter
from stages.diffusion.outputs import Artifact
from stages.diffusion.parking import Call
from stages.diffusion.partials import Partials
from stages.diffusion.residence import Residence
from stages.diffusion.scheduler import Phase
from stages.diffusion.step_caches import Session
from stages.engine import Finished, Job


class Step(NamedTuple):
    """`step` of `total` denoising steps is done; the latents after it, as the pipeline has them."""

    step: int
    total: int
    latents: torch.Tensor | None


@dataclass(slots=True)
class PaintRequest:
    """A checked job. Waiting until `start`; then `resume` takes it from call to call until there is none."""

    job: Job
    params: DiffusionParams
    painter: Painter
    queued_at: float = field(default_factory=time.perf_counter)
    meter: Meter = field(default_factory=Meter)
    call: Call | None = None
    forms: Forms = field(default_factory=Forms)
    partials: Partials = field(init=False)
    pipe: DiffusionPipeline | None = None  # its own, while its call runs
    results: dict[str, tuple[int, Json]] = field(
        default_factory=dict
    )  # rows and last one of each denoiser, by its site
    _steps: list[Step] = field(default_factory=list)
    _latents: torch.Tensor | None = None
    _phase: Phase = Phase.ENCODE
    _forwards_seen: int = 0
    _resumed_at: float = 0.0
    _fiber: Fiber[Call, dict[str, Artifact]] | None = None
    _remembered: Session | None = None  # by the stage's step cache

    def __post_init__(self) -> None:
        self.partials = Partials(self.job, self.params, self.painter)

    @property
    def lora(self) -> LoraUse | None:
        """The adapter that all its calls are made with."""
        return lora_use(self.params)

    def start(self) -> float:
        """Leave the queue: nothing is computed yet. Seconds spent in it."""
        self.meter.queue_s = time.perf_counter() - self.queued_at
        self._fiber = Fiber(f"paint-{self.job.request}", self._paint)
        return self.meter.queue_s

    def resume(self) -> Call | None:
        """Go on with what `call` was answered, to the next call; None is the end, successful or not."""
        resume_all([self])
        return self.call

    def take_steps(self) -> list[Step]:
        """Steps done since the last time."""
        steps, self._steps = self._steps, []
        return steps

    @property
    def calls_in_step(self) -> int:
        """Denoiser calls made since the last step was done: 0 where a step begins."""
        return self.meter.forwards - self._forwards_seen

    def check(self) -> None:
        """After the end: raise what the pipeline raised."""
        self._at_work().result()

    def finish(self) -> Finished:
        """After the end: the terminal event; its detail's `total` is the time from `queued_at`. Raises what the pipeline raised."""
        ended = self._at_work()
        self._fiber = None  # it refers to this request: end the circle, or the tensors would stay
        self._latents = self._remembered = self.pipe = None
        self.results.clear()
        total = time.perf_counter() - self.queued_at
        return outputs.finish(self.job, ended.result(), {**self.meter.detail(), "total": total})

    def abort(self) -> None:
        """Stop at the call where it stands; its thread has ended when this returns."""
        if self._fiber is not None:
            self._fiber.abort()
            self._fiber = None
        self.call = None
        self._latents = self._remembered = self.pipe = None
        self.results.clear()

    def _at_work(self) -> Fiber[Call, dict[str, Artifact]]:
        if self._fiber is None:
            raise RuntimeError(f"request {self.job.request} has not been started")
        return self._fiber

    def _paint(self, park: Callable[[Call], None]) -> dict[str, Artifact]:
        """The fiber's body."""
        if self.painter.recipe.light_glue:
            torch.set_num_threads(1)  # of this thread and those begun later; idle teams of fibers slow the engine's own
        parking.enter(self._parking(park))
        try:
            return self._call_pipeline()
        finally:
            self.meter.worked(self._phase, time.perf_counter() - self._resumed_at)

    def _parking(self, park: Callable[[Call], None]) -> Callable[[Call], None]:
        """`park`, with a watch on the time that the fiber itself takes between two calls."""
        self._resumed_at = time.perf_counter()

        def stop(call: Call) -> None:
            self.meter.worked(self._phase, time.perf_counter() - self._resumed_at)
            self._phase = call.site.phase
            if self._remembered is not None:
                self._remembered.attach(call)
            park(call)
            self._resumed_at = time.perf_counter()

        return stop

    def _call_pipeline(self) -> dict[str, Artifact]:
        with torch.inference_mode():  # holds for one thread only
            pipe = self.pipe = private_copy(self.painter.pipe, self.painter.residence)
            if self.painter.step_caches is not None:
                self._remembered = self.painter.step_caches.session(pipe)
            seeds = arguments.choose_seeds(self.params)
            kwargs = arguments.build(self.job, self.params, seeds, self.painter)
            if (kind := outputs.output_type(self.job, self.painter)) is not None:
                kwargs["output_type"] = kind
            kwargs.update(self._watch_steps(pipe))
            used = seeds if "generator" in kwargs else ()
            kwargs.update(self.partials.arguments(used))
            try:
                returned = self.partials.result(pipe(**kwargs))
            finally:
                _unwrap_steps(pipe)
            made = self.partials.joined() if returned is None else {}
            return outputs.collect(returned, self._latents, self.job, self.params, used, self.painter, made)

    def _watch_steps(self, pipe: DiffusionPipeline) -> dict[str, Json]:
        """Make `pipe`, this request's own, tell of its steps; the arguments that its call needs for that."""
        found = library.schedulers(pipe)
        if "callback_on_step_end" in self.painter.signature:
            scheduler = found.get("scheduler")

            def at_step_end(
                _pipe: Json, _step: int, _timestep: Json, tensors: Mapping[str, Json]
            ) -> Mapping[str, Json]:
                self._step_done(pipe, tensors.get("latents"), scheduler)
                return tensors

            return {"callback_on_step_end": at_step_end}
        for one in found.values():
            _wrap_step(one, functools.partial(self._step_done, pipe))
        return {}

    def _step_done(self, pipe: DiffusionPipeline, latents: Json, scheduler: SchedulerMixin | None) -> None:
        meter = self.meter
        meter.steps += 1
        if self._remembered is not None:
            self._remembered.step_done()
        self._latents = latents if isinstance(latents, torch.Tensor) else None
        total = max(meter.steps, library.planned_steps(pipe, scheduler))
        self._steps.append(Step(meter.steps, total, self._latents))
        if meter.forwards == self._forwards_seen:
            parking.stop_at(parking.PAUSE)  # the pipeline's denoiser is none that we know: stop here instead
        self._forwards_seen = meter.forwards


def resume_all(requests: Sequence[PaintRequest]) -> None:
    """Take each to its next `call`, one after the other."""
    fiber.resume_all([request._at_work() for request in requests])
    for request in requests:
        request.call = request._at_work().note


def private_copy(pipe: DiffusionPipeline, residence: Residence | None = None) -> DiffusionPipeline:
    """A pipeline that shares the modules but has attributes and schedulers of its own: both keep one call's state."""
    mine = copy.copy(pipe)
    if residence is not None:
        residence.enter()
        object.__setattr__(mine, "__class__", residence.pipeline_class)
    for name, scheduler in library.schedulers(mine).items():
        config = scheduler.config  # frozen, and the larger part
        own = copy.deepcopy(scheduler, {id(config): config})
        object.__setattr__(mine, name, own)  # the class's own setattr writes to the shared config
    mine.set_progress_bar_config(disable=True)
    object.__setattr__(
        mine, "maybe_free_model_hooks", _nothing
    )  # it would reset what others share, and unhook offloads
    return mine


def _nothing() -> None:
    pass


def _wrap_step(scheduler: SchedulerMixin, step_done: Callable[[Json, SchedulerMixin | None], None]) -> None:
    step = scheduler.step

    @functools.wraps(step)  # pipelines look at its signature
    def step_and_tell(*args: Json, **kwargs: Json) -> Json:
        result = step(*args, **kwargs)
        step_done(result[0], scheduler)
        return result

    object.__setattr__(scheduler, "step", step_and_tell)


def _unwrap_steps(pipe: DiffusionPipeline) -> None:
    """A wrapped step refers to its own scheduler and pipeline; without it both go when the request does."""
    for scheduler in library.schedulers(pipe).values():
        vars(scheduler).pop("step", None)
