"""An abort reaches every stage that has the request, ends it at a step boundary, and frees its place."""

from collections.abc import Iterator

import pytest

from omni.outputs import StageProgress, StageStarted
from proto.deploy import LimitsSpec
from tests.pipeline.harness import Running, text_to_image, until

STEP_S = 0.05


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Running]:
    slow = {"options": {"step_s": STEP_S, "max_num_seqs": 1}, "max_in_flight": 2}
    with Running(text_to_image(painter=slow, limits=LimitsSpec(max_requests=8))) as running:
        yield running


def test_a_caller_that_leaves_the_iteration_stops_the_stage_within_one_further_step(pipeline: Running) -> None:
    flight = pipeline.launch("a star", num_inference_steps=1000)
    flight.wait_for(StageProgress, "painter")
    flight.leave()
    status = pipeline.until_idle()
    assert status.failed["aborted"] >= 1
    steps = pipeline.replica("painter").steps
    pipeline.until_idle()  # two more beats
    assert pipeline.replica("painter").steps == steps
    seen = max(event.step for event in flight.events if isinstance(event, StageProgress))
    assert steps - seen <= 4  # the step under way when the caller left, and those that overlap the abort's travel


def test_an_abort_ends_a_request_that_waits_in_a_stages_queue_and_one_that_waits_for_a_place(pipeline: Running) -> None:
    first = pipeline.launch("first", num_inference_steps=1000)
    first.wait_for(StageStarted, "painter")
    others = [pipeline.launch(f"other {i}", num_inference_steps=1000) for i in range(4)]
    until(lambda: pipeline.replica("painter").in_flight == 2, "one more in the painter's queue")
    until(lambda: pipeline.stage("painter").waiting == 3, "three held back by the master")
    for flight in (*others, first):
        flight.leave()
    pipeline.until_idle()
    assert not any(isinstance(e, StageStarted) and e.stage == "painter" for flight in others for e in flight.events)


def test_an_abort_reaches_the_first_stage_too(pipeline: Running) -> None:
    flight = pipeline.launch("hang")
    flight.wait_for(StageStarted, "thinker")
    assert pipeline.replica("thinker").in_flight == 1
    flight.leave()
    pipeline.until_idle()


def test_after_an_abort_the_next_request_runs_at_once_and_is_right(pipeline: Running) -> None:
    alone = pipeline.run("same", seed=5)
    for _ in range(5):
        gone = pipeline.launch("gone", num_inference_steps=1000)
        gone.wait_for(StageProgress, "painter")
        gone.leave()
        after = pipeline.run("same", seed=5)
        assert after.outputs["painter"].array.tobytes() == alone.outputs["painter"].array.tobytes()  # type: ignore[union-attr]
    pipeline.until_idle()
