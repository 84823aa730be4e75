"""The diffusion engine: stock pipelines, many requests at once, one unit of work per `step`.

A request is checked when it comes, waits, is admitted, and then goes from call to call of its pipeline's modules (an encode, a
forward of the denoiser, a decode), parked in a fiber between them. The scheduler says whose calls are made next; those that
fit together become one. Between two calls of the engine nothing runs, so an abort takes effect at once, wherever a request is.

Invariant: `_requests` holds exactly the requests that the scheduler knows; those not admitted have no fiber.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Final

import torch

from proto.calls import Method, NoArgs
from proto.deploy import DiffusionStage
from proto.errors import ErrorCode, ErrorInfo, InvalidRequest, StartError
from proto.figures import Figures
from proto.ids import EventId, RequestId
from proto.messages import Change, Progress, StageInfo, Started
from proto.params import Json, LoraUse
from stages.diffusion import library, parking, trials
from stages.diffusion.admission import AtOnce, ForCompany
from stages.diffusion.arguments import amount, check, given_pixels, kind, pixels
from stages.diffusion.bed import PainterBed
from stages.diffusion.budget import Budget
from stages.diffusion.faults import to_error
from stages.diffusion.forms import Form
from stages.diffusion.loading import Painter, load_painter
from stages.diffusion.loras import Loras
from stages.diffusion.memory import Watch, gauge_for
from stages.diffusion.parking import Call
from stages.diffusion.previews import Previews
from stages.diffusion.prompt_cache import PromptCache, copied, prompt_key
from stages.diffusion.ranks import attach, lead, refuse_what_one_rank_cannot_do
from stages.diffusion.rehearsal import Rehearsal
from stages.diffusion.request import PaintRequest, resume_all
from stages.diffusion.runner import Runner, lacks_memory
from stages.diffusion.scheduler import NOTHING, Admit, Group, Limits, OverBudget, Phase, Scheduler, Work
from stages.diffusion.updates import Updates
from stages.engine import Emit, EngineStats, Event, Failed, Job, LoadContext
from stages.operator_calls import OperatorCalls
from stages.parallel.distributed import leave
from stages.parallel.group import Group as Ranks
from stages.rpc import Handler

log = logging.getLogger(__name__)

_NAP_S: Final = 0.005
"""Longest stay in `step` while the admission policy waits for company: new requests come in between steps."""


class DiffusionEngine:
    """Implements `stages.engine.Engine`."""

    def __init__(self) -> None:
        self._painter: Painter | None = None
        self._requests: dict[RequestId, PaintRequest] = {}
        self._forms: dict[RequestId, Form] = {}
        self._counts: Counter[str] = Counter(finished=0, failed=0, aborted=0, steps=0)
        self._remove_sites: Callable[[], None] = lambda: None
        self._end_calls: Callable[[], None] = lambda: None
        self._trying = False  # the stage is drawing for itself; who wants it drawn tells what goes wrong
        self._group: Ranks | None = None

    def load(self, context: LoadContext) -> StageInfo:
        """Raises `StartError` if the folder cannot be loaded, or has not what the deploy asks for."""
        assert isinstance(context.spec, DiffusionStage)
        spec = self._spec = context.spec.engine
        torch.get_num_threads()  # fixes this thread's: fibers change the number that new ones get
        if context.ranks:
            self._group, context = lead(context)
        painter = self._painter = load_painter(context)
        if self._group is not None:
            attach(painter.pipe, self._group, context)
        missing = library.use_vae(painter.pipe, slicing=spec.vae_slicing, tiling=spec.vae_tiling)
        if missing:
            raise StartError(
                f"stage {context.stage}: engine.vae_{missing[0]}: {painter.info.model} has no VAE that can do it;"
                " leave it out",
                stage=context.stage,
                field=f"engine.vae_{missing[0]}",
            )
        self._schedule_within(None)
        self._runner = Runner(painter.device)
        self._prompts = PromptCache(spec.prompt_cache)
        self._previews = Previews(painter, spec.preview_every)
        self._updates = Updates(painter)
        self._loras = Loras(painter)
        self._operator = OperatorCalls(
            painter.stage,
            painter.info,
            self._loras,
            PainterBed(painter, self._prompts),
            self._lora_uses,
            self._numbers,
            {Method.CLEAR_CACHE: Handler(NoArgs, self._clear_cache)},
        )
        self._end_calls = self._operator.close
        self._operator.load_from_deploy(context)
        self._remove_sites = parking.install(painter.pipe, painter.recipe.traits)
        self._try_out(painter, context)
        context.report("ready", 1.0)
        return self._operator.info

    def _schedule_within(self, budget: Budget | None) -> None:
        spec, exclusive = self._spec, self._loaded().recipe.exclusive
        self._budget = budget
        limits = Limits(
            max_num_seqs=1 if exclusive else spec.max_num_seqs,
            max_rows=spec.max_rows,
            max_cost=spec.max_pixels,
            max_memory=None if budget is None else budget.total,
            static=not spec.step_batching,
        )
        wait = spec.admission_wait
        self._scheduler: Scheduler[RequestId] = Scheduler(limits, AtOnce() if wait is None else ForCompany(wait))

    def _try_out(self, painter: Painter, context: LoadContext) -> None:
        """Draw what the stage draws for itself, and forget it."""
        gauge = gauge_for(painter.device)
        self._watch = Watch(gauge)
        self._trying = True
        self._schedule_within(trials.memory_budget(self, painter, gauge, context))
        trials.warm_up(self, painter, context)
        self._trying = False
        self._counts = Counter(dict.fromkeys(self._counts, 0))
        self._runner.forget()
        self._prompts.forget()

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def submit(self, job: Job) -> None:
        """Raises `InvalidRequest` naming the field, if the pipeline could not run the job."""
        painter = self._loaded()
        request = PaintRequest(job, check(job, painter), painter)
        self._operator.check(request.lora)
        if not self._requests:
            self._watch.idle()
        given = given_pixels(job, painter)
        need = NOTHING if self._budget is None else self._budget.need(amount(request.params, painter, given))
        cost = pixels(request.params, painter, given)
        try:
            self._scheduler.add(job.request, request.queued_at, cost, need, kind(job))
        except OverBudget as error:
            raise InvalidRequest(
                f"stage {painter.stage}: {painter.info.model} draws at most {error.limit} pixels in all images and frames of"
                f" a request, not {error.cost}; ask for a smaller size or fewer",
                stage=painter.stage,
                field="image" if given else "width",
            ) from error
        self._requests[job.request] = request

    def step(self) -> list[Event]:
        """Start a request, or make the calls that the scheduler puts together and take their requests to the next ones.
        Between two such units there may be one that draws a preview."""
        if self._updates.due:
            return self._rehearse(self._updates.due.popleft())
        if self._previews.due():
            return self._previews.draw()
        now = time.perf_counter()
        plan = self._scheduler.schedule(now)
        if isinstance(plan, Admit):
            return self._start(self._requests[plan.request])
        if plan is not None:
            return self._run(plan)
        threading.Event().wait(min(self._scheduler.wait_s(now), _NAP_S))
        return []

    def update(self, request: RequestId, event: EventId, change: Change) -> None:
        """Other words for a request, from the start of its next step on. Raises `InvalidRequest` for one that cannot have
        them; what shows only when they are encoded is refused by an `Updated`."""
        found = self._requests.get(request)
        if found is None:
            raise InvalidRequest(f"stage {self._stage()}: the request is over", stage=self._stage())
        self._updates.ask(found, event, change)
        if self._updates.wants(found) and self._scheduler.hold(request):
            self._updates.due.append(request)

    def wake_s(self) -> float | None:
        """Nothing happens here by itself."""
        return None

    def abort(self, request: RequestId) -> None:
        """Forget the request, wherever it is. Unknown ones are done already."""
        if self._scheduler.remove(request):
            self._drop_rehearsals(request)
            self._requests.pop(request).abort()
            self._forms.pop(request, None)
            self._previews.forget(request)
            self._counts["aborted"] += 1

    def request(self, name: RequestId) -> PaintRequest:
        """One that has not ended."""
        return self._requests[name]

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        """See `stages.operator_calls`. `clear_cache`: forget encoded prompts."""
        if self._group is not None:
            refuse_what_one_rank_cannot_do(self._loaded().stage, method)
        return self._operator.call(method, args)

    def stats(self) -> EngineStats:
        return EngineStats(queued=self._scheduler.queued, running=self._scheduler.running)

    def figures(self) -> Figures:
        prompts = self._prompts
        numbers = {
            "denoise_steps": self._counts["steps"],
            "denoiser_forwards": self._runner.forwards[Phase.DENOISE],
            "prompt_cache_hits": prompts.hits,
            "prompt_cache_misses": prompts.misses,
            "prompt_cache_bytes": prompts.size,
        }
        return Figures({name: float(number) for name, number in numbers.items()})

    def close(self) -> None:
        """End the requests at work and give the weights back."""
        for request in list(self._requests):
            self.abort(request)
        self._end_calls()
        self._remove_sites()
        self._end_calls = self._remove_sites = lambda: None
        if self._painter is not None and self._painter.step_caches is not None:
            self._painter.step_caches.remove()
        self._painter = None
        if self._group is not None:
            self._group.close()
            leave()
            self._group = None

    # --- one unit of work ---------------------------------------------------------------------------------------------

    def _start(self, request: PaintRequest) -> list[Event]:
        started = Emit(request.job.request, "", Started(queue_s=request.start()))
        return [started, *self._advance([request])]

    def _run(self, group: Group[RequestId]) -> list[Event]:
        """Make the group's calls and resume its requests. What raises in company is made again one by one."""
        requests = [self._named(name) for name in group.requests]
        calls = [request.call for request in requests if request.call is not None]
        forms = [self._forms[name] for name in group.requests]
        self._watch.begin()
        began = time.perf_counter()
        site = calls[0].site.name
        try:
            self._loras.activate(site, self._loras.key(site, requests[0].lora))
            with torch.inference_mode():
                results = self._make(calls, forms, group)
        except Exception as error:  # noqa: BLE001 - the fault boundary of a call: it is its request's, if of anyone
            if self._may_retry(group, calls, forms, error):
                return []
            calls[0].fail(error)
        else:
            for request, call, form, result in zip(requests, calls, forms, results, strict=True):
                call.answer(result)
                if group.phase is Phase.DENOISE:
                    request.results[call.site.name] = form.rows, result
        self._meter(requests, forms, group.phase, time.perf_counter() - began, self._watch.taken())
        return self._advance(requests)

    def _make(self, calls: list[Call], forms: list[Form], group: Group[RequestId]) -> list[Json]:
        """Equal prompts among the calls are encoded once, and kept."""
        if group.phase is not Phase.ENCODE:
            return self._runner.run(calls, forms, group.max_rows)
        lora = self._named(group.requests[0]).lora  # all have the same, as far as it matters here
        keys = [self._prompt_key(call, lora) for call in calls]
        same = [keys.index(key) if key is not None else at for at, key in enumerate(keys)]  # the first that asks it
        chosen = sorted(set(same))
        made = self._runner.run([calls[at] for at in chosen], [forms[at] for at in chosen], group.max_rows)
        results = dict(zip(chosen, made, strict=True))
        for at in chosen:
            if keys[at] is not None:
                self._prompts.put(keys[at], results[at])
        for at in set(range(len(calls))) - set(chosen):
            results[at] = copied(results[same[at]])
            self._named(group.requests[at]).meter.cache_hits += 1
        return [results[at] for at in range(len(calls))]

    def _may_retry(self, group: Group[RequestId], calls: list[Call], forms: list[Form], error: Exception) -> bool:
        """Whether the calls are to be made again: with fewer rows if memory was short, else each by itself."""
        rows = sum(form.rows for form in forms)
        if lacks_memory(error):
            self._runner.release_memory()
            fewer = min(rows, group.max_rows) > 1
            if fewer and (len(calls) > 1 or (calls[0].site.divisible and forms[0].rules is not None)):
                log.warning("stage %s: no memory for %d rows of %s", self._stage(), rows, calls[0].site.name)
                self._scheduler.shrink(group.phase, rows)
                self._scheduler.retry(group)
                return True
        if len(calls) == 1:
            return False
        log.warning(
            "stage %s: %d calls of %s raised together", self._stage(), len(calls), calls[0].site.name, exc_info=error
        )
        self._scheduler.retry(group, alone=True)
        return True

    @staticmethod
    def _meter(requests: list[PaintRequest], forms: list[Form], phase: Phase, seconds: float, memory: int) -> None:
        total = sum(form.rows for form in forms)
        for request, form in zip(requests, forms, strict=True):
            request.meter.called(phase, seconds, form.rows, total, memory)

    def _advance(self, requests: list[PaintRequest]) -> list[Event]:
        """Take the requests to their next calls that have no answer yet, or to their ends; what they did on the way."""
        resume_all(requests)
        return [event for request in requests for event in self._settle(request)]

    def _settle(self, request: PaintRequest) -> list[Event]:
        """What comes of a request that has just stopped: its next call, or its end."""
        name = request.job.request
        if name in self._updates.rehearsals:
            return self._settle_rehearsal(self._updates.rehearsals[name])
        if name not in self._requests:
            return []  # a rehearsal whose other half has failed
        try:
            call = request.call
            while call is not None and self._answer_from_cache(request, call):
                call = request.resume()
            events = self._progress(request)
            if call is None:
                finished = request.finish()
                events += [*self._updates.ended(request), finished]
                self._forget(name, "finished")
            elif self._updates.wants(request):
                self._updates.due.append(name)  # and it is held, since no call of it is planned
            else:
                events += self._park(request, call)
        except Exception as error:  # noqa: BLE001 - the fault boundary of a request: the others go on
            events = self._progress(request)
            request.abort()
            self._forget(name, "failed")
            events.append(Failed(name, self._explain(error, request)))
        return events

    def _park(self, request: PaintRequest, call: Call) -> list[Event]:
        events = self._updates.apply(request, call)
        name = request.job.request
        form = self._forms[name] = request.forms.read(call)
        if not form.rows and call.site.phase is not Phase.ENCODE:
            raise self._nothing_to_draw(request)
        self._scheduler.update(name, self._work(call, form, request.lora))
        return events

    def _nothing_to_draw(self, request: PaintRequest) -> InvalidRequest:
        """Some pipelines that start from a picture take their noise from a step that there is not, and go on with no rows."""
        params, stage = request.params, self._stage()
        if params.strength is None:
            return InvalidRequest(f"stage {stage}: the request leaves nothing to draw", stage=stage)
        return InvalidRequest(
            f"stage {stage}: strength {params.strength:g} leaves none of the request's steps; raise it, or num_inference_steps",
            stage=stage,
            field="strength",
        )

    def _named(self, name: RequestId) -> PaintRequest:
        """A request, or what is rehearsed for one."""
        found = self._requests.get(name)
        return self._updates.rehearsals[name].paint if found is None else found

    def _rehearse(self, name: RequestId) -> list[Event]:
        """Begin the next update of a request that is held for it."""
        rehearsals = self._updates.begin(name)
        for rehearsal in rehearsals:
            self._scheduler.join(rehearsal.paint.job.request)
        return self._advance([rehearsal.paint for rehearsal in rehearsals])

    def _settle_rehearsal(self, rehearsal: Rehearsal) -> list[Event]:
        """Take it to its next call that must be made. When all have seen the first step, their request goes on."""
        name, problem = rehearsal.paint.job.request, None
        try:
            call = rehearsal.next_call(self._answer_from_cache)
            if call is not None:
                form = self._forms[name] = rehearsal.paint.forms.read(call)
                self._scheduler.update(name, self._work(call, form, rehearsal.paint.lora))
                return []
        except Exception as error:  # noqa: BLE001 - the fault is the update's, and the request goes on without it
            problem = self._explain(error, rehearsal.paint).message
        self._end_rehearsal(rehearsal)
        if problem is not None:
            for other in self._updates.others(rehearsal):
                self._end_rehearsal(other)
        events = self._updates.rehearsed(rehearsal, problem)
        return [] if events is None else events + self._settle(rehearsal.owner)

    def _drop_rehearsals(self, name: RequestId) -> None:
        for rehearsal in self._updates.forget(name):
            self._end_rehearsal(rehearsal)

    def _end_rehearsal(self, rehearsal: Rehearsal) -> None:
        name = rehearsal.paint.job.request
        rehearsal.end()
        del self._updates.rehearsals[name]
        self._scheduler.update(name, None)
        self._forms.pop(name, None)

    def _answer_from_cache(self, request: PaintRequest, call: Call) -> bool:
        if call.site.phase is not Phase.ENCODE or not (key := self._prompt_key(call, request.lora)):
            return False
        found = self._prompts.get(key)
        if found is None:
            return False
        request.meter.cache_hits += 1
        call.answer(found)
        return True

    def _prompt_key(self, call: Call, lora: LoraUse | None) -> Hashable | None:
        key = prompt_key(call)
        return None if key is None else (key, self._loras.key(call.site.name, lora))

    def _work(self, call: Call, form: Form, lora: LoraUse | None) -> Work:
        alone = form.rules is None or self._spec.batch_invariant or call.site.name in self._runner.alone
        bucket = (form.bucket, self._loras.key(call.site.name, lora))
        return Work(call.site.phase, bucket, form.exact, form.rows, alone)

    def _progress(self, request: PaintRequest) -> list[Event]:
        steps = request.take_steps()
        self._counts["steps"] += len(steps)
        for one in steps:
            self._previews.step_done(request, one)
        told: list[Event] = [Emit(request.job.request, "", Progress(step=one.step, total=one.total)) for one in steps]
        return [*told, *request.partials.take(), *self._updates.stepped(request)]

    def _forget(self, name: RequestId, how: str) -> None:
        self._drop_rehearsals(name)
        self._scheduler.update(name, None)
        del self._requests[name]
        self._forms.pop(name, None)
        self._previews.forget(name)
        self._counts[how] += 1

    def _lora_uses(self) -> Counter[str]:
        return Counter(request.lora.name for request in self._requests.values() if request.lora is not None)

    def _clear_cache(self, _: NoArgs) -> dict[str, Json]:
        self._prompts.clear()
        return self._cache_counts()

    def _numbers(self) -> dict[str, Json]:
        """For `stats`."""
        stats = self.stats()
        return {"queued": stats.queued, "running": stats.running, **self._counts, **self._cache_counts()}

    def _cache_counts(self) -> dict[str, Json]:
        cache = self._prompts
        counts = {phase.value + "_calls": self._runner.forwards[phase] for phase in Phase}
        return {
            **counts,
            "forwards": self._runner.forwards[Phase.DENOISE],
            "checks": self._runner.checks,
            "prompts_kept": len(cache),
            "prompt_bytes": cache.size,
            "prompt_hits": cache.hits,
            "prompt_misses": cache.misses,
        }

    def _explain(self, error: Exception, request: PaintRequest) -> ErrorInfo:
        painter = request.painter
        info = to_error(error, painter.stage, painter.info.model, request.meter.steps)
        if info.code is ErrorCode.INVALID_REQUEST or self._trying:
            log.info("stage %s: request %s: %s", painter.stage, request.job.request, info.message)
        else:
            log.warning("stage %s: request %s failed", painter.stage, request.job.request, exc_info=error)
        return info

    def _stage(self) -> str:
        return self._loaded().stage

    def _loaded(self) -> Painter:
        if self._painter is None:
            raise RuntimeError("the engine has not been loaded, or has been closed")
        return self._painter
