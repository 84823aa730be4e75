"""A running request is told something new: from its caller to the stage and back, through real processes."""

import pytest

from omni.blocking import Omni
from omni.outputs import ImageOutput, RequestOutput, StagePaused, StageProgress, StageUpdated, TextDelta
from omni.running import RunningRequest
from proto.errors import InvalidRequest
from proto.messages import UpdateState
from tests.fakes.engines import SIZE, drawing
from tests.pipeline.harness import Running, deploy, fake_ar, fake_painter, text_to_image

STARTED, COMPLETED, REFUSED = UpdateState.STARTED, UpdateState.COMPLETED, UpdateState.REFUSED
HOLD = {"step_s": 0.002, "hold_at": 2}
"""The stage stands still after two steps until it hears of an update, so that none comes too late."""


def updates(events: list[object]) -> list[tuple[str, UpdateState]]:
    return [(event.event, event.state) for event in events if isinstance(event, StageUpdated)]


async def to_its_end(running: RunningRequest) -> list[object]:
    return [event async for event in running]


@pytest.mark.parametrize("transition", [0, 3])
def test_an_update_changes_what_is_drawn_and_is_acknowledged_in_the_stream(transition: int) -> None:
    async def drawn(running: Running) -> list[object]:
        events: list[object] = []
        request = running.omni.stream("a cat", num_inference_steps=9, seed=3)
        async for event in request:
            events.append(event)
            if isinstance(event, StageProgress) and len(events) == 3:
                named = await request.update("a dog", transition_steps=transition, event="mine")
                assert named == "mine"
                assert await request.update("a dog", transition_steps=transition, event="mine") == "mine"
                with pytest.raises(InvalidRequest, match="another update"):
                    await request.update("a cow", event="mine")
        assert (await request.acknowledged(named)).state is COMPLETED
        assert (await request.acknowledged(named, started=True)).state is STARTED
        assert (await request.acknowledged(await request.update("too late"))).reason
        return events

    with Running(deploy({"painter": fake_painter(options=HOLD)})) as running:
        events = running.do(drawn(running))
    assert updates(events) == [("mine", STARTED), ("mine", COMPLETED)]
    started, completed = (event for event in events if isinstance(event, StageUpdated))
    assert started.step is not None
    assert completed.step == started.step + max(1, transition)
    assert [event.step for event in events if isinstance(event, StageProgress)][-1] == 9
    output = events[-1].outputs["painter"]  # type: ignore[attr-defined]
    assert isinstance(output, ImageOutput)
    assert output.array.tobytes() == drawing(b"a dog", 3)
    assert output.array.shape == (1, SIZE, SIZE, 3)


def test_updates_before_the_stage_has_the_request_wait_for_it() -> None:
    """The painter waits for the words of the thinker; its new prompt is there when it begins."""

    async def drawn(running: Running) -> list[object]:
        request = running.omni.stream("a cat", stages={"painter": {"num_inference_steps": 3}})
        events: list[object] = [await anext(request)]
        await request.update("a dog")
        return events + await to_its_end(request)

    with Running(text_to_image({"options": {"step_s": 0.05}}, {"options": HOLD})) as running:
        events = running.do(drawn(running))
    assert [state for _, state in updates(events)] == [STARTED, COMPLETED]
    assert events[-1].outputs["painter"].array.tobytes() == drawing(b"a dog", 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("use", ["FakeDiffusion", "DeafDiffusion"])
def test_what_a_stage_does_not_take_is_refused_with_a_reason_and_the_request_goes_on(use: str) -> None:
    async def drawn(running: Running) -> list[object]:
        request = running.omni.stream("a cat", num_inference_steps=1000)
        events: list[object] = [await anext(request)]
        await request.update("refuse")
        await request.update(close=True)
        while len(updates(events)) < 2 or not isinstance(events[-1], StageProgress):
            events.append(await anext(request))
        await request.aclose()
        return events

    with Running(
        deploy({"painter": fake_painter(use=f"tests.fakes.engines:{use}", options={"step_s": 0.02})})
    ) as running:
        events = running.do(drawn(running))
    refused = {event.event: event for event in events if isinstance(event, StageUpdated)}
    assert [one.state for one in refused.values()] == [REFUSED, REFUSED]
    expected = "as the test asked" if use == "FakeDiffusion" else "takes no updates"
    assert expected in refused["u1"].reason  # type: ignore[index]
    assert "no stage of it generates text" in refused["u2"].reason  # type: ignore[index]


def test_a_request_that_ends_refuses_what_it_has_not_done() -> None:
    """A transition of more steps than are left has no end."""

    async def drawn(running: Running) -> list[object]:
        request = running.omni.stream("a cat", num_inference_steps=9)
        events: list[object] = [await anext(request)]
        event = await request.update("a dog", transition_steps=900)
        waiting = request.acknowledged(event)
        events += await to_its_end(request)
        assert (await waiting).state is REFUSED
        return events

    with Running(deploy({"painter": fake_painter(options=HOLD)})) as running:
        events = running.do(drawn(running))
    assert updates(events) == [("u1", STARTED), ("u1", REFUSED)]
    assert isinstance(events[-1], RequestOutput)


def test_a_resumable_text_takes_turns_with_its_caller() -> None:
    async def said(running: Running) -> list[object]:
        events: list[object] = []
        request = running.omni.stream("one", resumable=True)
        more = iter(["two three", None])
        async for event in request:
            events.append(event)
            if isinstance(event, StagePaused):
                word = next(more)
                await request.update(word, close=word is None)
        return events

    with Running(deploy({"thinker": fake_ar()})) as running:
        events = running.do(said(running))
    assert events[-1].text == "echo: one two three"  # type: ignore[attr-defined]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "echo: one two three"
    assert [state for _, state in updates(events)] == [STARTED, COMPLETED] * 2
    assert [event.usage.completion_tokens for event in events if isinstance(event, StagePaused)] == [2, 4]


def test_code_without_an_event_loop_can_update_too() -> None:
    spec = deploy({"painter": fake_painter(options=HOLD)})
    with Omni(spec, progress=False) as omni:
        request = omni.stream("a cat", num_inference_steps=5)
        events: list[object] = [next(request)]
        assert request.update("a dog") == "u1"
        events += list(request)
        assert updates(events) == [("u1", STARTED), ("u1", COMPLETED)]
        assert events[-1].outputs["painter"].array.tobytes() == drawing(b"a dog", 0)  # type: ignore[attr-defined]
