"""RPC to replicas: all of them or some, with answers and errors by replica, and a deadline."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omni import CallFailed
from proto.errors import ErrorCode, InvalidRequest, StageFailed, StageUnavailable, UnknownModel
from tests.pipeline.harness import Running, deploy, fake_ar


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Running]:
    with Running(deploy({"thinker": fake_ar(replicas=3)})) as running:
        yield running


def test_a_call_reaches_every_replica_and_each_answer_is_its_own(pipeline: Running) -> None:
    answers = pipeline.call("thinker", "echo", {"a": [1, {"b": None}]})
    assert sorted(answers) == [0, 1, 2]
    assert all(answer["args"] == {"a": [1, {"b": None}]} for answer in answers.values())
    assert {index: answer["pid"] for index, answer in answers.items()} == {
        i: pipeline.pid("thinker", i) for i in answers
    }


def test_a_call_to_some_replicas_reaches_those_alone(pipeline: Running) -> None:
    before = pipeline.call("thinker", "echo")
    assert sorted(pipeline.call("thinker", "echo", replicas=[0, 2])) == [0, 2]
    after = pipeline.call("thinker", "echo")
    assert [after[i]["calls"] - before[i]["calls"] for i in range(3)] == [2, 1, 2]


def test_an_unknown_method_is_an_error_that_names_stage_replica_and_method(pipeline: Running) -> None:
    with pytest.raises(StageFailed, match="call 'sing' to stage thinker: replica 1: no method 'sing'"):
        pipeline.call("thinker", "sing", replicas=[1])


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan")])
def test_a_deadline_that_is_none_is_refused(pipeline: Running, timeout_s: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s"):
        pipeline.call("thinker", "echo", timeout_s=timeout_s)


def test_a_replica_that_is_not_there_is_named(pipeline: Running) -> None:
    with pytest.raises(StageFailed, match="thinker/7 is not ready"):
        pipeline.call("thinker", "echo", replicas=[0, 7])


def test_a_hung_engine_costs_its_asker_the_deadline_and_serves_again_afterwards(pipeline: Running) -> None:
    with pytest.raises(StageFailed, match=r"replica 1: (begun, and not done|not run)"):
        pipeline.call("thinker", "hang", {"seconds": 0.5}, replicas=[1], timeout_s=0.1)
    assert pipeline.call("thinker", "echo", replicas=[1])[1]["args"] == {}
    assert pipeline.run("still there").text == "echo: still there"


def test_a_call_whose_turn_comes_after_its_deadline_is_not_run_and_says_so(tmp_path: Path) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    for fifo in (begun, go):
        os.mkfifo(fifo)
    with Running(deploy({"thinker": fake_ar(use="tests.pipeline.engines:Offers", replicas=2)})) as pipeline:
        with ThreadPoolExecutor() as threads:
            paths = {"begun": str(begun), "go": str(go)}
            held = threads.submit(pipeline.call, "thinker", "hold", paths, replicas=[1], timeout_s=60.0)
            begun.read_text()  # the engine is in the call now
            with pytest.raises(CallFailed, match="replica 1: not run: the engine was busy") as failed:
                pipeline.call("thinker", "load_lora", {"name": "fox"}, timeout_s=2.0)
            assert sorted(failed.value.values) == [0]
            assert failed.value.info.code is ErrorCode.DEADLINE
            with pytest.raises(CallFailed, match="replica 1: not run"):
                pipeline.call("thinker", "load_lora", {"name": "owl"}, replicas=[1], timeout_s=0.01)
            go.write_text("on")
            assert held.result()[1]["loras"] == {}
        assert pipeline.call("thinker", "wake")[1]["loras"] == {}
        assert pipeline.replica("thinker", 0).loras == ("fox",)


def test_what_a_call_changes_is_known_to_the_master_before_its_answer() -> None:
    with Running(deploy({"thinker": fake_ar(use="tests.pipeline.engines:Offers", replicas=2)})) as pipeline:
        with pytest.raises(UnknownModel, match="no adapter 'fox'"):
            pipeline.run("a", stages={"thinker": {"lora": "fox"}})
        pipeline.call("thinker", "load_lora", {"name": "fox", "path": "/fox"}, replicas=[1])
        assert pipeline.replica("thinker", 1).loras == ("fox",)
        assert pipeline.run("a", stages={"thinker": {"lora": "fox"}}).text == "echo: a"
        pipeline.call("thinker", "sleep", replicas=[1])
        assert pipeline.replica("thinker", 1).state == "asleep"
        with pytest.raises(UnknownModel):
            pipeline.run("a", stages={"thinker": {"lora": "fox"}})
        assert pipeline.run("b").text == "echo: b"
        pipeline.call("thinker", "sleep", replicas=[0])
        with pytest.raises(StageUnavailable, match="asleep"):
            pipeline.run("c")
        pipeline.call("thinker", "wake")
        assert pipeline.run("d", stages={"thinker": {"lora": "fox"}}).text == "echo: d"


def test_an_answer_that_the_wire_cannot_carry_is_an_error_of_that_call() -> None:
    with Running(deploy({"thinker": fake_ar(use="tests.pipeline.engines:BadAnswers")})) as pipeline:
        with pytest.raises(StageFailed, match="set"):
            pipeline.call("thinker", "set")
        assert pipeline.run("unharmed").text == "echo: unharmed"
        assert pipeline.replica("thinker").epoch == 1
