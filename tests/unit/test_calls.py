"""RPC to replicas: one answer for each call, in which every replica that was asked stands once. `omni.calls`."""

from collections.abc import Sequence

from omni.events import Action, CallAsked, CallDone
from proto.ids import CallId, StageName
from proto.messages import Call, CallReply
from proto.params import Json
from tests.unit.drive import Master, Stage, ar, deploy


def ask(master: Master, replicas: Sequence[int] | None = None, stage: str = "thinker") -> list[Action]:
    return master.handle(CallAsked(CallId(5), StageName(stage), "echo", {"x": 1}, replicas, 2.0))


def reply(stage: Stage, value: Json = None, error: str = "") -> list[Action]:
    return stage.say(CallReply(epoch=stage.epoch, call=CallId(5), ok=not error, value=value, error=error))


def done(actions: list[Action]) -> CallDone | None:
    found = [action for action in actions if isinstance(action, CallDone)]
    assert len(found) <= 1
    return found[0] if found else None


def three() -> tuple[Master, list[Stage]]:
    master = Master(deploy(thinker=ar(replicas=3)))
    return master, [master.join("thinker") for _ in range(3)]


def test_a_call_goes_to_all_ready_replicas_and_ends_with_the_last_answer() -> None:
    master, stages = three()
    assert done(ask(master)) is None
    for stage in stages:
        assert [(c.method, c.args, c.epoch) for c in stage.took(Call)] == [("echo", {"x": 1}, stage.epoch)]
    assert done(reply(stages[2], "c")) is None
    assert done(reply(stages[0], "a")) is None
    assert done(reply(stages[0], "again")) is None
    assert done(reply(stages[1], error="no")) == CallDone(CallId(5), {2: "c", 0: "a"}, {1: "no"})
    assert done(reply(stages[1], "late")) is None
    master.assert_idle()


def test_a_call_may_name_its_replicas_and_is_told_which_are_not_ready() -> None:
    master, stages = three()
    stages[1].die()
    ask(master, [0, 1, 7])
    assert not stages[2].took(Call)
    answer = done(reply(stages[0], "a"))
    assert answer is not None
    assert answer.values == {0: "a"}
    assert set(answer.errors) == {1, 7}
    assert "thinker/7 is not ready" in answer.errors[7]


def test_silent_replicas_are_named_at_the_deadline() -> None:
    master, stages = three()
    ask(master)
    reply(stages[1], "b")
    assert [call.within_s for call in stages[0].took(Call)] == [2.0]
    assert done(master.wait(2.9)) is None  # its own word that it did not run the call may be under way
    answer = done(master.wait(0.2))
    assert answer is not None
    assert answer.values == {1: "b"}
    assert set(answer.errors) == {0, 2}
    assert "deadline" in answer.errors[0]
    master.assert_idle()


def test_lost_replicas_answer_with_their_loss_and_a_newcomer_is_not_asked() -> None:
    master, stages = three()
    ask(master, [0, 1])
    stages[0].die()
    newcomer = master.join("thinker", 0)
    assert not newcomer.took(Call)
    assert done(reply(newcomer, "not asked")) is None
    answer = done(reply(stages[1], "b"))
    assert answer is not None
    assert answer.values == {1: "b"}
    assert "went away" in answer.errors[0]
    master.assert_idle()


def test_a_call_that_reaches_nobody_ends_at_once() -> None:
    master = Master(deploy(thinker=ar()))
    for replicas, stage in ((None, "thinker"), ([], "thinker"), ([0], "thinker"), (None, "nobody"), ([3], "nobody")):
        answer = done(ask(master, replicas, stage))
        assert answer is not None
        assert answer.errors
        assert not answer.values
        assert stage in next(iter(answer.errors.values()))
    master.assert_idle()


def test_arguments_that_are_not_plain_data_are_told_to_the_caller() -> None:
    master, stages = three()
    answer = done(master.handle(CallAsked(CallId(5), StageName("thinker"), "echo", {"x": b"raw"}, None, 2.0)))
    assert answer is not None
    assert "bytes" in answer.errors[-1]
    assert not stages[0].took(Call)
    master.assert_idle()
