"""What becomes of requests whose replica goes away: promises of `omni.orchestrator` and `omni.core`."""

from omni.events import Completed
from proto.deploy import ArStage, Kind, MasterSpec
from proto.errors import ErrorCode
from proto.messages import Chunk, Goodbye, Leaving, Progress, Refuse, Started, Submit
from tests.unit.drive import Master, deploy, diffusion

TIMES = MasterSpec(suspect_after=3.0, dead_after=10.0)


def guided(room: int = 64) -> Master:
    """Two thinkers before one painter, with a KV edge and a companion."""
    return Master(
        deploy(
            master=TIMES,
            thinker=ArStage(output=Kind.TEXT, replicas=2, max_in_flight=room),
            painter=diffusion(kv="thinker.kv", companion="kv"),
        )
    )


def plain(replicas: int = 2, room: int = 64) -> Master:
    return Master(
        deploy(
            master=TIMES,
            thinker=ArStage(output=Kind.TEXT, replicas=replicas, max_in_flight=room),
            painter=diffusion(prompt="thinker.text", replicas=2),
        )
    )


def test_a_request_of_which_nothing_was_seen_runs_again_elsewhere() -> None:
    master = plain()
    first, second, _ = master.join("thinker"), master.join("thinker"), master.join("painter")
    request = master.submit(outputs=["thinker"])
    assert first.submits() == [request]
    first.send(Chunk(request=request, epoch=first.epoch, seq=0, output="", part=Started(queue_s=0.0)))
    first.send(Chunk(request=request, epoch=first.epoch, seq=1, output="", part=Progress(step=1, total=9)))
    first.die()
    assert second.submits() == [request]
    first.says(request, "from the grave")  # an old epoch
    assert not master.ends(request)
    second.says(request, "x")
    assert master.succeeded(request)
    master.assert_idle()


def test_a_request_of_which_something_was_streamed_fails_by_name() -> None:
    master = plain()
    first, second, _ = master.join("thinker"), master.join("thinker"), master.join("painter")
    request = master.submit()
    first.delta(request, "seen")
    first.die()
    error = master.error(request)
    assert (error.code, error.stage) == (ErrorCode.REPLICA_LOST, "thinker")
    assert "thinker/0" in error.message
    assert "killed" in error.message
    assert error.retry_after_s is not None
    assert not second.submits()
    master.assert_idle()


def test_a_later_stage_runs_again_with_the_same_inputs() -> None:
    master = plain()
    thinker, first, second = master.join("thinker"), master.join("painter"), master.join("painter")
    request = master.submit()
    thinker.says(request, "cat")
    (one,) = first.took(Submit)
    first.die()
    (other,) = second.took(Submit)
    assert (one.inputs, one.params) == (other.inputs, other.params)
    second.draws(request)
    assert master.succeeded(request)
    master.assert_idle()


def test_killed_replica_fails_only_its_own_requests() -> None:
    master = plain()
    stages = [master.join("thinker"), master.join("thinker")]
    master.join("painter")
    requests = [master.submit(outputs=["thinker"]) for _ in range(10)]
    mine = stages[0].submits()
    for request in requests:
        (stages[0] if request in mine else stages[1]).delta(request, "seen")
    stages[0].die()
    for request in requests:
        if request in mine:
            assert master.error(request).code is ErrorCode.REPLICA_LOST
        else:
            stages[1].says(request, "x")
            assert master.succeeded(request)
    master.assert_idle()


def test_a_request_is_not_tried_for_ever() -> None:
    master = plain(replicas=3)
    stages = [master.join("thinker") for _ in range(3)]
    master.join("painter")
    request = master.submit(outputs=["thinker"])
    for _ in range(2):
        (holder,) = [s for s in stages if s.replica is not None and s.in_flight]
        holder.die()
    assert master.error(request).code is ErrorCode.REPLICA_LOST
    assert sum(len(stage.submits()) for stage in stages) == 2
    master.assert_idle()


def test_a_group_is_tried_again_as_a_group_and_fails_if_half_of_it_is_done() -> None:
    for half_done in (False, True):
        master = guided()
        first, second, _ = master.join("thinker"), master.join("thinker"), master.join("painter")
        request = master.submit()
        group = first.submits()
        if half_done:
            first.publish(f"{request}.negative", "kv", first.payload())
            first.result(f"{request}.negative")
        first.die()
        assert second.submits() == ([] if half_done else group)
        if half_done:
            assert master.error(request).code is ErrorCode.REPLICA_LOST
            master.assert_idle()


