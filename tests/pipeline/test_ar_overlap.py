"""With a forward under way while words are told, everybody gets what they get without: tokens, words, ends and failures.

What is aborted, asked or ended while a forward computes leaves nothing behind, and the scheduler's invariants hold after
every step.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proto.deploy import ArEngineSpec, ArStage, LimitsSpec, ModelSpec
from proto.errors import StartError
from proto.ids import RequestId, StageName
from proto.messages import Text, Tokens
from proto.params import SamplingParams
from stages.ar.engine import ArEngine
from stages.engine import Emit, Event, Failed, Finished, Job, LoadContext
from tests.models.tiny_ar import build_scripted_llama, build_tiny_llama

CONTEXT = 96


def engine_of(path: Path, *, overlap: bool, **spec: object) -> ArEngine:
    made = ArEngine()
    engine = ArEngineSpec(
        **{"overlap": overlap, "max_num_seqs": 3, "max_num_batched_tokens": 12, "max_model_len": CONTEXT, **spec}
    )
    stage = ArStage(model=ModelSpec(path=str(path), dtype="float32"), engine=engine)
    made.load(LoadContext(StageName("t"), stage, LimitsSpec(), "cpu", (), lambda note, done: None))
    return made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def both(tiny: Path) -> Iterable[tuple[ArEngine, ArEngine]]:
    page = 3 * 4 * 2 * 16 * 2 * 4  # layers, tokens, KV heads, size, keys and values, float32
    size = {"block_size": 4, "kv_cache_bytes": 40 * page}  # so few that sequences are preempted
    made = engine_of(tiny, overlap=False, **size), engine_of(tiny, overlap=True, **size)
    yield made
    for engine in made:
        engine.close()


def drive(engine: ArEngine, jobs: list[Job], aborts: dict[int, RequestId], every: int) -> dict[RequestId, list[Event]]:
    """A job every so many steps, aborts before their steps; invariants after each."""
    engine.call("reset_prefix_cache", {})
    events: dict[RequestId, list[Event]] = {}
    left, number = list(jobs), 0
    while left or engine.has_work:
        if left and number % every == 0:
            engine.submit(left.pop(0))
        if number in aborts:
            engine.abort(aborts[number])
        for event in engine.step():
            events.setdefault(event.request, []).append(event)
        engine._loaded.scheduler.check()
        number += 1
    assert engine.call("stats", {})["kv_pages_used"] == 0
    return events


def ends(events: dict[RequestId, list[Event]]) -> dict[RequestId, object]:
    found = {}
    for request, mine in events.items():
        last = mine[-1]
        assert sum(isinstance(event, Finished | Failed) for event in mine) <= 1
        if isinstance(last, Finished):
            said = "".join(one.part.text for one in mine if isinstance(one, Emit) and one.output == "text")
            text = last.outputs["text"]
            assert isinstance(text, Text)
            assert said == text.text
            found[request] = (last.outputs["tokens"], text.text, last.finish_reason, last.usage)
    return found


requests = st.lists(
    st.tuples(
        st.lists(st.integers(3, 300), min_size=1, max_size=40),
        st.integers(1, 30),
        st.sampled_from([None, 7]),
        st.sampled_from([(), ("e",), ("a", "t")]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=requests, every=st.integers(1, 4))
def test_everybody_gets_what_they_get_without(
    both: tuple[ArEngine, ArEngine], asked: list[tuple[list[int], int, int | None, tuple[str, ...]]], every: int
) -> None:
    jobs = [
        Job(
            RequestId(str(number)),
            {"tokens": Tokens(ids=tuple(ids))},
            SamplingParams(max_tokens=longest, stop=stop or None, temperature=0.0 if seed is None else 1.0, seed=seed),
            emit=("text", "tokens"),
        )
        for number, (ids, longest, seed, stop) in enumerate(asked)
    ]
    plain, overlapped = (ends(drive(engine, jobs, {}, every)) for engine in both)
    assert len(plain) == len(jobs)
    assert overlapped == plain


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(aborts=st.dictionaries(st.integers(0, 40), st.sampled_from(["0", "1", "2", "3"]), max_size=4))
def test_aborts_at_any_step_leave_nothing_behind_and_touch_nobody_else(
    both: tuple[ArEngine, ArEngine], aborts: dict[int, str]
) -> None:
    jobs = [
        Job(
            RequestId(str(number)),
            {"tokens": Tokens(ids=tuple(range(5 + number, 25 + number)))},
            SamplingParams(max_tokens=20, ignore_eos=True),
            emit=("text", "tokens"),
        )
        for number in range(4)
    ]
    alone = ends(drive(both[0], jobs, {}, 2))
    found = ends(drive(both[1], jobs, {step: RequestId(one) for step, one in aborts.items()}, 2))
    assert {request: alone[request] for request in found} == found
    assert set(alone) - set(found) <= {RequestId(one) for one in aborts.values()}


def test_a_stop_string_ends_an_answer_though_the_next_token_is_under_way(tmp_path: Path) -> None:
    path = build_scripted_llama(tmp_path / "m")
    results = []
    for overlap in (False, True):
        engine = engine_of(path, overlap=overlap, max_num_batched_tokens=64)
        params = SamplingParams(max_tokens=40, stop=("END",))
        job = Job(RequestId("r"), {"prompt": Text(text="say it")}, params, emit=("text", "tokens"))
        results.append(ends(drive(engine, [job], {}, 1)))
        engine.close()
    assert results[0] == results[1]
    assert results[0][RequestId("r")][2] == "stop"


def test_a_forward_that_raises_fails_only_its_own_request(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny, overlap=True, native=False)
    runner = engine._loaded.runner
    plain = runner.run

    def run(chunks, *more):
        if any(99 in chunk.track.tokens for chunk in chunks):
            raise RuntimeError("index out of range in self")
        return plain(chunks, *more)

    monkeypatch.setattr(runner, "run", run)
    jobs = [
        Job(RequestId(name), {"tokens": Tokens(ids=ids)}, SamplingParams(max_tokens=6), emit=("text", "tokens"))
        for name, ids in (("good", (5, 6, 7)), ("bad", (5, 99)))
    ]
    events = drive(engine, jobs, {}, 1)
    assert isinstance(events[RequestId("good")][-1], Finished)
    failed = events[RequestId("bad")][-1]
    assert isinstance(failed, Failed)
    assert "index out of range" in failed.error.message
    engine.close()


def test_logits_that_are_not_numbers_fail_that_request_alone(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    path = build_tiny_llama(tmp_path / "m")
    model = LlamaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.model.embed_tokens.weight[99] = float("nan")
    model.save_pretrained(path)
    engine = engine_of(path, overlap=True)
    jobs = [
        Job(RequestId(name), {"tokens": Tokens(ids=ids)}, SamplingParams(max_tokens=6), emit=("text", "tokens"))
        for name, ids in (("bad", (5, 99)), ("good", (5, 6, 7)))
    ]
    events = drive(engine, jobs, {}, 1)
    assert isinstance(events[RequestId("bad")][-1], Failed)
    assert isinstance(events[RequestId("good")][-1], Finished)
    engine.close()


def test_several_ranks_do_not_overlap(tiny: Path) -> None:
    from proto.deploy import ArParallelSpec
    from stages.ar.startup import _overlaps

    stage = ArStage(engine=ArEngineSpec(overlap=True), parallel=ArParallelSpec(tensor=2))
    context = LoadContext(StageName("t"), stage, LimitsSpec(), "cpu", (), lambda note, done: None)
    with pytest.raises(StartError, match=r"leave engine\.overlap out"):
        _overlaps(None, stage, context)
