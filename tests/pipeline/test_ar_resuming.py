"""Resumable requests of the AR engine: each answer is that to the whole conversation so far, and what was read is not read again."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from proto.deploy import ArEngineSpec, ArStage
from proto.errors import InvalidRequest
from proto.ids import EventId, RequestId
from proto.messages import (
    Chat,
    ChatMessage,
    MoreInput,
    Paused,
    PromptChange,
    Text,
    TextDelta,
    Tokens,
    Updated,
    UpdateState,
)
from proto.params import SamplingParams
from stages.ar import resuming
from stages.ar.engine import ArEngine
from stages.engine import Emit, EngineStats, Event, Finished
from tests.models.tiny_ar import build_tiny_llama
from tests.pipeline.test_ar_engine import job, loaded, preempt_after_each_token, run, text, tokens

STARTED, COMPLETED, REFUSED = UpdateState.STARTED, UpdateState.COMPLETED, UpdateState.REFUSED
GREEDY = SamplingParams(max_tokens=8, resumable=True)
ALONE = SamplingParams(max_tokens=8)
TURNS = ("What is the capital of France?", "And of Italy?", "List three fruits.")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def shared(tiny: Path) -> ArEngine:
    return loaded(tiny)


@pytest.fixture
def engine(shared: ArEngine) -> Iterator[ArEngine]:
    yield shared
    assert shared.stats() == EngineStats()
    assert not shared.has_work


def rest(engine: ArEngine) -> list[Event]:
    """Step until nothing is to be done."""
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return events


def update(
    engine: ArEngine, name: str, event: str, more: str | Sequence[int] | Chat | None, *, close: bool = False
) -> None:
    value = Text(text=more) if isinstance(more, str) else more
    if value is not None and not isinstance(value, Text | Chat):
        value = Tokens(ids=tuple(value))
    engine.update(RequestId(name), EventId(event), MoreInput(input=value, close=close))


def told(events: Sequence[Event]) -> list[tuple[str, UpdateState]]:
    parts = [event.part for event in events if isinstance(event, Emit)]
    return [(part.event, part.state) for part in parts if isinstance(part, Updated)]


def said(events: Sequence[Event]) -> str:
    return "".join(e.part.text for e in events if isinstance(e, Emit) and isinstance(e.part, TextDelta))


def paused(events: Sequence[Event]) -> Paused:
    assert isinstance(events[-1], Emit)
    assert isinstance(events[-1].part, Paused)
    return events[-1].part


def whole(engine: ArEngine, messages: Sequence[tuple[str, str]]) -> tuple[str, tuple[int, ...]]:
    """Text and tokens of the answer to a whole conversation."""
    chat = Chat(messages=tuple(ChatMessage(role, content) for role, content in messages))
    events = run(engine, [job("whole", chat, ALONE)])["whole"]
    return text(events), tokens(events)


def stats(engine: ArEngine) -> dict[str, int]:
    return engine.call("stats", {})


# --- turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("company", [False, True])
def test_every_turn_is_answered_as_the_whole_conversation_would_be(engine: ArEngine, company: bool) -> None:
    history: list[tuple[str, str]] = []
    answers: list[tuple[str, tuple[int, ...]]] = []
    for turn in TURNS:
        history.append(("user", turn))
        answers.append(whole(engine, history))
        history.append(("assistant", answers[-1][0]))
    engine.call("reset_prefix_cache", {})
    engine.submit(job("r", TURNS[0], GREEDY))
    events = rest(engine)
    assert said(events) == answers[0][0]
    for number, turn in enumerate(TURNS[1:], 1):
        if company:
            engine.submit(job("other", "List three fruits.", ALONE))
        update(engine, "r", f"u{number}", turn)
        events = [event for event in rest(engine) if event.request == "r"]
        assert told(events) == [(f"u{number}", STARTED), (f"u{number}", COMPLETED)]
        assert said(events) == answers[number][0]
        assert paused(events).usage.completion_tokens == sum(len(ids) for _, ids in answers[: number + 1])
    update(engine, "r", "end", None, close=True)
    events = rest(engine)
    assert told(events) == [("end", COMPLETED)]
    assert text(events) == "".join(words for words, _ in answers)
    assert tokens(events) == tuple(one for _, ids in answers for one in ids)


def test_tokens_go_on_behind_what_was_generated_and_nothing_is_read_twice(engine: ArEngine) -> None:
    first, more = tuple(range(40, 90)), (7, 8, 9)
    events = run(engine, [job("alone", Tokens(ids=first), ALONE)])["alone"]
    answer = tokens(events)
    kept = answer[:-1] if events[-1].finish_reason == "stop" else answer  # type: ignore[union-attr]
    second = tokens(run(engine, [job("alone", Tokens(ids=(*first, *kept, *more)), ALONE)])["alone"])
    engine.call("reset_prefix_cache", {})
    before = stats(engine)
    engine.submit(job("r", Tokens(ids=first), GREEDY))
    rest(engine)
    update(engine, "r", "u1", more, close=True)
    events = rest(engine)
    assert tokens(events) == (*answer, *second)
    after = stats(engine)
    assert after["resumed_tokens"] - before["resumed_tokens"] == len(first) + len(kept) + len(more)
    assert after["kept_tokens"] - before["kept_tokens"] == len(first) + len(answer) - 1
    assert after["preemptions"] == before["preemptions"]


def test_a_conversation_keeps_what_its_next_turn_begins_with(engine: ArEngine) -> None:
    """All but the end of the answer, which the template may write in other tokens."""
    engine.call("reset_prefix_cache", {})
    before = stats(engine)
    engine.submit(job("r", TURNS[0] * 4, GREEDY))
    usage = paused(rest(engine)).usage
    update(engine, "r", "u1", TURNS[1], close=True)
    rest(engine)
    kept = stats(engine)["kept_tokens"] - before["kept_tokens"]
    assert kept >= usage.prompt_tokens - 16  # a page


def test_updates_wait_for_the_end_of_an_answer_in_their_order(engine: ArEngine) -> None:
    engine.submit(job("r", TURNS[0], GREEDY))
    engine.step()
    update(engine, "r", "u1", TURNS[1])
    update(engine, "r", "u2", TURNS[2], close=True)
    events = rest(engine)
    assert told(events) == [("u1", STARTED), ("u1", COMPLETED), ("u2", STARTED), ("u2", COMPLETED)]
    pauses = [number for number, e in enumerate(events) if isinstance(e, Emit) and isinstance(e.part, Paused)]
    starts = [
        n
        for n, e in enumerate(events)
        if isinstance(e, Emit) and isinstance(e.part, Updated) and e.part.state is STARTED
    ]
    assert len(pauses) == 2
    assert [pause < start for pause, start in zip(pauses, starts, strict=True)] == [True, True]
    assert isinstance(events[-1], Finished)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_string_ends_a_turn_and_what_was_computed_beyond_it_does_no_harm(tiny: Path, overlap: bool) -> None:
    engine = loaded(tiny, ArStage(engine=ArEngineSpec(overlap=overlap)))
    first, _ = whole(engine, [("user", TURNS[0])])
    stop = first[3:5]
    stopping = SamplingParams(max_tokens=8, stop=(stop,), resumable=True)
    engine.submit(job("r", TURNS[0], stopping))
    events = rest(engine)
    assert said(events) == first.partition(stop)[0]
    history = [("user", TURNS[0]), ("assistant", said(events)), ("user", TURNS[1])]
    second, _ = whole(engine, history)
    update(engine, "r", "u1", TURNS[1], close=True)
    events = rest(engine)
    assert said(events) == second.partition(stop)[0]
    assert engine.stats() == EngineStats()
    engine.close()


def test_a_turn_may_lose_its_pages_in_the_step_that_finds_its_end(tiny: Path) -> None:
    """With overlap the next forward is planned before a stop string is found, and may preempt the one that it ends."""
    engine = loaded(tiny, ArStage(engine=ArEngineSpec(overlap=True)))
    first, _ = whole(engine, [("user", TURNS[0])])
    stop = first[3:5]
    preempt_after_each_token(engine)
    engine.submit(job("r", TURNS[0], SamplingParams(max_tokens=8, stop=(stop,), resumable=True)))
    events = rest(engine)
    assert said(events) == first.partition(stop)[0]
    assert (engine.call("stats", {})["resting"], engine.call("stats", {})["kv_pages_used"]) == (1, 0)
    history = [("user", TURNS[0]), ("assistant", said(events)), ("user", TURNS[1])]
    update(engine, "r", "u1", TURNS[1], close=True)
    events = rest(engine)
    engine._loaded.scheduler.check()
    second, _ = whole(loaded(tiny), history)
    assert said(events) == second.partition(stop)[0]
    assert engine.stats() == EngineStats()
    engine.close()


def test_a_closed_request_is_counted_and_its_rest_is_no_time_between_tokens(engine: ArEngine) -> None:
    before = engine.call("stats", {})
    engine.submit(job("r", TURNS[0], SamplingParams(max_tokens=4, ignore_eos=True, resumable=True)))
    rest(engine)
    update(engine, "r", "u1", TURNS[1])
    rest(engine)
    update(engine, "r", "u2", None, close=True)
    rest(engine)
    after = engine.call("stats", {})
    assert after["finished"] - before["finished"] == 1
    assert after["generated_tokens"] - before["generated_tokens"] == 2 * 4
    assert after["inter_token_s"]["count"] - before["inter_token_s"]["count"] == 2 * 3


# --- refused ----------------------------------------------------------------------------------------------------------


def test_what_a_request_cannot_take_is_refused_and_it_goes_on(engine: ArEngine) -> None:
    engine.submit(job("plain", TURNS[0], ALONE))
    with pytest.raises(InvalidRequest, match="not resumable"):
        update(engine, "plain", "u1", "more")
    rest(engine)
    with pytest.raises(InvalidRequest, match="is over"):
        update(engine, "plain", "u1", "more")
    engine.submit(job("r", Tokens(ids=(1, 2, 3)), GREEDY))
    rest(engine)
    with pytest.raises(InvalidRequest, match="generates text"):
        engine.update(RequestId("r"), EventId("u1"), PromptChange(prompt="x"))
    update(engine, "r", "u2", Chat(messages=(ChatMessage("user", "x"),)))
    update(engine, "r", "u3", (10**6,))
    update(engine, "r", "u4", [5] * 100_000)
    events = rest(engine)
    assert told(events) == [("u2", REFUSED), ("u3", REFUSED), ("u4", REFUSED)]
    update(engine, "r", "u5", (4, 5), close=True)
    with pytest.raises(InvalidRequest, match="closed"):
        update(engine, "r", "u6", (4, 5))
    events = rest(engine)
    assert told(events) == [("u5", STARTED), ("u5", COMPLETED)]
    assert isinstance(events[-1], Finished)


@pytest.mark.parametrize(
    ("params", "more", "field"),
    [
        (SamplingParams(resumable=True, n=2), {"emit": ("text",)}, "n"),
        (SamplingParams(resumable=True, prompt_logprobs=1), {}, "prompt_logprobs"),
        (SamplingParams(resumable=True), {"emit": ("text", "hidden")}, "resumable"),
    ],
)
def test_what_there_is_once_for_a_prompt_is_refused_for_one_that_grows(
    engine: ArEngine, params: SamplingParams, more: dict[str, tuple[str, ...]], field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        engine.submit(job("r", "x", params, **more))
    assert raised.value.info.field == field


# --- ends and memory --------------------------------------------------------------------------------------------------


def test_an_abort_gives_back_the_pages_of_a_request_that_rests(engine: ArEngine) -> None:
    engine.submit(job("r", TURNS[0], GREEDY))
    rest(engine)
    assert engine.stats() == EngineStats(queued=0, running=1)
    assert stats(engine)["kv_pages_used"] > 0
    engine.abort(RequestId("r"))
    assert stats(engine)["kv_pages_used"] == 0


def test_a_request_that_nobody_comes_back_to_is_closed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(resuming.time, "monotonic", lambda: now)
    engine = loaded(tiny, ArStage(engine=ArEngineSpec(resume_timeout=30.0)))
    engine.submit(job("r", TURNS[0], GREEDY))
    rest(engine)
    assert engine.wake_s() == 30.0
    now += 29.0
    assert engine.step() == []
    now += 1.0
    (event,) = engine.step()
    assert isinstance(event, Finished)
    assert event.finish_reason == resuming.IDLE
    assert engine.wake_s() is None
    assert engine.stats() == EngineStats()


def test_when_memory_is_short_those_who_rest_give_way_and_are_read_again(tiny: Path) -> None:
    """A pool for little more than one request; the other one takes the pages of the one that rests."""
    spec = ArStage(engine=ArEngineSpec(max_num_seqs=1, max_model_len=160))
    engine = loaded(tiny, spec)
    pages, size = stats(engine)["kv_pages"], stats(engine)["page_tokens"]
    long = tuple(range(10, 10 + (pages - 2) * size))
    ids = tuple(range(300, 300 + 3 * size))
    answer = tokens(run(engine, [job("alone", Tokens(ids=ids), ALONE)])["alone"])
    second = tokens(run(engine, [job("alone", Tokens(ids=(*ids, *answer, 5)), ALONE)])["alone"])
    engine.submit(job("r", Tokens(ids=ids), GREEDY))
    rest(engine)
    engine.call("reset_prefix_cache", {})
    before = stats(engine)["preemptions"]
    run(engine, [job("long", Tokens(ids=long), ALONE)])
    assert stats(engine)["preemptions"] == before + 1
    kept = stats(engine)["kept_tokens"]
    update(engine, "r", "u1", (5,), close=True)
    events = rest(engine)
    assert stats(engine)["kept_tokens"] == kept
    assert tokens(events) == (*answer, *second)
