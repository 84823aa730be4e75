"""Updates of running requests, as the master handles them: promises of `omni.updates` and `omni.update_planning`."""

import pytest

from omni.events import PartArrived, UpdateAsked
from omni.plan import RequestPlan, TaskKey
from omni.request import GenerateRequest, UpdateRequest
from omni.update_planning import Refused, plan_update
from omni.updates import MAX_WAITING
from proto.deploy import Deploy, LimitsSpec
from proto.errors import InvalidRequest
from proto.ids import EventId, RequestId, StageName
from proto.messages import (
    ChatMessage,
    Chunk,
    MoreInput,
    PromptChange,
    Submit,
    Text,
    Tokens,
    Update,
    Updated,
    UpdateState,
)
from tests.unit.drive import Master, Stage, ar, deploy, diffusion

PAINTER = StageName("painter")
STARTED, COMPLETED, REFUSED = UpdateState.STARTED, UpdateState.COMPLETED, UpdateState.REFUSED


def alone(limits: LimitsSpec | None = None, replicas: int = 1) -> Master:
    return Master(deploy(limits, painter=diffusion(replicas=replicas)))


def ask(master: Master, request: RequestId, event: str, prompt: str = "a dog", stage: StageName = PAINTER) -> None:
    master.handle(UpdateAsked(request, EventId(event), TaskKey(stage), PromptChange(prompt=prompt)))


def answer(stage: Stage, request: RequestId, event: str, state: UpdateState, reason: str = "") -> None:
    part = Updated(event=EventId(event), state=state, reason=reason)
    stage.send(Chunk(request=request, epoch=stage.epoch, seq=stage.seq(request), output="", part=part))


def heard(master: Master, request: RequestId) -> list[tuple[str, UpdateState]]:
    parts = [news.part for news in master.news[request] if isinstance(news, PartArrived)]
    return [(part.event, part.state) for part in parts if isinstance(part, Updated)]


# --- on their way -----------------------------------------------------------------------------------------------------


def test_an_update_goes_to_the_replica_that_runs_the_request_and_its_answers_come_back() -> None:
    master = alone(replicas=2)
    painters = [master.join("painter"), master.join("painter")]
    first, second = master.submit(), master.submit()
    at = {request: next(p for p in painters if request in p.submits()) for request in (first, second)}
    ask(master, second, "u1")
    (update,) = at[second].took(Update)
    assert (update.request, update.event, update.change) == (second, "u1", PromptChange(prompt="a dog"))
    assert not at[first].took(Update)
    answer(at[second], second, "u1", STARTED)
    answer(at[second], second, "u1", COMPLETED)
    assert heard(master, second) == [("u1", STARTED), ("u1", COMPLETED)]
    for request in (first, second):
        at[request].draws(request)
        assert master.succeeded(request)
    assert heard(master, first) == []
    master.assert_idle()


def test_updates_of_a_waiting_request_follow_it_in_their_order() -> None:
    master = alone(LimitsSpec(max_requests=1))
    painter = master.join("painter")
    first, second = master.submit(), master.submit()
    assert painter.submits() == [first]
    ask(master, second, "u1", "one")
    ask(master, second, "u2", "two")
    assert not painter.took(Update)
    painter.draws(first)
    kinds = [type(message) for message in painter.inbox if isinstance(message, Submit | Update)]
    assert kinds == [Submit, Update, Update]
    assert [update.event for update in painter.took(Update)] == ["u1", "u2"]


def test_an_event_that_comes_twice_is_sent_once() -> None:
    master = alone()
    painter = master.join("painter")
    request = master.submit()
    ask(master, request, "u1")
    ask(master, request, "u1")
    answer(painter, request, "u1", COMPLETED)
    ask(master, request, "u1")
    assert len(painter.took(Update)) == 1
    assert heard(master, request) == [("u1", COMPLETED)]


