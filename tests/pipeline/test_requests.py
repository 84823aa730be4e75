"""What a request costs others: nothing. Faults, refusals, skipped stages and full queues, with fake engines."""

from collections.abc import Iterator

import numpy as np
import pytest

from omni.outputs import RequestOutput, StageDone, StageProgress, StageStarted, TextDelta
from proto.deploy import Kind, LimitsSpec, Link
from proto.errors import InvalidRequest, OmniError, QueueFull, StageFailed
from tests.pipeline.harness import Running, deploy, fake_ar, fake_painter, text_to_image, until


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Running]:
    with Running(text_to_image()) as running:
        yield running


def test_events_come_in_order_and_the_last_one_is_the_whole(pipeline: Running) -> None:
    flight = pipeline.launch("a red star", num_inference_steps=3)
    done = flight.result()
    kinds = [(type(event), getattr(event, "stage", "")) for event in flight.events]
    assert kinds.index((StageStarted, "thinker")) < kinds.index((StageDone, "thinker"))
    assert kinds.index((StageDone, "thinker")) < kinds.index((StageStarted, "painter"))
    assert kinds[-2:] == [(StageDone, "painter"), (RequestOutput, "")]
    assert "".join(e.text for e in flight.events if isinstance(e, TextDelta)) == done.text == "echo: a red star"
    assert [e.total for e in flight.events if isinstance(e, StageProgress)][-1] == 3
    assert set(done.outputs) == {"thinker", "painter"}


def test_a_subset_of_outputs_gives_the_unneeded_stage_nothing_to_do(pipeline: Running) -> None:
    before = pipeline.until_idle()
    steps = pipeline.replica("painter").steps
    assert set(pipeline.run("words only", outputs=["thinker"]).outputs) == {"thinker"}
    after = pipeline.until_idle()
    assert pipeline.replica("painter").steps == steps
    assert after.edges == before.edges  # nothing crossed to it
    assert after.done == before.done + 1


def test_an_output_that_needs_a_hidden_stage_runs_it_and_does_not_show_it() -> None:
    stages = {
        "thinker": fake_ar(output=None),
        "painter": fake_painter(inputs={"prompt": Link(source="thinker.text")}),
    }
    with Running(deploy(stages)) as hidden:
        flight = hidden.launch("a star")
        assert set(flight.result().outputs) == {"painter"}
        assert not [event for event in flight.events if isinstance(event, TextDelta)]


@pytest.mark.parametrize(("prompt", "kind"), [("raise", StageFailed), ("refuse", InvalidRequest)])
def test_a_request_that_fails_in_a_stage_fails_alone(
    pipeline: Running, prompt: str, kind: type[StageFailed | InvalidRequest]
) -> None:
    good = [pipeline.launch(f"good {i}", seed=i) for i in range(10)]
    bad = [pipeline.launch(prompt) for _ in range(5)]
    more = [pipeline.launch(f"more {i}", seed=i) for i in range(10)]
    for flight in bad:
        error = flight.error()
        assert isinstance(error, kind)
        assert error.info.stage == "thinker"
    assert [f.result().text for f in (*good, *more)] == [
        f"echo: {word} {i}" for word in ("good", "more") for i in range(10)
    ]
    assert pipeline.until_idle().stages[0].replicas[0].epoch in (1, 2)  # nobody had to join again


def test_companies_do_not_change_pictures(pipeline: Running) -> None:
    alone = [pipeline.run(f"prompt {i}", seed=i).outputs["painter"] for i in range(8)]
    flights = [pipeline.launch(f"prompt {i}", seed=i) for i in range(8)]
    together = [flight.result().outputs["painter"] for flight in flights]
    assert [one.array.tobytes() for one in alone] == [one.array.tobytes() for one in together]  # type: ignore[union-attr]


def test_a_burst_beyond_the_limits_is_refused_at_once_and_exactly_the_admitted_succeed() -> None:
    limits = LimitsSpec(max_requests=3, max_queued=4)
    slow = fake_ar(options={"step_s": 0.02, "max_num_seqs": 1})
    with Running(deploy({"thinker": slow}, limits=limits)) as small:
        first = small.launch("first of all")
        first.wait_for(StageStarted)
        flights = [first, *(small.launch(f"number {i}") for i in range(50))]
        until(lambda: sum(flight.over for flight in flights) >= 44, "the refusals")
        outcomes = [flight._future.exception(30) for flight in flights]
        refused = [error for error in outcomes if error is not None]
        assert outcomes.count(None) == 7
        assert all(isinstance(error, QueueFull) for error in refused)
        assert all(error.info.retry_after_s for error in refused if isinstance(error, QueueFull))
        assert small.until_idle().done == 7
        assert small.run("again").text == "echo: again"


