"""`Omni`, the pipeline for code without an event loop: one prompt, several, a stream that is left, a failure among many."""

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
