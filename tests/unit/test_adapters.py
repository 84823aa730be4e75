"""Which replicas get requests that name an adapter, what joiners are told to load, and who sleeps. `omni.adapters`."""

from collections.abc import Mapping, Sequence

from omni.adapters import OWN
from omni.events import Action, CallAsked, CallDone
from omni.snapshot import pipeline_status
from proto.calls import Method
from proto.deploy import ArStage, Kind
from proto.errors import ErrorCode
from proto.ids import CallId, RequestId, StageName
from proto.messages import Call, CallReply, InfoChanged, StageInfo
from proto.params import Json
from tests.unit.drive import Master, Stage, deploy, diffusion, lines

PATH = {"name": "fox", "path": "/adapters/fox"}


def solo(replicas: int = 2, room: int = 64) -> Master:
    return Master(deploy(thinker=ArStage(output=Kind.TEXT, replicas=replicas, max_in_flight=room)))


def join(master: Master, *loras: str, replica: int | None = None) -> Stage:
    stage = master.hello("thinker", replica)
    stage.attach()
    stage.ready(StageInfo(loras=loras))
    return stage


def ask(master: Master, lora: str | None = "fox") -> RequestId:
    return master.submit(params={"thinker": {} if lora is None else {"lora": lora}})


def call(
    master: Master, method: str, args: Mapping[str, Json], replicas: Sequence[int] | None = None, number: int = 5
) -> list[Action]:
    return master.handle(CallAsked(CallId(number), StageName("thinker"), method, args, replicas, 30.0))


def change(stage: Stage, *loras: str, asleep: bool = False) -> list[Action]:
    return stage.say(InfoChanged(epoch=stage.epoch, info=StageInfo(loras=loras, asleep=asleep)))


def answer(stage: Stage, number: int = 5, error: str = "") -> list[Action]:
    return stage.say(CallReply(epoch=stage.epoch, call=CallId(number), ok=not error, error=error))


# --- requests ---------------------------------------------------------------------------------------------------------


def test_an_unknown_adapter_is_refused_before_any_stage_hears_of_it() -> None:
    master = Master(deploy(writer=ArStage(), painter=diffusion(prompt="writer.text")))
    writer, painter = master.join("writer"), master.hello("painter")
    painter.attach()
    painter.ready(StageInfo(loras=("fox", "owl")))
    request = master.submit(params={"painter": {"lora": "fax"}})
    error = master.error(request)
    assert (error.code, error.field, error.stage) == (ErrorCode.UNKNOWN_MODEL, "lora", "painter")
    assert "did you mean 'fox'" in error.message
    assert not writer.submits()
    assert master.submit(params={"painter": {"lora": "owl"}}) in writer.submits()


def test_requests_that_name_an_adapter_go_only_to_replicas_that_have_it() -> None:
    master = solo(replicas=3)
    one, two, three = join(master), join(master, "fox"), join(master, "fox", "owl")
    asked = [ask(master) for _ in range(4)]
    assert not one.submits()
    assert sorted([*two.submits(), *three.submits()]) == sorted(asked)
    owl = ask(master, "owl")
    assert three.submits() == [owl]
    assert ask(master, None) in one.submits()  # the least loaded


def test_an_empty_name_is_no_adapter() -> None:
    master = solo(1)
    stage = join(master)
    assert ask(master, "") in stage.submits()


def test_one_that_waits_for_its_adapter_lets_others_pass_but_keeps_its_place() -> None:
    master = solo(room=1)
    plain, fox = join(master), join(master, "fox")
    first = ask(master)
    assert fox.submits() == [first]
    second = ask(master)
    third = ask(master, None)
    assert plain.submits() == [third]
    fourth = ask(master, None)
    fox.says(first, "done")
    assert fox.submits() == [second]
    plain.says(third, "done")
    assert plain.submits() == [fourth]
    for stage, request in ((fox, second), (plain, fourth)):
        stage.says(request, "done")
    master.assert_idle()