def test_a_prompt_that_breaks_the_engine_is_told_so_and_takes_no_other_process_with_it() -> None:
    stages = {"thinker": fake_ar(use="tests.pipeline.engines:Breaks"), "other": fake_ar(output=Kind.TEXT)}
    with Running(deploy(stages)) as pipeline:
        error = pipeline.launch("break", outputs=["thinker"]).error()
        assert isinstance(error, StageFailed)
        assert "the device is gone, as the test asked" in str(error)
        assert error.info.stage == "thinker"
        assert pipeline.run("unharmed", outputs=["other"]).text == "echo: unharmed"


def test_an_engine_that_exits_in_a_step_or_a_call_is_broken_and_comes_back() -> None:
    with Running(deploy({"thinker": fake_ar(use="tests.pipeline.engines:Leaves")})) as pipeline:
        for ask in (lambda: pipeline.launch("exit").result(), lambda: pipeline.call("thinker", "exit")):
            before = pipeline.replica("thinker").epoch
            with pytest.raises(OmniError, match=r"SystemExit: the library leaves|went away"):
                ask()
            until(lambda old=before: any(r.epoch > old for r in pipeline.stage("thinker").replicas), "the next one")
            pipeline.until_ready()
            assert pipeline.run("unharmed").text == "echo: unharmed"


@pytest.mark.parametrize("prompt", ["chunk", "result"])
def test_an_output_too_large_for_the_wire_fails_its_request_alone(prompt: str) -> None:
    with Running(deploy({"thinker": fake_ar(use="tests.pipeline.engines:Talker")})) as pipeline:
        error = pipeline.launch(prompt).error()
        assert isinstance(error, StageFailed)
        assert "the limit is" in str(error)
        assert error.info.stage == "thinker"
        assert pipeline.run("unharmed").text == "echo: unharmed"
        assert pipeline.until_idle().stages[0].replicas[0].epoch == 1


def test_an_input_too_large_for_the_wire_fails_its_request_alone(pipeline: Running) -> None:
    error = pipeline.launch("a star", stages={"thinker": {"extra": {"trick": "a" * (17 << 20)}}}).error()
    assert isinstance(error, InvalidRequest)
    assert "at most" in str(error)
    assert pipeline.run("unharmed", outputs=["thinker"]).text == "echo: unharmed"
    pipeline.until_idle()


def test_call_arguments_too_large_for_the_wire_fail_their_call_alone(pipeline: Running) -> None:
    with pytest.raises(StageFailed, match="the limit is"):
        pipeline.call("thinker", "echo", {"a": "a" * (2 << 20)})
    assert pipeline.call("thinker", "echo")[0]["args"] == {}


def test_a_tensor_beyond_the_frame_limit_fails_its_request_alone_wherever_it_comes_from() -> None:
    small = LimitsSpec(max_frame_bytes=150_000, max_images=1000)
    inputs = {"kv": Link(source="thinker.kv")}
    stages = {
        "thinker": fake_ar(use="tests.pipeline.engines:BigKv", options={"tensors": 2, "nbytes": 200_000}),
        "painter": fake_painter(use="tests.pipeline.engines:Witness", inputs=inputs),
        "other": fake_painter(),
    }
    with Running(deploy(stages, limits=small)) as pipeline:
        too_large = [
            pipeline.launch("kv", outputs=["painter"]),
            pipeline.launch("n", outputs=["other"], num_images=1000),
            pipeline.launch("in", outputs=["other"], images=np.zeros((1, 300, 300, 3), np.uint8)),
        ]
        for flight in too_large:
            assert "limits.max_frame_bytes is 150000" in str(flight.error())
        assert pipeline.run("unharmed", outputs=["thinker", "other"]).images
        pipeline.until_idle()
        assert sorted(r.epoch for stage in pipeline.status().stages for r in stage.replicas) == [1, 2, 3]
