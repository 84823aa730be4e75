"""Who may take part, and who counts as there: promises of `omni.membership`, kept through the whole core."""

import pytest

from omni.events import Action, ChildExited, MembershipChanged, PeerGone, StopAsked
from omni.membership import LOADING_SILENCE_S, ReplicaState
from proto.deploy import ArStage, Balance, MasterSpec
from proto.ids import Epoch, StageName
from proto.messages import (
    PROTOCOL,
    Attached,
    BeatAck,
    Goodbye,
    Heartbeat,
    Hello,
    Leaving,
    LoadFailed,
    LoadProgress,
    Refuse,
    Shutdown,
    StageInfo,
    Submit,
    Welcome,
)
from tests.unit.drive import HERE, Master, Stage, ar, deploy, diffusion, lines

TIMES = MasterSpec(heartbeat=1.0, suspect_after=3.0, dead_after=10.0, load_stall=100.0)


@pytest.fixture
def master() -> Master:
    return Master(deploy(master=TIMES, thinker=ar(), painter=diffusion(prompt="thinker.text", replicas=2)))


def refusal(stage: Stage) -> Refuse:
    assert isinstance(stage.answer, Refuse)
    return stage.answer


def note(actions: list[Action]) -> MembershipChanged:
    (change,) = [action for action in actions if isinstance(action, MembershipChanged)]
    return change


# --- hello ------------------------------------------------------------------------------------------------------------


def test_hello_is_answered_with_all_that_a_headless_worker_needs(master: Master) -> None:
    welcome = master.hello("painter").answer
    assert isinstance(welcome, Welcome)
    assert (welcome.replica, welcome.pipeline, welcome.data_port, welcome.heartbeat_s) == (0, "test", 77, 1.0)
    assert welcome.spec is master.core.deploy.stages[StageName("painter")]
    assert welcome.limits is master.core.deploy.limits
    thinker = master.hello("thinker").answer
    assert isinstance(thinker, Welcome)
    assert (thinker.publishes, welcome.publishes) == (("text",), ())
    assert thinker.session != welcome.session


def test_a_wrong_protocol_is_refused_for_good_with_both_numbers(master: Master) -> None:
    refuse = refusal(master.hello("painter", protocol=PROTOCOL + 1))
    assert (refuse.code, refuse.retry) == ("protocol", False)
    assert str(PROTOCOL) in refuse.reason
    assert str(PROTOCOL + 1) in refuse.reason


def test_an_unknown_stage_is_refused_for_good_with_the_known_ones(master: Master) -> None:
    refuse = refusal(master.hello("panter"))
    assert (refuse.code, refuse.retry) == ("stage", False)
    assert "'panter'" in refuse.reason
    assert "thinker, painter" in refuse.reason


def test_a_slot_that_the_deploy_does_not_have_is_refused_for_good(master: Master) -> None:
    refuse = refusal(master.hello("painter", 2))
    assert (refuse.code, refuse.retry) == ("slot", False)
    assert "0..1" in refuse.reason


def test_a_taken_slot_may_be_asked_for_again(master: Master) -> None:
    master.hello("painter", 1)
    refuse = refusal(master.hello("painter", 1))
    assert (refuse.code, refuse.retry) == ("slot", True)
    assert "replica 1" in refuse.reason
    master.hello("painter")
    refuse = refusal(master.hello("painter"))
    assert refuse.retry
    assert "all 2 replica slots" in refuse.reason


def test_the_lowest_free_slot_is_given_to_who_names_none(master: Master) -> None:
    first, second = master.hello("painter"), master.hello("painter")
    assert [s.answer.replica for s in (first, second) if isinstance(s.answer, Welcome)] == [0, 1]
    first.say(Goodbye(epoch=first.epoch))
    again = master.hello("painter").answer
    assert isinstance(again, Welcome)
    assert again.replica == 0


