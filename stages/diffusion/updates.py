"""Other words for requests at work: which update of which request is at what point, and what its next calls are told.

    asked -> (its request comes to the start of a step, and is held there) -> rehearsed -> started -> ... steps ... -> completed
       `------------------------------------- refused <------------------------'

One update of a request is carried out at a time, in order. What comes of it is what the stock pipeline would give if its
embeddings were exchanged between two steps: only the denoiser's arguments change, and a guidance scale that the pipeline reads
at every step. Nothing here runs a model: the engine does, for the rehearsals that `begin` gives it.

Invariant: every update that `ask` took gets one `Updated` that ends it, before its request's own end, unless that one fails.
"""

import dis
import functools
import inspect
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from proto.errors import InvalidRequest
from proto.ids import EventId, RequestId
from proto.messages import Change, PromptChange, Updated, UpdateState
from proto.params import Json
from stages.diffusion.conditions import CannotChange, Conditions, MadeCall, find
from stages.diffusion.loading import Painter
from stages.diffusion.parking import Call
from stages.diffusion.rehearsal import Rehearsal, changed
from stages.diffusion.request import PaintRequest
from stages.diffusion.scheduler import Phase
from stages.engine import Emit, Event, Job

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Asked:
    event: EventId
    change: PromptChange
    job: Job  # as it is with it


@dataclass(slots=True)
class _Begun:
    """The steps of a transition: the first one, and how many. Guidance goes from one scale to another meanwhile."""

    event: EventId
    first: int
    steps: int
    guidance: tuple[float, float] | None = None

    def weight(self, step: int) -> float:
        return min(1.0, (step - self.first + 1) / self.steps)


@dataclass(slots=True)
class _Owner:
    request: PaintRequest
    job: Job  # as the last update made it
    waiting: deque[_Asked] = field(default_factory=deque)
    rehearsals: dict[str, Rehearsal] = field(default_factory=dict)  # "own" and "new" words
    own: tuple[MadeCall, ...] | None = None  # the calls of the first step, as the request was submitted
    conditions: Conditions | None = None
    begun: _Begun | None = None