def test_answers_that_nobody_asked_for_are_dropped() -> None:
    master = alone()
    painter = master.join("painter")
    request = master.submit()
    ask(master, request, "u1")
    answer(painter, request, "other", COMPLETED)
    answer(painter, request, "u1", REFUSED, "no")
    answer(painter, request, "u1", COMPLETED)
    assert heard(master, request) == [("u1", REFUSED)]


# --- refused ----------------------------------------------------------------------------------------------------------


def test_an_update_of_a_request_that_is_over_or_unknown_is_refused() -> None:
    master = alone()
    painter = master.join("painter")
    request = master.submit()
    painter.draws(request)
    ask(master, request, "u1")
    assert heard(master, request) == [("u1", REFUSED)]
    master.news[RequestId("never")] = []
    ask(master, RequestId("never"), "u1")
    assert heard(master, RequestId("never")) == [("u1", REFUSED)]
    assert not painter.took(Update)


@pytest.mark.parametrize("end", ["finishes", "fails", "is aborted", "loses its replica"])
def test_whatever_ends_a_request_refuses_its_open_updates_before_that(end: str) -> None:
    master = alone()
    painter = master.join("painter")
    request = master.submit()
    ask(master, request, "u1")
    ask(master, request, "u2")
    answer(painter, request, "u1", STARTED)
    if end == "finishes":
        painter.draws(request)
    elif end == "fails":
        painter.fails(request)
    elif end == "is aborted":
        master.cancel(request)
    else:
        painter.die()
    assert heard(master, request) == [("u1", STARTED), ("u1", REFUSED), ("u2", REFUSED)]
    assert len(master.ends(request)) == 1
    assert master.news[request][-1] is master.ends(request)[0]


def test_a_stage_that_is_done_with_a_running_request_takes_no_update() -> None:
    master = Master(deploy(thinker=ar(), painter=diffusion(prompt="thinker.text")))
    thinker, painter = master.join("thinker"), master.join("painter")
    request = master.submit(params={"thinker": {"resumable": True}})
    master.handle(UpdateAsked(request, EventId("u1"), TaskKey(StageName("thinker")), MoreInput(close=True)))
    assert len(thinker.took(Update)) == 1
    thinker.says(request, "a cat")
    assert heard(master, request) == [("u1", REFUSED)]
    master.handle(UpdateAsked(request, EventId("u2"), TaskKey(StageName("thinker")), MoreInput(close=True)))
    assert heard(master, request)[-1] == ("u2", REFUSED)
    painter.draws(request)
    assert master.succeeded(request)


def test_waiting_updates_have_a_bound() -> None:
    master = alone()
    painter = master.join("painter")
    request = master.submit()
    for number in range(MAX_WAITING + 1):
        ask(master, request, f"u{number}")
    assert len(painter.took(Update)) == MAX_WAITING
    assert heard(master, request) == [(f"u{MAX_WAITING}", REFUSED)]


# --- replicas that die ------------------------------------------------------------------------------------------------


def test_a_request_that_is_run_again_gets_its_updates_again() -> None:
    master = alone(replicas=2)
    painters = [master.join("painter"), master.join("painter")]
    request = master.submit()
    first = next(painter for painter in painters if painter.submits())
    second = next(painter for painter in painters if painter is not first)
    ask(master, request, "u1")
    answer(first, request, "u1", REFUSED, "no")
    ask(master, request, "u2")
    first.die()
    assert second.submits() == [request]
    assert [update.event for update in second.took(Update)] == ["u2"]
    answer(second, request, "u2", COMPLETED)
    second.draws(request)
    assert master.succeeded(request)


def test_a_request_whose_update_has_started_is_not_run_again() -> None:
    master = alone(replicas=2)
    painters = [master.join("painter"), master.join("painter")]
    request = master.submit()
    first = next(painter for painter in painters if painter.submits())
    ask(master, request, "u1")
    answer(first, request, "u1", STARTED)
    first.die()
    assert "went away" in master.error(request).message


# --- which stage ------------------------------------------------------------------------------------------------------


def planned(spec: Deploy, **params: dict[str, object]) -> RequestPlan:
    master = Master(spec)
    return master.planner.plan(
        GenerateRequest(prompt="a cat", params={StageName(name): given for name, given in params.items()}), {}
    )


