"""`Omni`, the pipeline for code without an event loop: one prompt, several, a stream that is left, a failure among many."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from omni import Omni
from omni.outputs import RequestOutput, StageProgress, TextDelta
from proto.errors import InvalidRequest, ShuttingDown, StageFailed
from tests.pipeline.harness import text_to_image, until


@pytest.fixture(scope="module")
def omni() -> Iterator[Omni]:
    with Omni(text_to_image(painter={"options": {"step_s": 0.01}}), progress=False) as pipeline:
        yield pipeline


def test_one_prompt_gives_one_output_with_text_pictures_and_times(omni: Omni) -> None:
    done = omni.generate("a red star", seed=3, num_inference_steps=3)
    assert done.text == "echo: a red star"
    assert done.images[0].size == (8, 8)
    assert done.total_s > 0
    assert done.stages["painter"].timings.run_s > 0  # type: ignore[index]


def test_several_prompts_give_as_many_outputs_in_their_order(omni: Omni) -> None:
    done = omni.generate([f"prompt {i}" for i in range(20)], seed=1)
    assert [one.text for one in done] == [f"echo: prompt {i}" for i in range(20)]


def test_a_failure_among_many_is_raised_after_the_others_have_ended(omni: Omni) -> None:
    before = omni.status().done
    with pytest.raises(StageFailed, match="as the test asked"):
        omni.generate(["one", "raise", "two"])
    assert omni.status().done == before + 2


def test_a_wrong_parameter_is_named_with_the_nearest_right_one(omni: Omni) -> None:
    with pytest.raises(InvalidRequest, match="num_inference_steps"):
        omni.generate("a star", num_inference_step=3)


def test_a_stream_gives_events_and_leaving_it_aborts_the_request(omni: Omni) -> None:
    events = list(omni.stream("a red star"))
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "echo: a red star"
    assert isinstance(events[-1], RequestOutput)
    for event in omni.stream("a star", num_inference_steps=1000):
        if isinstance(event, StageProgress):
            break
    until(lambda: omni.status().running == 0, "it is aborted")


def test_a_bar_is_shown_and_harms_nothing(omni: Omni) -> None:
    omni._progress = True
    assert len(omni.generate(["one", "two"])) == 2
    omni._progress = False


def test_closing_twice_is_harmless_and_afterwards_a_call_says_so() -> None:
    pipeline = Omni(text_to_image(), progress=False)
    pipeline.close()
    pipeline.close()
    with pytest.raises(ShuttingDown, match="closed"):
        pipeline.generate("too late")


def test_closing_from_several_threads_at_once_ends_all_of_them_and_what_runs() -> None:
    omni = Omni(text_to_image(), progress=False)
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            omni.generate("hang")
        except ShuttingDown as error:
            failed.append(error)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    closing = [threading.Thread(target=omni.close) for _ in range(4)]
    for thread in asking:
        thread.start()
    until(lambda: omni.status().running == 4, "they run")
    for thread in closing:
        thread.start()
    for thread in (*asking, *closing):
        thread.join(60)
        assert not thread.is_alive()
    assert len(failed) == 4


def test_a_fork_of_the_process_is_told_that_the_pipeline_is_not_its_own(omni: Omni) -> None:
    child = os.fork()
    if not child:  # pragma: no cover - another process
        signal.alarm(30)
        try:
            omni.generate("x")
        except ShuttingDown:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert omni.generate("still here").text == "echo: still here"