def test_max_replicas_leaves_slots_for_later_ones() -> None:
    master = Master(deploy(thinker=ArStage(output=ar().output, replicas=1, max_replicas=3)))
    assert [isinstance(master.hello("thinker").answer, Welcome) for _ in range(4)] == [True, True, True, False]
    assert "waiting for stage thinker (0 of 1 replicas)" in master.core.members.waiting_for()[0]


def test_a_repeated_hello_gets_the_same_answer_and_no_second_slot(master: Master) -> None:
    stage = master.hello("painter", nonce="n")
    first = stage.answer
    stage.say_hello(Hello(protocol=PROTOCOL, build="", stage=StageName("painter"), nonce="n", host="h", pid=1))
    assert stage.answer == first
    assert len(master.core.members.slots[StageName("painter")]) == 1


def test_one_connection_holds_one_slot(master: Master) -> None:
    stage = master.join("painter")
    stage.say(Hello(protocol=PROTOCOL, build="", stage=StageName("painter"), nonce="new", host="h", pid=1))
    assert [refuse.code for refuse in stage.took(Refuse)] == ["slot"]
    assert len(master.core.members.slots[StageName("painter")]) == 1
    stage.beat()
    assert stage.took(BeatAck)


def test_refusals_are_counted_and_cost_no_slot(master: Master) -> None:
    for _ in range(100):
        master.hello("nobody")
    assert master.core.members.refused == 100
    assert not list(master.core.members.replicas())


def test_a_master_that_stops_takes_nobody_new(master: Master) -> None:
    there = master.join("thinker")
    master.handle(StopAsked("bye"))
    assert [shutdown.reason for shutdown in there.took(Shutdown)] == ["bye"]
    refuse = refusal(master.hello("painter"))
    assert (refuse.code, refuse.retry) == ("stopping", True)


# --- sessions and epochs ----------------------------------------------------------------------------------------------


def test_attach_needs_the_session_that_welcome_handed_out(master: Master) -> None:
    stage = master.hello("painter")
    stage.ready()
    stage.attach("guessed")
    assert not stage.inbox
    assert not master.core.members.ready(StageName("painter"))
    stage.attach()
    assert stage.took(Attached)
    assert master.core.members.ready(StageName("painter")) == [stage.replica]


def test_attach_of_another_epoch_is_refused(master: Master) -> None:
    stage = master.hello("painter")
    stage.epoch = Epoch(stage.epoch + 1)
    stage.attach()
    assert not stage.took(Attached)


def test_a_data_connection_serves_one_replica_only(master: Master) -> None:
    first, second = master.join("painter"), master.hello("painter")
    second.data = first.data
    second.attach()
    assert second.replica is not None
    assert second.replica.data is None
    assert first.replica is not None
    assert first.replica.data == first.data


def test_a_replica_may_attach_anew_and_its_old_connection_is_forgotten(master: Master) -> None:
    stage = master.join("painter")
    old, stage.data = stage.data, b"fresh"
    stage.attach()
    assert master.core.members.of_data(b"fresh", stage.epoch) is stage.replica
    assert master.core.members.of_data(old, stage.epoch) is None


def test_epochs_are_never_used_twice(master: Master) -> None:
    seen = set()
    for _ in range(20):
        stage = master.join("painter", 1)
        assert stage.epoch not in seen
        seen.add(stage.epoch)
        stage.say(Goodbye(epoch=stage.epoch))
        assert stage.replica is None


def test_messages_of_an_old_epoch_change_nothing(master: Master) -> None:
    old = master.join("painter", 0)
    master.handle(PeerGone(old.control, "send failed"))
    new = master.join("painter", 0)
    for speaker in (old, new):  # over the dead connection, and over the living one
        assert speaker.say(Leaving(epoch=old.epoch)) == []
        assert speaker.say(Goodbye(epoch=old.epoch)) == []
    assert new.replica is not None
    assert new.replica.state is ReplicaState.READY


def test_nobody_speaks_for_another_replica(master: Master) -> None:
    one, other = master.join("painter", 0), master.join("painter", 1)
    assert one.say(Goodbye(epoch=other.epoch)) == []
    assert other.replica is not None


