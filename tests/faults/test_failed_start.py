"""A pipeline that cannot start says why, in words that name the stage, and leaves nothing behind."""

import os
import signal

import pytest

from proto.deploy import Kind, StageSpec
from proto.errors import StartError
from proto.params import SamplingParams
from tests.pipeline.harness import ROOT, Running, deploy, fake_ar, text_to_image, until
from tests.pipeline.raw_stage import RawPeer

pytestmark = pytest.mark.usefixtures("no_leftovers")


def start_error(stage: StageSpec) -> str:
    with pytest.raises(StartError) as caught:
        Running(deploy({"thinker": stage, "other": fake_ar(output=Kind.TEXT)}))
    return str(caught.value)


def test_a_load_that_fails_carries_the_stages_own_reason() -> None:
    text = start_error(fake_ar(options={"load": "fail"}))
    assert "thinker/0" in text
    assert "this engine cannot load, as the test asked" in text


def test_a_process_that_dies_while_it_loads_is_a_failed_start() -> None:
    plan = deploy({"thinker": fake_ar(options={"load": "hang"})})
    with Running(plan, wait=False) as pipeline:
        until(lambda: any("pretending" in r.note for r in pipeline.stage("thinker").replicas), "it loads")
        failed = pipeline.soon(pipeline.omni.engine.wait_ready())
        os.kill(pipeline.pid("thinker"), signal.SIGKILL)
        with pytest.raises(StartError, match=r"thinker/0.*killed by signal 9"):
            failed.result(60)


def test_a_load_in_which_a_library_exits_is_a_failed_start() -> None:
    text = start_error(fake_ar(use="tests.pipeline.engines:Leaves", options={"load": "exit"}))
    assert "thinker/0" in text
    assert "SystemExit: the library leaves, as the test asked" in text


@pytest.mark.parametrize("use", ["no.such.module:Engine", "tests.fakes.engines:NoSuchEngine"])
def test_an_engine_that_cannot_be_imported_is_named(use: str) -> None:
    text = start_error(fake_ar(use=use))
    assert "engine.use" in text
    assert use in text


def test_defaults_that_the_model_does_not_take_are_named_with_those_that_it_does() -> None:
    text = start_error(fake_ar(use="tests.pipeline.engines:Picky", defaults=SamplingParams(temperature=0.5)))
    assert "stages.thinker.defaults.temperature" in text
    assert "max_tokens" in text


def test_a_process_that_cannot_even_start_is_named() -> None:
    text = start_error(fake_ar(env={"PYTHONPATH": "", "PYTHONHOME": str(ROOT)}))
    assert "thinker/0" in text
    assert "exit status" in text


def test_a_load_that_stalls_fails_by_its_stall() -> None:
    with pytest.raises(StartError, match=r"thinker/0.*load stalled.*pretending to load"):
        Running(deploy({"thinker": fake_ar(options={"load": "hang"})}, load_stall=1.0))


def test_a_port_that_is_taken_is_named() -> None:
    with (
        Running(deploy({"thinker": fake_ar()})) as pipeline,
        pytest.raises(StartError, match=r"master\.bind.*in use"),
    ):
        Running(deploy({"thinker": fake_ar()}, bind=pipeline.url))


def test_the_same_port_can_be_bound_again_at_once() -> None:
    with Running(text_to_image()) as pipeline:
        url = pipeline.url
        pipeline.run("a star")
    for _ in range(2):
        with Running(text_to_image(bind=url)) as pipeline:
            assert pipeline.url == url
            assert pipeline.run("a star").images


def test_a_port_is_free_again_after_a_failed_start() -> None:
    with RawPeer("tcp://127.0.0.1:1"), pytest.raises(StartError):
        Running(deploy({"thinker": fake_ar(options={"load": "fail"})}, bind="tcp://127.0.0.1:25571"))
    with Running(deploy({"thinker": fake_ar()}, bind="tcp://127.0.0.1:25571")) as pipeline:
        assert pipeline.run("now").text == "echo: now"


def test_the_lines_of_a_start_say_what_is_waited_for() -> None:
    with Running(text_to_image(painter={"replicas": 2})) as pipeline:
        assert any(line.startswith("waiting for stage painter (0 of 2 replicas)") for line in pipeline.lines)
