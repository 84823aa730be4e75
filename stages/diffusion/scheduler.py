"""Who works next: a pure scheduler, told what every request waits for and asked for one unit of work at a time.

A request waits in the queue, is admitted, and then alternates between *parked* (at a call that it wants made: an encode, a
forward of the denoiser, a decode) and *at work* (planned). Calls of one bucket can be made together. No torch here.

    add -> queued -> Admit -> at work -> update(work) -> parked -> Group -> at work -> update(None)
                       join ---^                            ^---- retry ------'

Policy: the call that has been parked longest leads, and others of its bucket ride along, oldest first, as far as rows allow.
So buckets take turns whatever their sizes, newcomers catch up with their bucket, and encodes and decodes run between steps.

Invariants
- A parked call is planned within as many groups as there are requests at work, its own included: nothing starves.
- A group never has more than the phase's row budget, unless it is one call that is larger by itself.
- No more than `max_num_seqs` requests and `max_cost` are admitted at one time.
- What the admitted hold and what a group's call takes is never more than `max_memory`.
- With `static`, all that are at work are of one kind, and nobody joins them once their first call is planned.
"""

import enum
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from stages.diffusion.admission import Admission, AtOnce, Queue

Id = TypeVar("Id", bound=Hashable)

MAX_OVERTAKES: Final = 16
"""Requests that may start before one that came earlier but does not fit into the cost budget yet."""
REGROW_AFTER: Final = 64
"""Groups without a lack of memory after which a reduced row budget is doubled again."""


class Phase(enum.Enum):
    ENCODE = "encode"
    DENOISE = "denoise"
    DECODE = "decode"

    __hash__ = object.__hash__  # by identity, as they compare; enum's own is Python code, and called at every step


