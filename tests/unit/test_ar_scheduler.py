"""The AR scheduler and its pages, without a model: whatever happens, in whatever order, its promises hold."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proto.errors import InvalidRequest
from proto.ids import RequestId
from stages.ar.kv_blocks import KvBlocks, hash_blocks
from stages.ar.scheduler import OVERTAKING, Chunk, Limits, Plan, Scheduler, Track

PAGE = 4


def scheduler(*, seqs: int = 4, budget: int = 16, pages: int = 32, caching: bool = True) -> Scheduler:
    return Scheduler(Limits(seqs, budget, caching), KvBlocks(pages + 1, PAGE))


def track(name: str, prompt: int, answer: int = 4, *, priority: int = 0, first: int = 0, salt: str = "") -> Track:
    tokens = [first + i for i in range(prompt)]
    return Track(RequestId(name), tokens, longest=prompt + answer, priority=priority, salt=salt)


def finish(made: Scheduler, plan: Plan) -> list[Track]:
    """Do what an engine does with a plan: compute, add a token, end those that are as long as they may be."""
    made.commit(plan.chunks)
    ended = []
    for chunk in plan.chunks:
        if not chunk.last:
            continue
        if len(chunk.track.tokens) >= chunk.track.longest:
            made.remove(chunk.track)
            ended.append(chunk.track)
        else:
            chunk.track.tokens.append(7)
    return ended


def drain(made: Scheduler, most: int = 10_000) -> list[Track]:
    """Run until nothing is left; who ended, in order."""
    ended: list[Track] = []
    for _ in range(most):
        if not (made.waiting or made.running):
            return ended
        plan = made.schedule()
        assert plan.chunks, "there is work, and none is planned"
        ended += finish(made, plan)
        made.check()
    raise AssertionError("it never ends")


def shape(chunks: tuple[Chunk, ...]) -> list[tuple[str, int, int]]:
    return [(chunk.track.request, chunk.start, chunk.count) for chunk in chunks]


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_cut_into_chunks_and_answers_go_on_beside_it() -> None:
    made = scheduler(budget=6)
    short, long = track("short", 3), track("long", 14, first=100)
    made.add(short)
    finish(made, made.schedule())
    made.add(long)
    plans = []
    for _ in range(3):
        plan = made.schedule()
        plans.append(shape(plan.chunks))
        finish(made, plan)
    assert plans == [
        [("short", 3, 1), ("long", 0, 5)],
        [("short", 4, 1), ("long", 5, 5)],
        [("short", 5, 1), ("long", 10, 4)],
    ]


def test_no_step_has_more_tokens_than_the_budget() -> None:
    made = scheduler(budget=5, seqs=5)
    for number in range(5):
        made.add(track(f"r{number}", 9, first=100 * number))
    while made.waiting or made.running:
        plan = made.schedule()
        assert plan.tokens <= 5
        assert len({id(chunk.track) for chunk in plan.chunks}) == len(plan.chunks)
        finish(made, plan)


def test_first_come_first_served() -> None:
    made = scheduler(seqs=2)
    for number in range(5):
        made.add(track(f"r{number}", 4, first=100 * number))
    assert [one.request for one in drain(made)] == [f"r{number}" for number in range(5)]


def test_priority_overtakes_but_only_so_many() -> None:
    made = scheduler(seqs=1)
    made.add(track("patient", 2, 1))
    for number in range(OVERTAKING + 3):
        made.add(track(f"keen{number}", 2, 1, priority=1))
    ended = [one.request for one in drain(made)]
    assert ended[0] == "keen0"
    assert ended.index("patient") == OVERTAKING - 1 or ended.index("patient") == OVERTAKING


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    made = scheduler(pages=4)
    with pytest.raises(InvalidRequest, match=r"17 tokens, which take 5 KV pages of 4; the pool has 4"):
        made.add(track("big", 13, 4))
    made.add(track("fits", 12, 4))
    assert [one.request for one in drain(made)] == ["fits"]


# --- preemption -------------------------------------------------------------------------------------------------------


def test_when_pages_run_out_the_last_in_rank_gives_way_and_is_read_again_with_its_answer() -> None:
    made = scheduler(pages=4, caching=False)
    first, second = track("first", 6, 6), track("second", 6, 6, first=100)
    made.add(first)
    made.add(second)
    seen = []
    while made.waiting or made.running:
        plan = made.schedule()
        seen += [chunk for chunk in plan.chunks if chunk.track is second]
        finish(made, plan)
        made.check()
    assert second.preempted == 1
    assert first.preempted == 0
    again = next(chunk for chunk in seen[1:] if chunk.start == 0)
    assert again.count > 6  # the prompt, and what it had answered
    assert made.counters.preemptions == 1


def test_a_preempted_track_is_started_once_only() -> None:
    made = scheduler(pages=4, caching=False)
    for name in ("a", "b"):
        made.add(track(name, 6, 6, first=ord(name)))
    started: list[Track] = []
    while made.waiting or made.running:
        plan = made.schedule()
        started += plan.started
        finish(made, plan)
    assert [one.request for one in started] == ["a", "b"]


# --- prefixes ---------------------------------------------------------------------------------------------------------


def test_a_prompt_that_starts_like_another_reads_only_its_own_part() -> None:
    made = scheduler()
    made.add(track("one", 10))
    drain(made)
    two = track("two", 10)
    two.tokens[9] = 99
    made.add(two)
    assert shape(made.schedule().chunks) == [("two", 8, 2)]
    assert two.hits == 8
    assert made.counters.hit_tokens == 8


def test_the_last_token_of_a_known_prompt_is_read_all_the_same() -> None:
    made = scheduler()
    made.add(track("one", 8))
    drain(made)
    made.add(track("two", 8))
    assert shape(made.schedule().chunks) == [("two", 4, 4)]


def test_prefixes_are_not_shared_across_salts_nor_when_a_track_will_not() -> None:
    made = scheduler()
    made.add(track("one", 8, salt="a"))
    drain(made)
    made.add(track("other", 8, salt="b"))
    shy = track("shy", 8, salt="a")
    shy.reads_cache = False
    made.add(shy)
    assert shape(made.schedule().chunks) == [("other", 0, 8), ("shy", 0, 8)]


def test_two_that_run_at_one_time_share_the_pages_of_their_common_start() -> None:
    made = scheduler(budget=64)
    one, two = track("one", 12, 8), track("two", 12, 8)
    made.add(one)
    finish(made, made.schedule())
    made.add(two)
    finish(made, made.schedule())
    assert one.pages[:2] == two.pages[:2]
    assert not set(one.pages[2:]) & set(two.pages[2:])
    made.remove(one)
    made.check()
    assert made.blocks.find(two.hashes[:2]) == two.pages[:2]


def test_a_condemned_track_leaves_nothing_behind_that_could_be_found() -> None:
    made = scheduler()
    bad = track("bad", 12)
    made.add(bad)
    finish(made, made.schedule())
    assert made.condemn(bad) == bad.pages
    made.remove(bad)
    made.check()
    made.add(track("again", 12))
    assert shape(made.schedule().chunks) == [("again", 0, 12)]


def test_a_hash_covers_everything_before_it() -> None:
    one = hash_blocks([1, 2, 3, 4, 5, 6, 7, 8], PAGE)
    assert hash_blocks([1, 2, 3, 4, 5, 6, 7, 8, 9], PAGE) == one
    assert hash_blocks([0, 2, 3, 4, 5, 6, 7, 8], PAGE)[1] != one[1]
    assert hash_blocks([1, 2, 3, 4, 5, 6, 7, 8], PAGE, salt="x")[0] != one[0]
    assert hash_blocks([1, 2, 3, 4, 5, 6, 7, 8], PAGE, known=one[:1]) == one


def test_the_least_recently_used_prefix_is_given_away_first() -> None:
    made = scheduler(pages=4, budget=64)
    for name, first in (("old", 0), ("new", 50)):
        made.add(track(name, 7, 1, first=first))
        drain(made)
    made.add(track("old again", 7, 1))  # now "new" is the older one
    drain(made)
    made.add(track("big", 12, 1, first=200))
    drain(made)
    assert made.blocks.find(hash_blocks([50, 51, 52, 53], PAGE)) == []


def test_forgetting_prefixes_harms_nobody_who_runs() -> None:
    made = scheduler()
    made.add(track("one", 9))
    finish(made, made.schedule())
    assert made.blocks.forget() == 2
    made.check()
    assert len(drain(made)) == 1
    made.check()


# --- whatever happens -------------------------------------------------------------------------------------------------


# --- rest -------------------------------------------------------------------------------------------------------------


def at_rest(made: Scheduler, name: str, prompt: int) -> Track:
    """A track that has read its prompt, has one token of an answer, and rests."""
    one = track(name, prompt, 4)
    made.add(one)
    while one.computed < prompt:
        finish(made, made.schedule())
    made.rest(one)
    return one


def test_a_resumed_track_reads_only_what_is_new_to_it() -> None:
    made = scheduler()
    one = at_rest(made, "a", 10)
    assert (len(one.tokens), one.computed) == (11, 10)
    assert made.resume(one, [*one.tokens, 50, 51], 20) == 10
    assert shape(made.schedule().chunks) == [("a", 10, 3)]
    assert (made.counters.resumed_tokens, made.counters.kept_tokens) == (13, 10)


def test_a_resumed_track_whose_tokens_differ_keeps_whole_pages_of_what_it_has_in_common() -> None:
    made = scheduler()
    one = at_rest(made, "a", 10)
    assert made.resume(one, [*one.tokens[:6], 50, 51, 52], 20) == 6 // PAGE * PAGE
    made.check()


def test_those_who_rest_take_no_seat_and_give_way_before_anybody_who_runs() -> None:
    made = scheduler(seqs=1, pages=6)
    one = at_rest(made, "a", 3 * PAGE)
    other = track("b", 4 * PAGE, 1, first=100)
    made.add(other)
    assert [chunk.track for chunk in made.schedule().chunks] == [other]
    assert (one.pages, one.computed) == ([], 0)
    assert made.counters.preemptions == 1
    made.check()
    made.remove(other)
    made.resume(one, [*one.tokens, 50], 4 * PAGE)
    assert [ended.request for ended in drain(made)] == ["a"]


def test_the_pages_of_those_who_wait_with_some_can_be_had_too() -> None:
    """One that goes on waits behind another for the only seat, and has the pages that the other needs."""
    made = scheduler(seqs=1, pages=6)
    one = at_rest(made, "a", 3 * PAGE)
    first = track("b", 2 * PAGE, 3 * PAGE, first=100)
    made.add(first)
    made.commit(made.schedule().chunks)
    first.tokens.append(7)
    made.resume(one, [*one.tokens, 50], 4 * PAGE)
    assert [ended.request for ended in drain(made)] == ["b", "a"]


def test_a_track_can_rest_that_was_preempted_before_its_end_was_found() -> None:
    made = scheduler(pages=4)
    first, last = track("a", 2 * PAGE, 2 * PAGE), track("b", 2 * PAGE - 1, 2 * PAGE, first=100)
    made.add(first)
    made.add(last)
    while not last.preempted:
        finish(made, made.schedule())
    made.rest(last)
    made.check()
    assert (made.resting, made.waiting) == ([last], [])
    assert [ended.request for ended in drain(made)] == ["a"]
    assert made.resume(last, [*last.tokens, 50], 4 * PAGE) == 0
    assert [ended.request for ended in drain(made)] == ["b"]


def may_rest(track: Track) -> bool:
    """Its answer may have ended: it goes on with one token, or has been preempted since."""
    return track.started and (track.todo == 1 if track.seated else not track.pages)


class AnyLife(RuleBasedStateMachine):
    """Requests come, run, are aborted and fail in any order; after every event everything holds, and at the end all end."""

    def __init__(self) -> None:
        super().__init__()
        self.made = scheduler(seqs=3, budget=7, pages=9)
        self.alive: list[Track] = []
        self.resting: list[Track] = []
        self.number = 0
        self.planned: Plan | None = None

    @rule(
        prompt=st.integers(1, 20),
        answer=st.integers(1, 12),
        priority=st.integers(-2, 2),
        first=st.sampled_from([0, 0, 50]),
        salt=st.sampled_from(["", "s"]),
        shy=st.booleans(),
    )
    def come(self, prompt: int, answer: int, priority: int, first: int, salt: str, shy: bool) -> None:
        self.number += 1
        made = track(f"r{self.number}", prompt, answer, priority=priority, first=first, salt=salt)
        made.reads_cache = not shy
        if self.made.blocks.pages_for(prompt + answer) > 9:
            with pytest.raises(InvalidRequest):
                self.made.add(made)
        else:
            self.made.add(made)
            self.alive.append(made)

    @rule()
    def step(self) -> None:
        plan = self.made.schedule()
        assert bool(plan.chunks) == bool(self.alive)
        assert plan.tokens <= 7
        assert [chunk.count for chunk in plan.chunks if chunk.count == 1] == [
            chunk.count for chunk in plan.chunks[: sum(chunk.count == 1 for chunk in plan.chunks)]
        ]
        for chunk in plan.chunks:
            assert chunk.start == chunk.track.computed
            assert len(chunk.track.pages) * PAGE >= chunk.end
            written = chunk.track.pages[chunk.start // PAGE : -(-chunk.end // PAGE)]
            assert all(self.made.blocks.sole(page) for page in written), "a shared page is written to"
        for ended in finish(self.made, plan):
            self.alive.remove(ended)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), spoilt=st.booleans())
    def leave(self, data: st.DataObject, spoilt: bool) -> None:
        gone = data.draw(st.sampled_from(self.alive))
        if spoilt:
            self.made.condemn(gone)
        self.made.remove(gone)
        self.made.remove(gone)
        self.alive.remove(gone)

    @precondition(lambda self: any(may_rest(one) for one in self.alive))
    @rule(data=st.data())
    def rest(self, data: st.DataObject) -> None:
        track = data.draw(st.sampled_from([one for one in self.alive if may_rest(one)]))
        self.made.rest(track)
        self.alive.remove(track)
        self.resting.append(track)

    @precondition(lambda self: self.resting)
    @rule(data=st.data(), more=st.integers(1, 12), answer=st.integers(1, 6))
    def resume(self, data: st.DataObject, more: int, answer: int) -> None:
        track = data.draw(st.sampled_from(self.resting))
        same = data.draw(st.integers(0, len(track.tokens)))
        self.number += 1
        tokens = [*track.tokens[:same], *([1000 + self.number] * more)]  # which no track has had
        before = track.tokens, track.computed, list(track.pages)
        if self.made.blocks.pages_for(len(tokens) + answer) > 9:
            with pytest.raises(InvalidRequest):
                self.made.resume(track, tokens, len(tokens) + answer)
            assert (track.tokens, track.computed, track.pages) == before
            return
        kept = self.made.resume(track, tokens, len(tokens) + answer)
        assert kept == track.computed <= min(same, before[1])
        self.resting.remove(track)
        self.alive.append(track)

    @precondition(lambda self: self.resting)
    @rule()
    def leave_at_rest(self) -> None:
        self.made.remove(self.resting.pop())

    @rule()
    def forget(self) -> None:
        self.made.blocks.forget()

    @invariant()
    def holds(self) -> None:
        self.made.check()
        assert {id(one) for one in (*self.made.waiting, *self.made.running)} == {id(one) for one in self.alive}
        assert [id(one) for one in self.made.resting] == [id(one) for one in self.resting]

    def teardown(self) -> None:
        ended = drain(self.made)
        assert len(ended) == len(self.alive)
        for track in self.resting:
            self.made.remove(track)
        assert self.made.blocks.owned == 0


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