CHAIN = deploy(thinker=ar(), painter=diffusion(prompt="thinker.text"))
RESUMABLE = {"thinker": {"resumable": True}}


def test_the_visible_stage_that_draws_from_a_text_takes_a_prompt() -> None:
    hidden = deploy(sketch=diffusion(None), painter=diffusion(image="sketch.image"))
    assert plan_update(CHAIN, planned(CHAIN), UpdateRequest(prompt="a dog")) == (
        TaskKey(PAINTER),
        PromptChange(prompt="a dog"),
    )
    with pytest.raises(Refused, match=r"painter gets no prompt as text, but image from stage sketch"):
        plan_update(hidden, planned(hidden), UpdateRequest(prompt="a dog"))


def test_a_prompt_that_comes_as_tensors_cannot_be_changed() -> None:
    spec = deploy(thinker=ar(None), painter=diffusion(prompt_embeds="thinker.hidden"))
    with pytest.raises(Refused, match=r"prompt_embeds from stage thinker"):
        plan_update(spec, planned(spec), UpdateRequest(prompt="a dog"))


def test_more_input_goes_to_the_resumable_text() -> None:
    spec = deploy(thinker=ar())
    plan = planned(spec, **RESUMABLE)
    key = TaskKey(StageName("thinker"))
    assert plan_update(spec, plan, UpdateRequest(prompt="more")) == (key, MoreInput(input=Text(text="more")))
    assert plan_update(spec, plan, UpdateRequest(tokens=(1, 2))) == (key, MoreInput(input=Tokens(ids=(1, 2))))
    assert plan_update(spec, plan, UpdateRequest(close=True)) == (key, MoreInput(close=True))
    with pytest.raises(Refused, match=r"thinker runs it without `resumable`"):
        plan_update(spec, planned(spec), UpdateRequest(close=True))


def test_a_prompt_that_may_be_for_two_stages_must_say_for_which() -> None:
    plan = planned(CHAIN, **RESUMABLE)
    with pytest.raises(InvalidRequest, match="say which") as raised:
        plan_update(CHAIN, plan, UpdateRequest(prompt="a dog"))
    assert raised.value.info.field == "stage"
    for stage, kind in (("thinker", MoreInput), ("painter", PromptChange)):
        key, change = plan_update(CHAIN, plan, UpdateRequest(prompt="a dog", stage=StageName(stage)))
        assert key.stage == stage
        assert isinstance(change, kind)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (UpdateRequest(prompt="x", stage=StageName("thinker")), "without `resumable`"),
        (UpdateRequest(guidance_scale=2.0, stage=StageName("thinker")), "generates text"),
        (UpdateRequest(tokens=(1,), stage=PAINTER), "draws"),
    ],
)
def test_a_stage_that_cannot_take_an_update_says_why(asked: UpdateRequest, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        plan_update(CHAIN, planned(CHAIN), asked)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (UpdateRequest(), "prompt"),
        (UpdateRequest(prompt=" "), "prompt"),
        (UpdateRequest(prompt="x" * 100_001), "prompt"),
        (UpdateRequest(negative_prompt="x" * 100_001), "negative_prompt"),
        (UpdateRequest(transition_steps=4), "transition_steps"),
        (UpdateRequest(prompt="x", transition_steps=-1), "transition_steps"),
        (UpdateRequest(prompt="x", guidance_scale=101.0), "guidance_scale"),
        (UpdateRequest(prompt="x", tokens=(1,)), "tokens"),
        (UpdateRequest(tokens=()), "tokens"),
        (UpdateRequest(messages=(ChatMessage("user", "x" * 100_001),)), "messages"),
        (UpdateRequest(guidance_scale=2.0, close=True), "close"),
        (UpdateRequest(prompt="x", stage=StageName("panter")), "stage"),
    ],
)
def test_a_bad_update_is_refused_with_its_field_before_anything_is_sent(asked: UpdateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        plan_update(CHAIN, planned(CHAIN), asked)
    assert raised.value.info.field == field
