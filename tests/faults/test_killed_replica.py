"""SIGKILL of a stage process: its requests are told or run elsewhere, everybody else's go on, and it comes back."""

import contextlib
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from omni.outputs import StageProgress, StageStarted, TextDelta
from proto.errors import OmniError, ReplicaLost, StageUnavailable
from tests.pipeline.harness import Running, deploy, fake_ar, omni_stage, text_to_image, until, until_gone

pytestmark = pytest.mark.usefixtures("no_leftovers")
SLOW = {"options": {"step_s": 0.02}}


@pytest.fixture
def stays_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started again."""
    monkeypatch.setattr("launch.local.RESTART_DELAYS_S", ())


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until_gone([pid])


def test_its_requests_get_an_error_that_names_the_stage_and_those_in_other_stages_finish(stays_down: None) -> None:
    with Running(text_to_image({"options": {"step_s": 0.02}}, SLOW)) as pipeline:
        drawing = [pipeline.launch("a star", num_inference_steps=1000) for _ in range(3)]
        for flight in drawing:
            flight.wait_for(StageProgress, "painter")
        thinking = pipeline.launch("hang", outputs=["thinker"])
        words = pipeline.launch(" ".join("word" for _ in range(200)), outputs=["thinker"])
        words.wait_for(TextDelta)
        kill(pipeline.pid("painter"))
        for flight in drawing:
            error = flight.error()
            assert isinstance(error, ReplicaLost | StageUnavailable)
            assert error.info.stage == "painter"
            assert error.info.retry_after_s
            assert "killed by signal 9" in str(error)
        assert words.result().text == "echo: " + " ".join("word" for _ in range(200))
        assert not thinking.over
        thinking.leave()
        pipeline.until_idle()
        assert not pipeline.status().ready
        unavailable = pipeline.launch("a star").error()
        assert isinstance(unavailable, StageUnavailable)
        assert unavailable.info.stage == "painter"


def test_requests_of_which_nothing_was_seen_run_again_on_the_other_replica(stays_down: None) -> None:
    with Running(text_to_image(painter={"replicas": 2, **SLOW})) as pipeline:
        flights = [pipeline.launch(f"prompt {i}", seed=i, num_inference_steps=50) for i in range(10)]
        for flight in flights:
            flight.wait_for(StageStarted, "painter")
        kill(pipeline.pid("painter", 0))
        assert [flight.result().text for flight in flights] == [f"echo: prompt {i}" for i in range(10)]
        status = pipeline.until_idle()
        assert (status.done, status.failed) == (10, {})


def test_a_request_whose_words_were_seen_is_not_run_twice() -> None:
    with Running(deploy({"thinker": fake_ar(replicas=2, **SLOW)})) as pipeline:
        flights = [pipeline.launch(" ".join("word" for _ in range(150))) for _ in range(4)]
        for flight in flights:
            flight.wait_for(TextDelta)
        kill(pipeline.pid("thinker", 1))
        outcomes = [flight._future.exception(60) for flight in flights]
        lost = [error for error in outcomes if error is not None]
        assert len(lost) == 2
        assert all(isinstance(error, ReplicaLost) and error.info.stage == "thinker" for error in lost)


def test_it_is_started_again_however_young_it_was_with_a_new_epoch_and_the_pipeline_is_ready_again() -> None:
    with Running(text_to_image(painter=SLOW)) as pipeline:
        before = pipeline.replica("painter")
        flight = pipeline.launch("a star", num_inference_steps=1000)
        flight.wait_for(StageProgress, "painter")
        kill(before.pid)
        assert isinstance(flight.error(), OmniError)
        pipeline.until_ready()
        after = pipeline.replica("painter")
        assert after.epoch > before.epoch
        assert after.pid != before.pid
        assert pipeline.run("a star", seed=1).images
        assert pipeline.until_idle().uptime_s > 0


def test_a_replica_that_is_started_again_has_the_adapters_that_calls_gave_it() -> None:
    with Running(deploy({"thinker": fake_ar(use="tests.pipeline.engines:Offers")})) as pipeline:
        pipeline.call("thinker", "load_lora", {"name": "fox", "path": "/fox"})
        before = pipeline.replica("thinker").epoch
        kill(pipeline.pid("thinker"))
        until(
            lambda: any(r.epoch > before and r.loras == ("fox",) for r in pipeline.stage("thinker").replicas),
            "it has its adapter again",
        )
        assert pipeline.run("a", stages={"thinker": {"lora": "fox"}}).text == "echo: a"


def test_a_process_that_ends_by_itself_at_work_is_started_again() -> None:
    with Running(deploy({"thinker": fake_ar()})) as pipeline:
        error = pipeline.launch("leave").error()
        assert "exit status 7" in str(error)
        pipeline.until_ready()
        assert pipeline.run("back").text == "echo: back"


def test_it_may_die_many_times_and_is_not_started_again_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("launch.local.RESTART_DELAYS_S", (0.0, 0.0))
    with Running(deploy({"thinker": fake_ar()})) as pipeline:
        for _ in range(2):
            epoch = pipeline.replica("thinker").epoch
            kill(pipeline.pid("thinker"))
            until(partial(_is_newer, pipeline, epoch), "the next one")  # not the killed one, if its end is not seen yet
        kill(pipeline.pid("thinker"))
        until(lambda: not pipeline.stage("thinker").replicas, "it is gone")
        assert isinstance(pipeline.launch("nobody").error(), StageUnavailable)


def _is_newer(pipeline: Running, epoch: int) -> bool:
    return any(one.epoch > epoch and one.state == "ready" for one in pipeline.stage("thinker").replicas)


def test_a_killed_worker_that_nobody_here_watches_is_given_up_after_its_silence(tmp_path: Path) -> None:
    plan = deploy({"thinker": fake_ar(local=0)}, suspect_after=0.5, dead_after=1.0)
    with Running(plan, wait=False) as pipeline, omni_stage(pipeline.url, "thinker", tmp_path / "log") as process:
        pipeline.until_ready()
        flight = pipeline.launch("hang")
        flight.wait_for(StageStarted, "thinker")
        kill(process.pid)
        error = flight.error()
        assert isinstance(error, ReplicaLost | StageUnavailable)
        assert error.info.stage == "thinker"
        until(lambda: not pipeline.stage("thinker").replicas, "its slot is free")


@pytest.fixture
def frozen() -> Iterator[Running]:
    plan = deploy({"thinker": fake_ar(replicas=2)}, suspect_after=0.5, dead_after=30.0)
    with Running(plan) as pipeline:
        pid = pipeline.pid("thinker", 1)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pipeline
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_a_frozen_worker_gets_no_new_work_and_serves_again_when_it_thaws(frozen: Running) -> None:
    pid = frozen.pid("thinker", 1)
    until(lambda: frozen.replica("thinker", 1).state == "suspect", "it is suspected")
    assert [frozen.run(f"prompt {i}").text for i in range(5)] == [f"echo: prompt {i}" for i in range(5)]
    os.kill(pid, signal.SIGCONT)
    until(lambda: frozen.replica("thinker", 1).state == "ready", "it is trusted again")
    assert frozen.pid("thinker", 1) == pid