def test_a_heartbeat_of_an_unknown_session_is_told_to_say_hello_again(master: Master) -> None:
    stranger = master.hello("nobody")
    stranger.say(Heartbeat(epoch=Epoch(7), steps=0, queued=0, running=0))
    (refuse,) = stranger.took(Refuse)
    assert (refuse.code, refuse.retry) == ("session", True)
    assert stranger.say(LoadProgress(epoch=Epoch(7), note="x")) == []


# --- loading ----------------------------------------------------------------------------------------------------------


def test_a_load_is_judged_by_its_progress_and_not_by_its_total_time(master: Master) -> None:
    stage = master.hello("painter")
    for _ in range(100):  # 2,000 s in all, with a limit of 100 s
        assert master.wait(20) == []
        stage.say(LoadProgress(epoch=stage.epoch, note="reading weights"))
    assert stage.replica is not None


def test_a_stalled_load_fails_and_says_after_what_although_the_process_answers(master: Master) -> None:
    stage = master.hello("painter", 0)
    stage.say(LoadProgress(epoch=stage.epoch, note="reading weights", done=0.5))
    told: list[Action] = []
    for _ in range(20):
        stage.beat()
        told += master.wait(5)
    change = note(told)
    assert change.fatal
    assert "painter/0" in change.line
    assert "no progress for 100 s" in change.line
    assert "reading weights (50%)" in change.line
    assert stage.replica is None


def test_a_loading_process_may_be_silent_for_longer_than_a_ready_one(master: Master) -> None:
    stage = master.hello("painter")
    assert master.wait(LOADING_SILENCE_S - 1) == []
    assert note(master.wait(2)).fatal
    assert stage.replica is None


def test_a_failed_load_is_told_and_its_sender_may_go(master: Master) -> None:
    stage = master.hello("painter", 1)
    told = stage.say(LoadFailed(epoch=stage.epoch, error="no such file: unet"))
    assert "painter/1 left: could not load: no such file: unet" in note(told).line
    assert stage.took(Shutdown)
    assert stage.replica is None


def test_progress_is_told_as_detail(master: Master) -> None:
    stage = master.hello("painter", 0)
    change = note(stage.say(LoadProgress(epoch=stage.epoch, note="reading weights", done=0.25)))
    assert (change.line, change.detail) == ("stage painter/0: reading weights (25%)", True)


def test_waiting_lines_count_ready_replicas_and_say_what_the_others_do(master: Master) -> None:
    waiting = master.core.members.waiting_for
    assert waiting() == ["waiting for stage thinker (0 of 1 replicas)", "waiting for stage painter (0 of 2 replicas)"]
    master.join("thinker")
    master.join("painter")
    loading = master.hello("painter")
    loading.say(LoadProgress(epoch=loading.epoch, note="reading weights", done=0.5))
    assert waiting() == ["waiting for stage painter (1 of 2 replicas) [painter/1: reading weights (50%)]"]
    loading.attach()
    loading.ready()
    assert waiting() == []


def test_ready_says_what_was_loaded_and_a_second_ready_changes_nothing(master: Master) -> None:
    stage = master.hello("painter", 0)
    stage.attach()
    line = note(stage.ready(StageInfo(model="Flux", dtype="bfloat16", device="cuda:0", parameters=1_500_000))).line
    assert line == "stage painter/0 ready after 1.0 s (Flux, bfloat16 on cuda:0, 1.5 M parameters)"
    stage.say(Leaving(epoch=stage.epoch))
    assert stage.ready() == []
    assert stage.replica is not None
    assert stage.replica.state is ReplicaState.DRAINING


# --- living and leaving -----------------------------------------------------------------------------------------------


def test_heartbeats_are_acknowledged_and_keep_a_replica_alive(master: Master) -> None:
    stage = master.join("thinker")
    for _ in range(100):
        assert master.wait(2.5) == []
        stage.beat()
    assert len(stage.took(BeatAck)) == 100


