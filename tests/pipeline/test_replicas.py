"""Several replicas of a stage: all used, none of the requests lost, coming and going while the pipeline runs."""

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni.outputs import StageProgress, StageStarted
from proto.deploy import Balance
from tests.pipeline.harness import Running, omni_stage, text_to_image, until

REQUESTS = 200


@pytest.mark.parametrize("balance", list(Balance))
def test_two_hundred_requests_through_two_replicas_lose_none_and_use_both(balance: Balance) -> None:
    two = {"replicas": 2, "balance": balance, "max_in_flight": 8}
    with Running(text_to_image(painter=two)) as pipeline:
        flights = [pipeline.launch(f"prompt {i}", seed=i, num_inference_steps=3) for i in range(REQUESTS)]
        done = [flight.result() for flight in flights]
        assert [one.text for one in done] == [f"echo: prompt {i}" for i in range(REQUESTS)]
        assert [one.outputs["painter"].seeds for one in done] == [(i,) for i in range(REQUESTS)]  # type: ignore[union-attr]
        assert len({one.request for one in done}) == REQUESTS
        status = pipeline.until_idle()
        assert (status.done, status.failed) == (REQUESTS, {})
        assert all(replica.steps > 0 for replica in pipeline.stage("painter").replicas)


def test_requests_of_one_affinity_go_to_one_replica() -> None:
    with Running(text_to_image(painter={"replicas": 2, "balance": Balance.ROUND_ROBIN})) as pipeline:
        for _ in range(6):
            pipeline.run("a star", affinity="mine")
        pipeline.until_idle()
        steps = Counter(bool(replica.steps) for replica in pipeline.stage("painter").replicas)
        assert steps == {True: 1, False: 1}


@pytest.fixture(scope="module")
def growing() -> Iterator[Running]:
    painter = {"max_replicas": 3, "options": {"step_s": 0.02}, "balance": Balance.LEAST_LOADED}
    with Running(text_to_image(painter=painter)) as pipeline:
        yield pipeline


def test_a_replica_that_joins_at_run_time_takes_a_free_slot_and_gets_work(growing: Running, tmp_path: Path) -> None:
    with omni_stage(growing.url, "painter", tmp_path / "log", "--devices", "cpu") as process:
        until(lambda: growing.stage("painter").ready == 2, "the second painter")
        assert growing.replica("painter", 1).devices == ("cpu",)
        flights = [growing.launch(f"prompt {i}", num_inference_steps=5) for i in range(10)]
        for flight in flights:
            flight.result()
        growing.until_idle()
        assert growing.replica("painter", 1).steps > 0
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_a_replica_that_is_told_to_leave_finishes_its_requests_first(growing: Running, tmp_path: Path) -> None:
    until(lambda: len(growing.stage("painter").replicas) == 1, "one painter alone")
    with omni_stage(growing.url, "painter", tmp_path / "log", "--replica", "2") as process:
        until(lambda: growing.stage("painter").ready == 2, "the second painter")
        failed_before = growing.status().failed
        flights = [growing.launch(f"prompt {i}", seed=i, num_inference_steps=20) for i in range(10)]
        for flight in flights:
            flight.wait_for(StageProgress, "painter")
        assert growing.replica("painter", 2).in_flight > 0
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert [flight.result().text for flight in flights] == [f"echo: prompt {i}" for i in range(10)]
        assert growing.until_idle().failed == failed_before
        assert [replica.replica for replica in growing.stage("painter").replicas] == [0]


def test_replicas_that_come_and_go_under_load_lose_no_request(growing: Running, tmp_path: Path) -> None:
    until(lambda: len(growing.stage("painter").replicas) == 1, "one painter alone")
    failed_before = growing.status().failed
    flights = []
    for turn in range(4):
        with omni_stage(growing.url, "painter", tmp_path / f"log{turn}") as process:
            until(lambda: growing.stage("painter").ready == 2, "the second painter")
            flights += [growing.launch(f"prompt {turn} {i}") for i in range(40)]
            process.signal(signal.SIGTERM)
            flights += [growing.launch(f"prompt {turn} {i}") for i in range(40)]
            assert process.wait() == 0, process.output
    for flight in flights:
        assert flight.result().images
    assert growing.until_idle().failed == failed_before


def test_a_second_signal_leaves_at_once(growing: Running, tmp_path: Path) -> None:
    until(lambda: len(growing.stage("painter").replicas) == 1, "one painter alone")
    with omni_stage(growing.url, "painter", tmp_path / "log", "--replica", "1") as process:
        until(lambda: growing.stage("painter").ready == 2, "the second painter")
        flights = [growing.launch("long", num_inference_steps=1000) for _ in range(2)]
        for flight in flights:
            flight.wait_for(StageStarted, "painter")
        process.signal(signal.SIGTERM)
        until(lambda: growing.replica("painter", 1).state == "draining", "it drains")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        for flight in flights:
            flight.leave()
        growing.until_idle()


def test_a_stage_whose_slots_are_taken_is_told_so_and_waits(growing: Running, tmp_path: Path) -> None:
    with omni_stage(growing.url, "thinker", tmp_path / "log") as process:
        line = process.until_says("taken")
        assert "stages.thinker.max_replicas" in line
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_a_slot_that_the_deploy_does_not_have_is_refused_for_good(growing: Running, tmp_path: Path) -> None:
    with omni_stage(growing.url, "painter", tmp_path / "log", "--replica", "9") as process:
        assert process.wait() == 2
        assert "slots 0..2, not 9" in process.output
