"""What the diffusion scheduler promises, whatever comes: no starvation, no budget exceeded, every request ends."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.diffusion.admission import ForCompany
from stages.diffusion.scheduler import MAX_OVERTAKES, Admit, Group, Limits, Need, OverBudget, Phase, Scheduler, Work


@dataclass
class Asked:
    """A request: its calls in order, what it costs, and how many units of work after the start it comes."""

    calls: list[Work]
    cost: int
    arrival: int
    need: Need
    kind: int


works = st.builds(
    Work,
    phase=st.sampled_from(Phase),
    bucket=st.integers(0, 2),
    exact=st.integers(0, 1),
    rows=st.integers(1, 5),
    alone=st.booleans(),
)
needs = st.builds(Need, held=st.integers(0, 2), calls=st.fixed_dictionaries({p: st.integers(0, 3) for p in Phase}))
requests = st.builds(
    Asked,
    calls=st.lists(works, min_size=1, max_size=6),
    cost=st.integers(0, 4),
    arrival=st.integers(0, 20),
    need=needs,
    kind=st.integers(0, 2),
)
limits = st.builds(
    Limits,
    max_num_seqs=st.integers(1, 5),
    max_rows=st.integers(1, 8),
    max_cost=st.none() | st.integers(4, 8),
    max_memory=st.none() | st.integers(5, 9),
    static=st.booleans(),
)


@dataclass
class Run:
    """Drives a scheduler until nothing is left, and notes every plan."""

    asked: list[Asked]
    limits: Limits
    scheduler: Scheduler[int] = field(init=False)
    left: dict[int, list[Work]] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    parked_for: dict[int, int] = field(default_factory=dict)  # groups since the request parked
    ended: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)

    def plans(self) -> Iterator[Admit[int] | Group[int]]:
        coming = sorted(range(len(self.asked)), key=lambda one: self.asked[one].arrival)
        for unit in range(10_000):
            while coming and self.asked[coming[0]].arrival <= unit:
                name = coming.pop(0)
                self.left[name] = list(self.asked[name].calls)
                one = self.asked[name]
                self.scheduler.add(name, float(unit), one.cost, one.need, one.kind)
            plan = self.scheduler.schedule(float(unit))
            if plan is None:
                if not coming:
                    return
                continue
            yield plan
            self.follow(plan)
        raise AssertionError("the scheduler never comes to an end")

    def follow(self, plan: Admit[int] | Group[int]) -> None:
        if isinstance(plan, Admit):
            self.admitted.append(plan.request)
            self.running.add(plan.request)
            self.park(plan.request)
            return
        for name in self.parked_for:
            self.parked_for[name] += 1
        for name in plan.requests:
            del self.parked_for[name]
            self.left[name].pop(0)
            self.park(name)

    def park(self, name: int) -> None:
        if self.left[name]:
            self.scheduler.update(name, self.left[name][0])
            self.parked_for[name] = 0
        else:
            self.scheduler.update(name, None)
            self.running.discard(name)
            self.ended.append(name)


@given(st.lists(requests, max_size=12), limits)
@settings(max_examples=200, deadline=None)
def test_every_request_ends_once_and_no_limit_is_exceeded(asked: list[Asked], bounds: Limits) -> None:
    run = Run(asked, bounds)
    for plan in run.plans():
        now = run.running | ({plan.request} if isinstance(plan, Admit) else set())
        assert len(now) <= bounds.max_num_seqs
        assert bounds.max_cost is None or sum(asked[name].cost for name in now) <= bounds.max_cost
        if isinstance(plan, Group):
            rows = sum(run.left[name][0].rows for name in plan.requests)
            assert rows <= bounds.max_rows or len(plan.requests) == 1
            calls = sum(asked[name].need.calls[plan.phase] for name in plan.requests)
            assert bounds.max_memory is None or calls + sum(asked[name].need.held for name in now) <= bounds.max_memory
    assert sorted(run.ended) == list(range(len(asked)))
    assert run.scheduler.queued == run.scheduler.running == 0


@given(st.lists(requests, max_size=12), limits)
@settings(max_examples=200, deadline=None)
def test_groups_are_of_one_bucket_and_nobody_is_planned_twice(asked: list[Asked], bounds: Limits) -> None:
    run = Run(asked, bounds)
    for plan in run.plans():
        if isinstance(plan, Group):
            assert len(set(plan.requests)) == len(plan.requests)
            members = [run.left[name][0] for name in plan.requests]
            assert {(one.phase, one.bucket) for one in members} == {(plan.phase, members[0].bucket)}
            assert len(members) == 1 or not any(one.alone for one in members)


@given(st.lists(requests, max_size=12), limits)
@settings(max_examples=200, deadline=None)
def test_a_parked_call_waits_for_no_more_groups_than_there_are_others_at_work(
    asked: list[Asked], bounds: Limits
) -> None:
    run = Run(asked, bounds)
    for plan in run.plans():
        if isinstance(plan, Group):
            assert all(run.parked_for[name] < bounds.max_num_seqs for name in plan.requests)


@given(st.lists(requests, max_size=12), limits)
@settings(max_examples=200, deadline=None)
def test_static_batches_are_of_one_kind_and_nobody_joins_one_that_has_begun(asked: list[Asked], bounds: Limits) -> None:
    run = Run(asked, replace(bounds, static=True))
    begun = False
    for plan in run.plans():
        if isinstance(plan, Group):
            begun = True
            continue
        begun = begun and bool(run.running)
        assert not begun
        assert {asked[name].kind for name in run.running} <= {asked[plan.request].kind}
    assert sorted(run.ended) == list(range(len(asked)))


@given(st.lists(requests, min_size=1, max_size=8), limits, st.randoms())
@settings(max_examples=100, deadline=None)
def test_requests_may_leave_at_any_time(asked: list[Asked], bounds: Limits, random: Random) -> None:
    run = Run(asked, bounds)
    gone: list[int] = []
    for plan in run.plans():
        planned = plan.requests if isinstance(plan, Group) else ()
        staying = [name for name in run.parked_for if name not in planned]
        if staying and random.random() < 0.3:
            name = random.choice(staying)
            assert run.scheduler.remove(name)
            assert not run.scheduler.remove(name)
            del run.parked_for[name]
            run.running.discard(name)
            gone.append(name)
    assert sorted(run.ended + gone) == list(range(len(asked)))
    assert run.scheduler.queued == run.scheduler.running == 0


def parked(scheduler: Scheduler[str], *names: str, work: Work) -> None:
    for name in names:
        scheduler.add(name, 0.0)
        assert scheduler.schedule(0.0) == Admit(name)
        scheduler.update(name, work)


STEP = Work(Phase.DENOISE, "a")


def test_other_bucket_does_not_block_the_queue_behind_it() -> None:
    scheduler: Scheduler[str] = Scheduler(Limits(max_num_seqs=3))
    parked(scheduler, "odd", work=Work(Phase.DENOISE, "b"))
    parked(scheduler, "x", "y", work=STEP)
    assert scheduler.schedule(0.0) == Group(Phase.DENOISE, ("odd",), 16)
    scheduler.update("odd", Work(Phase.DENOISE, "b"))
    assert scheduler.schedule(0.0) == Group(Phase.DENOISE, ("x", "y"), 16)


def test_calls_of_equal_length_go_first_and_padding_fills_what_is_left() -> None:
    scheduler: Scheduler[str] = Scheduler(Limits(max_rows=3))
    parked(scheduler, "first", work=Work(Phase.DENOISE, "a", exact=7))
    parked(scheduler, "longer", work=Work(Phase.DENOISE, "a", exact=9))
    parked(scheduler, "same", "same too", work=Work(Phase.DENOISE, "a", exact=7))
    assert scheduler.schedule(0.0) == Group(Phase.DENOISE, ("first", "same", "same too"), 3)


def test_lack_of_memory_halves_the_rows_of_that_phase_until_it_has_gone_well_for_long() -> None:
    scheduler: Scheduler[str] = Scheduler(Limits(max_rows=8))
    parked(scheduler, *"abcd", work=STEP)
    group = scheduler.schedule(0.0)
    assert isinstance(group, Group)
    scheduler.shrink(Phase.DENOISE, 4)
    scheduler.retry(group)
    assert scheduler.row_budget(Phase.DECODE) == 8
    assert scheduler.schedule(0.0) == Group(Phase.DENOISE, ("a", "b"), 2)
    scheduler.shrink(Phase.DENOISE, 1)
    assert scheduler.row_budget(Phase.DENOISE) == 1
    for name in "ab":
        scheduler.update(name, STEP)
    for _ in range(400):
        planned = scheduler.schedule(0.0)
        assert isinstance(planned, Group)
        for name in planned.requests:
            scheduler.update(name, STEP)
    assert scheduler.row_budget(Phase.DENOISE) == 8


def test_calls_to_be_retried_alone_keep_their_turn() -> None:
    scheduler: Scheduler[str] = Scheduler(Limits())
    parked(scheduler, "a", "b", work=STEP)
    group = scheduler.schedule(0.0)
    assert isinstance(group, Group)
    parked(scheduler, "later", work=STEP)
    scheduler.retry(group, alone=True)
    assert [scheduler.schedule(0.0) for _ in range(3)] == [
        Group(Phase.DENOISE, (name,), 16) for name in ("a", "b", "later")
    ]


def test_large_request_is_overtaken_only_so_often() -> None:
    scheduler: Scheduler[object] = Scheduler(Limits(max_num_seqs=2, max_cost=4))
    scheduler.add("at work", 0.0, 2)
    assert scheduler.schedule(0.0) == Admit("at work")
    scheduler.add("large", 0.0, 4)
    overtaken = 0
    for number in range(100):
        scheduler.add(number, 0.0, 1)
        plan = scheduler.schedule(0.0)
        if plan is None:
            break
        overtaken += 1
        scheduler.update(number, None)
    assert overtaken == MAX_OVERTAKES
    scheduler.update("at work", None)
    assert scheduler.schedule(0.0) == Admit("large")


def test_request_that_never_fits_is_refused() -> None:
    with pytest.raises(OverBudget):
        Scheduler[str](Limits(max_cost=3)).add("huge", 0.0, 4)


GIB = Need(held=1, calls={Phase.DENOISE: 2, Phase.DECODE: 5})


def test_requests_that_fit_one_at_a_time_decode_one_at_a_time_and_denoise_together() -> None:
    scheduler: Scheduler[str] = Scheduler(Limits(max_memory=8))
    for name in "abc":
        scheduler.add(name, 0.0, need=GIB)
        assert scheduler.schedule(0.0) == Admit(name)
        scheduler.update(name, STEP)
    scheduler.add("d", 0.0, need=GIB)  # would hold 1 more, and then nobody could decode
    assert scheduler.schedule(0.0) == Group(Phase.DENOISE, ("a", "b"), 16)
    assert scheduler.queued == 1
    for name in "ab":
        scheduler.update(name, Work(Phase.DECODE, "x"))
    assert scheduler.schedule(0.0) == Group(Phase.DENOISE, ("c",), 16)
    scheduler.update("c", Work(Phase.DECODE, "x"))
    assert scheduler.schedule(0.0) == Group(Phase.DECODE, ("a",), 16)
    scheduler.update("a", None)
    assert scheduler.schedule(0.0) == Admit("d")


def test_request_that_needs_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(OverBudget):
        Scheduler[str](Limits(max_memory=5)).add("huge", 0.0, need=GIB)


def test_static_batch_takes_those_of_its_kind_past_others_who_then_lead_the_next() -> None:
    scheduler: Scheduler[str] = Scheduler(Limits(static=True))
    for name, kind in (("a", 1), ("b", 2), ("c", 1)):
        scheduler.add(name, 0.0, kind=kind)
    for name in "ac":
        assert scheduler.schedule(0.0) == Admit(name)
        scheduler.update(name, STEP)
    assert scheduler.schedule(0.0) == Group(Phase.DENOISE, ("a", "c"), 16)
    scheduler.add("d", 0.0, kind=1)
    scheduler.update("a", None)
    assert scheduler.schedule(0.0) is None
    scheduler.update("c", None)
    assert scheduler.schedule(0.0) == Admit("b")


def test_idle_stage_waits_for_company_only_so_long() -> None:
    scheduler: Scheduler[str] = Scheduler(Limits(max_num_seqs=3), ForCompany(0.5))
    scheduler.add("a", 10.0)
    assert scheduler.schedule(10.2) is None
    assert scheduler.wait_s(10.2) == pytest.approx(0.3)
    assert scheduler.schedule(10.6) == Admit("a")
    scheduler.add("b", 10.7)
    assert scheduler.schedule(10.7) == Admit("b")  # a stage at work does not wait


def test_idle_stage_starts_when_all_its_places_are_taken() -> None:
    scheduler: Scheduler[str] = Scheduler(Limits(max_num_seqs=2), ForCompany(60.0))
    scheduler.add("a", 0.0)
    assert scheduler.schedule(0.0) is None
    scheduler.add("b", 0.1)
    assert scheduler.schedule(0.1) == Admit("a")
    assert scheduler.schedule(0.1) == Admit("b")
