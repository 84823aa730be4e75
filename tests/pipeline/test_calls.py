"""RPC to replicas: all of them or some, with answers and errors by replica, and a deadline."""

from collections.abc import Iterator

import pytest

from proto.errors import StageFailed
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


def test_a_replica_that_is_not_there_is_named(pipeline: Running) -> None:
    with pytest.raises(StageFailed, match="thinker/7 is not ready"):
        pipeline.call("thinker", "echo", replicas=[0, 7])


def test_a_hung_engine_costs_its_asker_the_deadline_and_serves_again_afterwards(pipeline: Running) -> None:
    with pytest.raises(StageFailed, match="replica 1: no answer before the deadline"):
        pipeline.call("thinker", "hang", {"seconds": 0.5}, replicas=[1], timeout_s=0.1)
    assert pipeline.call("thinker", "echo", replicas=[1])[1]["args"] == {}
    assert pipeline.run("still there").text == "echo: still there"


def test_an_answer_that_the_wire_cannot_carry_is_an_error_of_that_call() -> None:
    with Running(deploy({"thinker": fake_ar(use="tests.pipeline.engines:BadAnswers")})) as pipeline:
        with pytest.raises(StageFailed, match="set"):
            pipeline.call("thinker", "set")
        assert pipeline.run("unharmed").text == "echo: unharmed"
        assert pipeline.replica("thinker").epoch == 1