def test_silence_makes_a_replica_suspect_and_a_heartbeat_makes_it_ready_again(master: Master) -> None:
    stage = master.join("painter", 0)
    assert lines(master.wait(3)) == ["stage painter/0 is silent for 3.0 s: no new work for it"]
    assert master.core.members.ready(StageName("painter")) == []
    assert lines(stage.beat()) == ["stage painter/0 answers again"]
    assert master.core.members.ready(StageName("painter")) == [stage.replica]


def test_longer_silence_frees_the_slot(master: Master) -> None:
    stage = master.join("painter", 0)
    assert lines(master.wait(10))[-1] == "stage painter/0 left: silent for 10.0 s"
    assert stage.replica is None
    assert isinstance(master.hello("painter", 0).answer, Welcome)


@pytest.mark.parametrize("start", [0.1, 0.7, 1e3 + 0.1, 123456.7])
def test_limits_on_silence_are_met_by_one_tick_each(start: float) -> None:
    """Whatever floating point makes of the times: a Tick at the deadline must not leave a deadline that has passed."""
    master = Master(deploy(master=MasterSpec(suspect_after=0.3, dead_after=0.9), thinker=ar()))
    master.now = start
    master.join("thinker")
    assert len(lines(master.wait(1.0))) == 2
    assert master.core.deadline() is None


def test_work_on_the_data_lane_is_a_sign_of_life_too(master: Master) -> None:
    stage = master.join("thinker")
    master.join("painter")
    request = master.submit(outputs=["thinker"])
    for _ in range(20):
        master.wait(2.5)
        stage.delta(request, "x")
    assert stage.replica is not None
    assert stage.replica.state is ReplicaState.READY


def test_a_replica_that_drains_gets_no_new_work_even_after_a_silence() -> None:
    master = Master(deploy(master=TIMES, thinker=ArStage(output=ar().output, replicas=2, balance=Balance.ROUND_ROBIN)))
    leaver, stayer = master.join("thinker"), master.join("thinker")
    request = master.submit()
    assert leaver.submits() == [request]
    assert lines(leaver.say(Leaving(epoch=leaver.epoch))) == ["stage thinker/0 leaves after finishing 1 requests"]
    stayer.beat()
    master.wait(4)  # longer than suspect_after
    leaver.beat()
    stayer.beat()
    later = [master.submit() for _ in range(4)]
    assert stayer.submits() == later
    assert leaver.took(Submit) == []
    leaver.says(request, "done")
    assert master.succeeded(request)
    assert lines(leaver.say(Goodbye(epoch=leaver.epoch, reason="left"))) == ["stage thinker/0 left: left"]


def test_a_connection_that_is_gone_frees_the_slot_at_once(master: Master) -> None:
    for lane in ("control", "data"):
        stage = master.join("painter", 0)
        peer = stage.control if lane == "control" else stage.data
        assert "left: host unreachable" in note(master.handle(PeerGone(peer, "host unreachable"))).line
        assert stage.replica is None
    assert master.handle(PeerGone(b"unknown", "x")) == []


def test_an_ended_child_frees_its_slot_and_is_fatal_only_if_nobody_restarts_it(master: Master) -> None:
    name = StageName("painter")
    for restart in (True, False):
        stage = master.hello("painter", 0, pid=4711, host=HERE)
        told = master.handle(ChildExited(name, 0, 4711, -9, will_restart=restart))
        assert stage.replica is None
        assert "process 4711 ended (killed by signal 9)" in lines(told)[0]
        assert any(isinstance(a, MembershipChanged) and a.fatal for a in told) is not restart


def test_a_process_of_another_host_with_the_same_number_is_left_alone(master: Master) -> None:
    stage = master.hello("painter", 0, pid=4711, host="elsewhere")
    master.handle(ChildExited(StageName("painter"), 0, 4711, 0, will_restart=True))
    assert stage.replica is not None