def test_requests_that_wait_for_an_adapter_which_goes_are_told() -> None:
    master = solo(room=1)
    plain, fox = join(master), join(master, "fox")
    first, second = ask(master), ask(master)
    change(fox)
    assert master.error(second).code is ErrorCode.UNKNOWN_MODEL
    assert not master.ends(first)
    fox.die()
    assert master.error(first).code is ErrorCode.REPLICA_LOST  # nobody else could run it again
    assert not plain.submits()
    master.assert_idle()


# --- replicas that join later -----------------------------------------------------------------------------------------


def test_a_replica_that_joins_later_is_told_to_load_what_the_others_have() -> None:
    master = solo()
    one = join(master)
    call(master, Method.LOAD_LORA, PATH)
    change(one, "fox")
    answer(one)
    two = join(master)
    (told,) = two.took(Call)
    assert (told.method, told.args) == (Method.LOAD_LORA, PATH)
    assert told.call >= OWN
    change(two, "fox")
    assert not [action for action in answer(two, told.call) if isinstance(action, CallDone)]
    one.die()
    assert ask(master) in two.submits()
    again = join(master, "fox", replica=0)  # it was away only, and has it still
    assert not again.took(Call)


def test_a_replica_that_becomes_ready_while_the_others_load_is_told_when_they_have() -> None:
    master = solo()
    one = join(master)
    call(master, Method.LOAD_LORA, PATH)
    two = join(master)
    assert not two.took(Call)
    change(one, "fox")
    answer(one)
    assert [(told.method, told.args) for told in two.took(Call)] == [(Method.LOAD_LORA, PATH)]
    assert [told.call for told in one.took(Call)] == [CallId(5)]


def test_while_an_adapter_is_loaded_again_requests_for_it_are_told_to_come_back() -> None:
    master = solo(1)
    one = join(master)
    call(master, Method.LOAD_LORA, PATH)
    change(one, "fox")
    answer(one)
    one.die()
    again = join(master)
    error = master.error(ask(master))
    assert (error.code, error.field) == (ErrorCode.STAGE_UNAVAILABLE, "lora")
    assert error.retry_after_s is not None
    (told,) = again.took(Call)
    assert "no such file" in "".join(lines(answer(again, told.call, "no such file")))


def test_a_replica_that_was_away_when_an_adapter_was_unloaded_is_told_to_unload_it() -> None:
    master = solo()
    one = join(master, "fox")
    call(master, Method.UNLOAD_LORA, {"name": "fox"})
    change(one)
    answer(one)
    (told,) = join(master, "fox").took(Call)
    assert (told.method, told.args) == (Method.UNLOAD_LORA, {"name": "fox"})


def test_calls_that_failed_everywhere_or_went_to_some_replicas_are_not_said_again() -> None:
    master = solo(3)
    one, two = join(master), join(master)
    call(master, Method.LOAD_LORA, PATH)
    answer(one, error="no")
    answer(two, error="no")
    call(master, Method.LOAD_LORA, {**PATH, "name": "owl"}, replicas=[0])
    change(one, "owl")
    answer(one)
    assert not join(master).took(Call)


# --- sleep ------------------------------------------------------------------------------------------------------------


def test_a_replica_that_sleeps_gets_no_requests_and_answers_calls() -> None:
    master = solo()
    one, two = join(master), join(master)
    change(one, asleep=True)
    asked = [ask(master, None) for _ in range(3)]
    assert not one.submits()
    assert two.submits() == asked
    assert not pipeline_status(master.core, master.now).ready
    states = [replica.state for replica in pipeline_status(master.core, master.now).stages[0].replicas]
    assert states == ["asleep", "ready"]
    call(master, Method.WAKE, {})
    assert one.took(Call)
    change(one)
    assert ask(master, None) in one.submits()


def test_when_all_replicas_sleep_requests_are_refused_with_the_reason() -> None:
    master = solo(1, room=1)
    one = join(master)
    first = ask(master, None)
    waits = ask(master, None)
    one.says(first, "done")
    one.says(waits, "done")
    change(one, asleep=True)
    error = master.error(ask(master, None))
    assert error.code is ErrorCode.STAGE_UNAVAILABLE
    assert "asleep" in error.message
    master.assert_idle()