@dataclass(frozen=True, slots=True)
class Work:
    """A call that a request is parked at. Calls of one `bucket` can be made together; of those, calls with the same
    `exact` need no padding and go first. `alone`: never together with others."""

    phase: Phase
    bucket: Hashable
    exact: Hashable = None
    rows: int = 1
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_cost` bounds the sum of what the admitted requests were added with, `max_memory` the bytes that they need; None
    is no bound. `static`: requests start in batches of one kind, and the next batch when all of the last have ended."""

    max_num_seqs: int = 8
    max_rows: int = 16
    max_cost: int | None = None
    max_memory: int | None = None
    static: bool = False


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes: what a request holds between its calls, and what a call of each phase takes beside that."""

    held: int = 0
    calls: Mapping[Phase, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        return self.held + max(self.calls.values(), default=0)

    @property
    def worst(self) -> Phase:
        """The phase that takes most."""
        return max(self.calls, key=lambda phase: self.calls[phase])


NOTHING: Final = Need()


class Admit(NamedTuple, Generic[Id]):
    request: Id


class Group(NamedTuple, Generic[Id]):
    """One call for all of `requests`. `max_rows` is the row budget that it was planned with."""

    phase: Phase
    requests: tuple[Id, ...]
    max_rows: int


class OverBudget(ValueError):
    """The request would not fit even alone: it costs more than the limit."""

    def __init__(self, cost: int, limit: int) -> None:
        super().__init__(f"{cost} is more than {limit}")
        self.cost = cost
        self.limit = limit


@dataclass(slots=True)
class _Waiting:
    cost: int
    need: Need
    kind: Hashable
    since: float
    overtaken: int = 0


@dataclass(slots=True)
class _Running:
    cost: int
    need: Need
    work: Work | None = None  # the call that it is parked at or, once planned, at work on
    parked_at: int = 0  # groups planned before it parked
    parked: bool = False
    alone: bool = False  # its call is to be made by itself, since it failed in company
    guest: bool = False  # it takes no place from others


class Scheduler(Generic[Id]):
    """See the module's docstring. Times are seconds of any clock that does not go back."""

    def __init__(self, limits: Limits, admission: Admission | None = None) -> None:
        self._limits = limits
        self._admission = admission or AtOnce()
        self._queue: dict[Id, _Waiting] = {}  # in order of arrival
        self._running: dict[Id, _Running] = {}
        self._groups = 0
        self._budgets = dict.fromkeys(Phase, limits.max_rows)
        self._unharmed = dict.fromkeys(Phase, 0)
        self._joinable: Hashable = None  # kind of those that may join a static batch
        self._closed = False  # nobody joins a static batch any more

    # --- what happened ------------------------------------------------------------------------------------------------

    def add(self, request: Id, now: float, cost: int = 0, need: Need = NOTHING, kind: Hashable = None) -> None:
        """A request has come. Requests of one `kind` take the same calls to their end. Raises `OverBudget` if it would not
        fit even alone."""
        if request in self._queue or request in self._running:
            raise ValueError(f"request {request} is here already")
        if self._limits.max_cost is not None and cost > self._limits.max_cost:
            raise OverBudget(cost, self._limits.max_cost)
        if self._limits.max_memory is not None and need.peak > self._limits.max_memory:
            raise OverBudget(need.peak, self._limits.max_memory)
        self._queue[request] = _Waiting(cost, need, kind, now)

    def join(self, request: Id) -> None:
        """Something is at work for a request that is: it need not wait, and takes no place."""
        if request in self._queue or request in self._running:
            raise ValueError(f"request {request} is here already")
        self._running[request] = _Running(0, NOTHING, guest=True)

    def hold(self, request: Id) -> bool:
        """Plan no call of a parked request until its next `update`; whether it was parked."""
        running = self._running.get(request)
        if running is None or not running.parked:
            return False
        running.parked = False
        return True

    def update(self, request: Id, work: Work | None) -> None:
        """An admitted request has parked at `work`, or has ended (None)."""
        if work is None:
            del self._running[request]
            return
        running = self._running[request]
        running.work, running.parked, running.alone, running.parked_at = work, True, work.alone, self._groups

    def retry(self, group: Group[Id], *, alone: bool = False) -> None:
        """Nobody's call was made: all are parked as before. `alone`: each is to be made by itself."""
        for request in group.requests:
            running = self._running[request]
            running.parked = True
            running.alone = running.alone or alone

    def shrink(self, phase: Phase, rows: int) -> None:
        """`rows` were too many for the memory: half of them from now on."""
        self._budgets[phase] = max(1, min(rows, self._budgets[phase]) // 2)
        self._unharmed[phase] = 0

    def remove(self, request: Id) -> bool:
        """Forget a request, waiting, parked or at work; whether it was here."""
        return self._queue.pop(request, None) is not None or self._running.pop(request, None) is not None

    # --- what next ----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Admit[Id] | Group[Id] | None:
        """The next unit of work, from now on at work. None if there is nothing to do now."""
        admitted = self._admit(now)
        if admitted is not None:
            return Admit(admitted)
        return self._group()

    def wait_s(self, now: float) -> float:
        """Seconds until the admission policy will start someone, if nothing else happens."""
        return self._admission.wait_s(self._view(now)) if self._queue else 0.0

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return sum(not one.guest for one in self._running.values())

    def row_budget(self, phase: Phase) -> int:
        return self._budgets[phase]

    def _view(self, now: float) -> Queue:
        first = next(iter(self._queue.values()))
        return Queue(len(self._queue), now - first.since, self.running, self._limits.max_num_seqs - self.running)

    def _admit(self, now: float) -> Id | None:
        """The first that fits. Who does not fit is overtaken so often and no more: then all wait for it."""
        if not self._running:
            self._closed = False
        if self._closed or not self._queue or self.running >= self._limits.max_num_seqs:
            return None
        if self._admission.wait_s(self._view(now)) > 0:
            return None
        passed: list[_Waiting] = []
        for request, waiting in self._queue.items():
            if self._limits.static and self._running and waiting.kind != self._joinable:
                continue
            if self._fits(waiting):
                for one in passed:
                    one.overtaken += 1
                del self._queue[request]
                self._running[request] = _Running(waiting.cost, waiting.need)
                self._joinable = waiting.kind
                return request
            if waiting.overtaken >= MAX_OVERTAKES:
                return None
            passed.append(waiting)
        return None

    def _fits(self, new: _Waiting) -> bool:
        """A call of each by itself must stay possible, so that all of them come to their ends."""
        most, memory, others = self._limits.max_cost, self._limits.max_memory, self._running.values()
        if most is not None and new.cost + sum(one.cost for one in others) > most:
            return False
        if memory is None:
            return True
        needs = [new.need, *(one.need for one in others)]
        return sum(one.held for one in needs) + max(one.peak - one.held for one in needs) <= memory

    def _group(self) -> Group[Id] | None:
        parked = [(one.parked_at, request, one) for request, one in self._running.items() if one.parked]
        if not parked:
            return None
        _, lead, first = min(parked, key=lambda entry: entry[0])
        work = first.work
        assert work is not None
        budget = self._budgets[work.phase]
        chosen, rows = [lead], work.rows
        memory = self._free_memory() - first.need.calls.get(work.phase, 0)
        if not first.alone:
            company = [
                (one.work.exact != work.exact, parked_at, one.work.rows, one.need.calls.get(work.phase, 0), request)
                for parked_at, request, one in parked
                if one is not first and one.work is not None and not one.alone and _together(one.work, work)
            ]
            for _, _, more, takes, request in sorted(company, key=lambda entry: entry[:2]):
                if rows + more <= budget and takes <= memory:
                    chosen.append(request)
                    rows += more
                    memory -= takes
        for request in chosen:
            self._running[request].parked = False
        self._closed = self._limits.static
        self._groups += 1
        self._regrow(work.phase)
        return Group(work.phase, tuple(chosen), budget)

    def _free_memory(self) -> float:
        """For a call, beside what all hold."""
        limit = self._limits.max_memory
        return math.inf if limit is None else limit - sum(one.need.held for one in self._running.values())

    def _regrow(self, phase: Phase) -> None:
        self._unharmed[phase] += 1
        if self._unharmed[phase] > REGROW_AFTER:
            self._unharmed[phase] = 0
            self._budgets[phase] = min(self._limits.max_rows, 2 * self._budgets[phase])


def _together(one: Work, other: Work) -> bool:
    return one.phase is other.phase and one.bucket == other.bucket