class Updates:
    """`due` are requests held at the start of a step for the first of their updates. `rehearsals` are under way."""

    def __init__(self, painter: Painter) -> None:
        self._painter = painter
        self._owners: dict[RequestId, _Owner] = {}
        self.due: deque[RequestId] = deque()
        self.rehearsals: dict[RequestId, Rehearsal] = {}

    # --- asked --------------------------------------------------------------------------------------------------------

    def ask(self, request: PaintRequest, event: EventId, change: Change) -> None:
        """Raises `InvalidRequest` if the request cannot take it."""
        if not isinstance(change, PromptChange):
            raise self._no("draws, and takes no further input")
        if "prompt" not in self._painter.signature:
            raise self._no("takes no prompt")
        if self._painter.recipe.exclusive:
            raise self._no("changes its own modules while it runs, so its requests cannot be changed")
        if any(name.endswith("prompt_embeds") for name in (*request.job.payloads, *request.job.inputs)):
            raise self._no("got the prompt of this request as embeddings; there is no text to change")
        owner = self._owners.get(request.job.request)
        if owner is None:
            owner = self._owners[request.job.request] = _Owner(request, request.job)
        last = owner.waiting[-1].job if owner.waiting else owner.job
        owner.waiting.append(_Asked(event, change, changed(last, change, self._painter)))

    def _no(self, problem: str) -> InvalidRequest:
        name = self._painter.info.model
        return InvalidRequest(f"stage {self._painter.stage}: {name} {problem}", stage=self._painter.stage)

    def wants(self, request: PaintRequest) -> bool:
        """Whether the request is to be held where it stands, for an update to begin."""
        owner, call = self._owners.get(request.job.request), request.call
        if owner is None or not owner.waiting or owner.begun is not None or call is None:
            return False
        return call.site.phase is Phase.DENOISE and request.calls_in_step == 0

    # --- rehearsed ----------------------------------------------------------------------------------------------------

    def begin(self, name: RequestId) -> list[Rehearsal]:
        """For a request of `due`: what must be rehearsed for it first."""
        owner = self._owners[name]
        asked = owner.waiting[0]
        jobs = {"new": asked.job} if owner.own is not None else {"own": owner.request.job, "new": asked.job}
        for which, job in jobs.items():
            rehearsal = Rehearsal(RequestId(f"{name}/{asked.event}/{which}"), owner.request, job)
            rehearsal.paint.start()
            owner.rehearsals[which] = self.rehearsals[rehearsal.paint.job.request] = rehearsal
        return list(owner.rehearsals.values())

    def others(self, rehearsal: Rehearsal) -> list[Rehearsal]:
        """What else is rehearsed for the same update."""
        rehearsals = self._owners[rehearsal.owner.job.request].rehearsals.values()
        return [one for one in rehearsals if one is not rehearsal and not one.over]

    def rehearsed(self, rehearsal: Rehearsal, problem: str | None) -> list[Event] | None:
        """It is over, well or with a problem. What is to be told before its owner goes on; None if that must still wait."""
        owner = self._owners[rehearsal.owner.job.request]
        rehearsal.over = True
        if problem is None and not all(one.over for one in owner.rehearsals.values()):
            return None
        asked = owner.waiting.popleft()
        try:
            if problem is not None:
                raise CannotChange(problem)
            self._start(owner, asked)
        except CannotChange as error:
            return [self._told(owner, asked.event, UpdateState.REFUSED, str(error))]
        except Exception as error:
            log.warning("stage %s: an update raised", self._painter.stage, exc_info=error)
            return [self._told(owner, asked.event, UpdateState.REFUSED, f"{type(error).__name__}: {error}")]
        finally:
            owner.rehearsals.clear()
        return [self._told(owner, asked.event, UpdateState.STARTED)]

    def _start(self, owner: _Owner, asked: _Asked) -> None:
        change, request = asked.change, owner.request
        if "own" in owner.rehearsals:
            owner.own = tuple(owner.rehearsals["own"].calls)
        assert owner.own is not None
        assert request.call is not None
        steps = max(1, change.transition_steps)
        conditions = find(owner.own, owner.rehearsals["new"].calls, owner.conditions, mix=steps > 1)
        guidance = _guidance(request, change, conditions)
        if conditions is not None:
            conditions.applied(request.call, 0, 1.0)  # raises if this step's calls are not like those of the first
        elif change.negative_prompt and change.prompt is None and guidance is None:
            raise CannotChange(
                "negative_prompt changes nothing here: the request runs without guidance, or had it already"
            )
        owner.job, owner.conditions = asked.job, conditions or owner.conditions
        owner.begun = _Begun(asked.event, request.meter.steps, steps, guidance)

    # --- at work ------------------------------------------------------------------------------------------------------

    def apply(self, request: PaintRequest, call: Call) -> list[Event]:
        """Put the conditions of this step into a call that the request has come to."""
        owner = self._owners.get(request.job.request)
        if owner is None or call.site.phase is not Phase.DENOISE:
            return []
        begun = owner.begun
        weight = 1.0 if begun is None else begun.weight(request.meter.steps)
        if begun is not None and begun.guidance is not None and request.pipe is not None:
            start, goal = begun.guidance
            request.pipe._guidance_scale = goal if weight >= 1.0 else start + weight * (goal - start)
        if owner.conditions is None:
            return []
        try:
            call.arguments = owner.conditions.applied(call, request.calls_in_step, weight)
        except (CannotChange, RuntimeError) as error:
            log.warning("stage %s: an update has no more effect: %s", self._painter.stage, error)
            owner.conditions, owner.begun = None, None
            return [] if begun is None else [self._told(owner, begun.event, UpdateState.REFUSED, str(error))]
        return []

    def stepped(self, request: PaintRequest) -> list[Event]:
        """The request may have done steps."""
        owner = self._owners.get(request.job.request)
        if owner is None or owner.begun is None or request.meter.steps < owner.begun.first + owner.begun.steps:
            return []
        begun, owner.begun = owner.begun, None
        return [self._told(owner, begun.event, UpdateState.COMPLETED)]

    def ended(self, request: PaintRequest) -> list[Event]:
        """The request has drawn its last: what it could not do is refused."""
        owner = self._owners.get(request.job.request)
        if owner is None:
            return []
        events: list[Event] = []
        steps = request.meter.steps
        if owner.begun is not None:
            done = steps - owner.begun.first
            reason = f"the request ended after {done} of the {owner.begun.steps} steps of the transition"
            events.append(self._told(owner, owner.begun.event, UpdateState.REFUSED, reason))
        reason = f"the request had no step left: all {steps} were done"
        return events + [self._told(owner, one.event, UpdateState.REFUSED, reason) for one in owner.waiting]

    def forget(self, name: RequestId) -> list[Rehearsal]:
        """The request is gone; what was still rehearsed for it."""
        owner = self._owners.pop(name, None)
        if name in self.due:
            self.due.remove(name)
        return [] if owner is None else [one for one in owner.rehearsals.values() if not one.over]

    @staticmethod
    def _told(owner: _Owner, event: EventId, state: UpdateState, reason: str = "") -> Emit:
        step = None if state is UpdateState.REFUSED else owner.request.meter.steps
        part = Updated(event=event, state=state, reason=reason[:4096], step=step)
        return Emit(owner.request.job.request, "", part)


def _guidance(request: PaintRequest, change: PromptChange, conditions: Conditions | None) -> tuple[float, float] | None:
    """The scale that the pipeline reads, now and in the end; None if that does not change. Raises `CannotChange` for a
    pipeline that has read it already."""
    if change.guidance_scale is None:
        return None
    name = request.painter.recipe.guidance
    pipe = request.pipe
    now = None if pipe is None else vars(pipe).get(f"_{name}")
    if name == "guidance_scale" and isinstance(now, int | float) and _reads_guidance(type(pipe).__call__):
        return None if now == change.guidance_scale else (float(now), change.guidance_scale)
    if conditions is not None and any("guidance" in one for one in conditions.names):
        return None  # the denoiser takes it as an argument
    model = request.painter.info.model
    raise CannotChange(f"{model} reads its guidance scale before the first step, so a request at work cannot change it")


@functools.cache
def _reads_guidance(call: Callable[..., Json]) -> bool:
    """Whether a pipeline's call looks its guidance scale up where it needs it."""
    instructions = dis.get_instructions(inspect.unwrap(call))
    return any(one.opname.startswith("LOAD_ATTR") and one.argval == "guidance_scale" for one in instructions)