def test_retries_keep_their_order_and_come_before_later_requests() -> None:
    master = plain(room=3)
    first, second, _ = master.join("thinker"), master.join("thinker"), master.join("painter")
    requests = [master.submit() for _ in range(8)]
    mine, others = first.submits(), second.submits()
    first.die()
    assert not second.submits()
    order = []
    for request in others:
        second.says(request, "x")
        order += second.submits()
    assert order == mine
    for request in mine[:2]:
        second.says(request, "x")
    assert second.submits() == requests[6:]


def test_when_the_last_replica_goes_those_who_wait_are_told_that_the_stage_is_unavailable() -> None:
    master = plain(replicas=1, room=1)
    thinker, painter = master.join("thinker"), master.join("painter")
    held, waiting = master.submit(), master.submit()
    thinker.die()
    assert master.error(held).code is ErrorCode.REPLICA_LOST
    error = master.error(waiting)
    assert (error.code, error.stage) == (ErrorCode.STAGE_UNAVAILABLE, "thinker")
    assert error.retry_after_s is not None
    assert not painter.submits()
    master.assert_idle()


def test_an_output_for_a_stage_that_is_gone_fails_by_the_name_of_that_stage() -> None:
    master = plain()
    thinker, painter = master.join("thinker"), master.join("painter")
    request = master.submit()
    painter.die()
    assert not master.ends(request)
    thinker.says(request, "x")
    error = master.error(request)
    assert (error.code, error.stage) == (ErrorCode.STAGE_UNAVAILABLE, "painter")
    master.assert_idle()


def test_a_silent_replica_gets_no_new_work_and_those_who_wait_get_it_when_it_answers() -> None:
    master = plain(replicas=1)
    thinker = master.join("thinker")
    painter = master.join("painter")
    master.wait(3)
    painter.beat()
    request = master.submit()
    assert not thinker.submits()
    assert not master.ends(request)
    thinker.beat()
    assert thinker.submits() == [request]


def test_a_frozen_replica_that_thaws_after_it_was_given_up_is_not_heard() -> None:
    master = plain()
    frozen = master.join("thinker")
    painter = master.join("painter")
    request = master.submit(outputs=["thinker"])
    other = master.join("thinker")
    for _ in range(11):
        master.wait(1)
        other.beat()
        painter.beat()
    assert other.submits() == [request]
    frozen.delta(request, "late")
    frozen.says(request, "late")
    assert not master.news[request]
    frozen.beat()
    assert [refuse.code for refuse in frozen.took(Refuse)] == ["session"]
    other.says(request, "x")
    assert master.succeeded(request)
    master.assert_idle()


def test_a_replica_that_drains_finishes_and_its_leftovers_run_elsewhere() -> None:
    master = plain()
    first, second, _ = master.join("thinker"), master.join("thinker"), master.join("painter")
    one = master.submit(outputs=["thinker"])
    two = master.submit(outputs=["thinker"])
    three = master.submit(outputs=["thinker"])
    assert first.submits() == [one, three]
    first.say(Leaving(epoch=first.epoch))
    first.says(one, "x")
    assert master.succeeded(one)
    first.say(Goodbye(epoch=first.epoch, reason="left"))
    assert second.submits() == [two, three]
    second.says(two, "x")
    second.says(three, "x")
    assert master.succeeded(three)
    master.assert_idle()


def test_an_abort_that_was_never_acknowledged_is_settled_when_its_replica_goes() -> None:
    master = plain()
    first, second, _ = master.join("thinker"), master.join("thinker"), master.join("painter")
    request = master.submit()
    master.cancel(request)
    assert first.aborts() == [request]
    first.die()
    assert not second.submits()
    master.assert_idle()


def test_a_new_replica_takes_what_waits() -> None:
    master = plain(replicas=2, room=1)
    master.join("thinker")
    master.join("painter")
    requests = [master.submit() for _ in range(2)]
    newcomer = master.join("thinker")
    assert newcomer.submits() == requests[1:]
    assert not any(isinstance(news, Completed) for request in requests for news in master.news[request])
