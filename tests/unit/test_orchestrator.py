"""How requests move along the graph, wait, end and are told about: promises of `omni.orchestrator`."""

import math
import random

import msgspec
import pytest

from omni.events import Cancelled, StageFinished, StopAsked
from omni.sequencer import MAX_HELD
from omni.snapshot import pipeline_status
from omni.status import PipelineStatus
from proto.deploy import ArStage, Balance, Kind, LimitsSpec
from proto.errors import ErrorCode
from proto.ids import RequestId
from proto.messages import Chunk, Heartbeat, Images, Started, Submit, Text, TextDelta, Tokens
from proto.params import DiffusionParams
from tests.unit.drive import Master, ar, deploy, diffusion


def chain(**limits: int | float) -> Master:
    """thinker -> painter, one replica each."""
    return Master(deploy(LimitsSpec(**limits), thinker=ar(), painter=diffusion(prompt="thinker.text")))  # type: ignore[arg-type]


def solo(
    limits: LimitsSpec | None = None, *, replicas: int = 1, balance: Balance = Balance.LEAST_LOADED, room: int = 64
) -> Master:
    return Master(
        deploy(limits, thinker=ArStage(output=Kind.TEXT, replicas=replicas, balance=balance, max_in_flight=room))
    )


def status(master: Master) -> PipelineStatus:
    return pipeline_status(master.core, master.now)


# --- the graph --------------------------------------------------------------------------------------------------------


def test_one_prompt_becomes_a_text_and_a_picture() -> None:
    master = chain()
    thinker, painter = master.join("thinker"), master.join("painter")
    request = master.submit("draw a cat", params={"painter": {"width": 64}})
    (submit,) = thinker.took(Submit)
    assert submit.inputs == {"prompt": Text(text="draw a cat")}
    assert (submit.emit, submit.publish) == (("text",), ("text",))
    thinker.delta(request, "a ")
    thinker.delta(request, "cat")
    assert not painter.submits()
    thinker.says(request, "a cat")
    (submit,) = painter.took(Submit)
    assert submit.inputs == {"prompt": Text(text="a cat")}
    assert submit.params == DiffusionParams(width=64)
    assert (submit.emit, submit.publish) == (("image",), ())
    painter.draws(request)
    assert master.succeeded(request)
    assert [part.part for part in master.parts(request)] == [TextDelta(text="a "), TextDelta(text="cat")]
    done = master.finished(request)
    assert done["thinker"].outputs == {"text": Text(text="a cat")}
    assert done["painter"].outputs == {"image": Images(tensor=0)}
    assert len(done["painter"].tensors) == 1
    master.assert_idle()
    (edge,) = status(master).edges
    assert (edge.payloads, edge.bytes) == (1, len("a cat"))


def test_the_graph_is_followed_and_not_the_order_of_the_stages() -> None:
    """A diamond: two stages run side by side, and the last one starts when both are done, in whichever order."""
    for first, second in (("left", "right"), ("right", "left")):
        master = Master(
            deploy(
                top=ar(None),
                left=ar(None, prompt="top.text"),
                right=ar(None, prompt="top.text"),
                bottom=diffusion(prompt="left.text", negative_prompt="right.text"),
            )
        )
        stages = {name: master.join(name) for name in ("top", "left", "right", "bottom")}
        request = master.submit()
        stages["top"].says(request, "t")
        assert stages["left"].submits() == stages["right"].submits() == [request]
        stages[first].says(request, first)
        assert not stages["bottom"].submits()
        stages[second].says(request, second)
        (submit,) = stages["bottom"].took(Submit)
        assert submit.inputs == {"prompt": Text(text="left"), "negative_prompt": Text(text="right")}
        stages["bottom"].draws(request)
        assert master.succeeded(request)
        master.assert_idle()


def test_one_payload_goes_to_two_stages_and_is_released_after_both() -> None:
    master = Master(
        deploy(
            thinker=ar(None), a=diffusion(prompt_embeds="thinker.hidden"), b=diffusion(prompt_embeds="thinker.hidden")
        )
    )
    thinker, a, b = master.join("thinker"), master.join("a"), master.join("b")
    request = master.submit()
    assert thinker.took(Submit)[0].publish == ("hidden",)
    payload = thinker.payload("hidden")
    thinker.publish(request, "hidden", payload)
    assert a.took(Submit)[0].inputs == b.took(Submit)[0].inputs == {"prompt_embeds": payload}
    thinker.result(request)
    for stage, pull in ((a, "1"), (b, "2")):
        assert not thinker.released()
        stage.pull(request, payload, pull)
        stage.ack(pull)
    assert thinker.released() == [payload.lease]
    a.draws(request)
    assert not master.ends(request)
    b.draws(request)
    assert master.succeeded(request)
    master.assert_idle()
    assert [(edge.payloads, edge.bytes) for edge in status(master).edges] == [(1, 16), (1, 16)]


def test_one_output_may_be_two_inputs_of_one_stage() -> None:
    master = Master(
        deploy(
            thinker=ar(None),
            painter=diffusion(
                prompt="thinker.text",
                negative_prompt="thinker.text",
                prompt_embeds="thinker.hidden",
                generated_prompt_embeds="thinker.hidden",
            ),
        )
    )
    thinker, painter = master.join("thinker"), master.join("painter")
    request = master.submit()
    payload = thinker.payload("hidden")
    thinker.publish(request, "hidden", payload)
    thinker.says(request, "cat")
    (submit,) = painter.took(Submit)
    text = Text(text="cat")
    assert submit.inputs == {
        "prompt": text, "negative_prompt": text, "prompt_embeds": payload, "generated_prompt_embeds": payload
    }  # fmt: skip
    painter.pull(request, payload, "1")
    painter.ack("1")
    assert not thinker.released()
    painter.pull(request, payload, "2")
    painter.ack("2")
    assert thinker.released() == [payload.lease]
    painter.draws(request)
    assert master.succeeded(request)
    master.assert_idle()
    assert sum(edge.payloads for edge in status(master).edges) == 4


def test_a_stage_that_gives_its_payload_early_lets_the_next_one_start_early() -> None:
    master = Master(deploy(thinker=ar(), painter=diffusion(kv="thinker.kv")))
    thinker, painter = master.join("thinker"), master.join("painter")
    request = master.submit()
    thinker.publish(request, "kv", thinker.payload())
    assert painter.submits() == [request]
    painter.draws(request)
    assert not master.ends(request)
    thinker.says(request, "done")
    assert master.succeeded(request)
    assert thinker.released() == ["1.1"]
    master.assert_idle()


def test_a_subset_of_outputs_skips_the_stages_that_it_does_not_need() -> None:
    master = chain()
    thinker, painter = master.join("thinker"), master.join("painter")
    request = master.submit(outputs=["thinker"])
    assert thinker.took(Submit)[0].publish == ()
    thinker.says(request, "text")
    assert master.succeeded(request)
    assert not painter.submits()
    hidden = master.submit(outputs=["painter"])
    assert thinker.took(Submit)[0].emit == ()
    thinker.says(hidden, "text")
    painter.draws(hidden)
    assert master.succeeded(hidden)
    assert master.finished(hidden)["thinker"].outputs == {}
    assert "image" in master.finished(hidden)["painter"].outputs


def test_progress_of_every_stage_is_told() -> None:
    master = chain()
    thinker, _ = master.join("thinker"), master.join("painter")
    request = master.submit()
    thinker.send(
        Chunk(request=request, epoch=thinker.epoch, seq=thinker.seq(request), output="", part=Started(queue_s=0.5))
    )
    (part,) = master.parts(request)
    assert (part.stage, part.output, part.part) == ("thinker", "", Started(queue_s=0.5))


# --- companions -------------------------------------------------------------------------------------------------------


def guided(room: int = 64, replicas: int = 1) -> Master:
    return Master(
        deploy(
            thinker=ArStage(output=Kind.TEXT, replicas=replicas, max_in_flight=room),
            painter=diffusion(kv="thinker.kv", companion="kv"),
        )
    )


def test_a_companion_goes_with_its_prompt_to_one_replica_and_both_outputs_come_together() -> None:
    master = guided(replicas=2)
    thinkers, painter = [master.join("thinker"), master.join("thinker")], master.join("painter")
    request = master.submit("a cat", params={"painter": {"negative_prompt": "a dog"}})
    (thinker,) = [stage for stage in thinkers if stage.in_flight]
    main, companion = thinker.took(Submit)
    assert (main.request, companion.request) == (request, f"{request}.negative")
    assert main.inputs == {"prompt": Text(text="a cat")}
    assert companion.inputs == {"prompt": Text(text="a dog")}
    assert (companion.emit, companion.publish) == ((), ("kv",))
    assert thinker.in_flight == 2
    first, second = thinker.payload(), thinker.payload()
    thinker.publish(f"{request}.negative", "kv", first)
    assert not painter.submits()
    thinker.publish(request, "kv", second)
    (submit,) = painter.took(Submit)
    assert submit.inputs == {"kv": second, "negative_kv": first}
    assert submit.params == DiffusionParams()  # the negative prompt went to the companion
    thinker.delta(f"{request}.negative", "never told")
    thinker.says(request, "text")
    thinker.result(f"{request}.negative")
    painter.draws(request)
    assert master.succeeded(request)
    assert not master.parts(request)
    assert sum(isinstance(news, StageFinished) for news in master.news[request]) == 2
    master.assert_idle()


def test_a_group_waits_until_one_replica_has_room_for_all_of_it() -> None:
    master = guided(room=3)
    thinker, _ = master.join("thinker"), master.join("painter")
    first, second = master.submit(), master.submit()
    assert thinker.submits() == [first, f"{first}.negative"]
    thinker.publish(f"{first}.negative", "kv", thinker.payload())
    thinker.result(f"{first}.negative")
    assert thinker.submits() == [second, f"{second}.negative"]
    assert thinker.in_flight == 3


def test_a_group_fails_together() -> None:
    master = guided()
    thinker, _ = master.join("thinker"), master.join("painter")
    request = master.submit()
    thinker.took(Submit)
    thinker.fails(f"{request}.negative", text="the companion broke")
    error = master.error(request)
    assert (error.code, error.stage, error.message) == (ErrorCode.STAGE_FAILED, "thinker", "the companion broke")
    assert thinker.aborts() == [request]
    assert thinker.in_flight == 1
    thinker.aborted(request)
    master.assert_idle()


# --- limits -----------------------------------------------------------------------------------------------------------


def test_requests_beyond_the_limits_wait_and_beyond_that_are_refused() -> None:
    master = solo(LimitsSpec(max_requests=2, max_queued=1))
    thinker = master.join("thinker")
    first, second, third, fourth = (master.submit() for _ in range(4))
    assert thinker.submits() == [first, second]
    assert (status(master).running, status(master).queued) == (2, 1)
    error = master.error(fourth)
    assert error.code is ErrorCode.QUEUE_FULL
    assert error.retry_after_s is not None
    assert "2 requests are running and 1 are waiting" in error.message
    thinker.says(second, "x")
    assert thinker.submits() == [third]
    for request in (first, third):
        thinker.says(request, "x")
        assert master.succeeded(request)
    assert status(master).failed == {"queue_full": 1}
    assert status(master).done == 3
    master.assert_idle()


def test_a_replica_never_holds_more_than_max_in_flight_and_the_oldest_is_next() -> None:
    master = solo(room=2)
    thinker = master.join("thinker")
    requests = [master.submit() for _ in range(6)]
    started = thinker.submits()
    assert started == requests[:2]
    while started:
        assert thinker.in_flight == len(started)
        thinker.says(started.pop(0), "x")
        started += thinker.submits()
    assert all(master.succeeded(request) for request in requests)
    master.assert_idle()


def test_a_queued_request_can_be_cancelled() -> None:
    master = solo(LimitsSpec(max_requests=1))
    thinker = master.join("thinker")
    running, queued = master.submit(), master.submit()
    master.cancel(queued)
    assert master.error(queued).code is ErrorCode.ABORTED
    assert not thinker.aborts()
    thinker.says(running, "x")
    assert thinker.submits() == [running]
    master.assert_idle()


def test_without_a_ready_stage_a_request_is_refused_at_once_by_name() -> None:
    master = chain()
    master.join("thinker")
    request = master.submit()
    error = master.error(request)
    assert (error.code, error.stage) == (ErrorCode.STAGE_UNAVAILABLE, "painter")
    assert error.retry_after_s is not None
    assert not master.ends(master.submit(outputs=["thinker"]))


def test_a_request_ends_at_its_deadline_and_says_what_was_not_done() -> None:
    master = chain(request_timeout=5.0)
    thinker, painter = master.join("thinker"), master.join("painter")
    request = master.submit()
    thinker.says(request, "x")
    for _ in range(4):
        master.wait(1)
        thinker.beat()
        painter.beat()
    assert not master.ends(request)
    master.wait(1)
    error = master.error(request)
    assert error.code is ErrorCode.DEADLINE
    assert "unfinished: painter" in error.message
    assert painter.aborts() == [request]
    painter.aborted(request)
    master.assert_idle()


def test_a_queued_request_has_the_same_deadline() -> None:
    master = solo(LimitsSpec(max_requests=1, request_timeout=2.0))
    master.join("thinker")
    running = master.submit()
    master.wait(1)
    queued = master.submit()
    master.wait(1)
    assert master.error(running).code is ErrorCode.DEADLINE
    assert not master.ends(queued)
    master.wait(1)
    assert master.error(queued).code is ErrorCode.DEADLINE


# --- endings ----------------------------------------------------------------------------------------------------------


def test_an_abort_reaches_every_stage_that_has_the_request_and_only_the_answer_frees_the_slot() -> None:
    master = Master(
        deploy(thinker=ar(), a=ar(prompt="thinker.text"), b=ar(prompt="thinker.text"), c=diffusion(prompt="b.text"))
    )
    stages = {name: master.join(name) for name in ("thinker", "a", "b", "c")}
    request = master.submit()
    stages["thinker"].says(request, "x")
    master.cancel(request)
    assert master.error(request).code is ErrorCode.ABORTED
    assert {name: stage.aborts() for name, stage in stages.items()} == {
        "thinker": [], "a": [request], "b": [request], "c": []
    }  # fmt: skip
    assert (stages["a"].in_flight, stages["b"].in_flight) == (1, 1)
    stages["a"].aborted(request)
    assert (stages["a"].in_flight, stages["b"].in_flight) == (0, 1)
    stages["a"].aborted(request)  # twice
    stages["b"].says(request, "done before the abort came")
    stages["b"].aborted(request)
    master.assert_idle()
    assert len(master.ends(request)) == 1


def test_the_freed_slot_goes_to_the_one_who_waits() -> None:
    master = solo(room=1)
    thinker = master.join("thinker")
    first, second = master.submit(), master.submit()
    assert thinker.submits() == [first]
    master.cancel(first)
    assert not thinker.submits()
    thinker.aborted(first)
    assert thinker.submits() == [second]


def test_after_the_end_nothing_more_is_told() -> None:
    master = solo()
    thinker = master.join("thinker")
    request = master.submit()
    master.cancel(request)
    told = len(master.news[request])
    thinker.delta(request, "late")
    thinker.publish(request, "kv", thinker.payload())
    thinker.says(request, "late")
    thinker.fails(request)
    master.cancel(request)
    assert len(master.news[request]) == told
    assert thinker.released() == ["1.1"]
    master.assert_idle()


def test_a_failed_stage_names_itself_and_leaves_other_requests_alone() -> None:
    master = chain()
    thinker, painter = master.join("thinker"), master.join("painter")
    bad, good = master.submit(), master.submit()
    thinker.says(bad, "x")
    thinker.says(good, "x")
    painter.fails(bad, text="out of memory")
    painter.draws(good)
    error = master.error(bad)
    assert (error.code, error.stage, error.message) == (ErrorCode.STAGE_FAILED, "painter", "out of memory")
    assert master.succeeded(good)
    master.assert_idle()


def test_a_stage_that_finishes_without_what_others_need_fails_the_request() -> None:
    master = Master(deploy(thinker=ar(), painter=diffusion(kv="thinker.kv")))
    thinker, painter = master.join("thinker"), master.join("painter")
    request = master.submit()
    thinker.says(request, "no kv")
    error = master.error(request)
    assert (error.code, error.stage) == (ErrorCode.STAGE_FAILED, "thinker")
    assert "'kv'" in error.message
    assert "painter.kv" in error.message
    assert not painter.submits()
    master.assert_idle()


@pytest.mark.parametrize("gone", ["a", "b"])
def test_two_outputs_in_one_result_cannot_end_a_request_twice(gone: str) -> None:
    """One output's stage is gone, so the request fails; the other output must not bring it back."""
    master = Master(
        deploy(thinker=ar(None), a=diffusion(prompt="thinker.text"), b=diffusion(prior_token_ids="thinker.tokens"))
    )
    stages = {name: master.join(name) for name in ("thinker", "a", "b")}
    request = master.submit()
    stages.pop(gone).die()
    stages["thinker"].result(request, text=Text(text="x"), tokens=Tokens(ids=(1,)))
    error = master.error(request)
    assert (error.code, error.stage) == (ErrorCode.STAGE_UNAVAILABLE, gone)
    for stage in stages.values():
        sent = stage.submits()
        assert stage.aborts() == (sent if stage is not stages["thinker"] else [])
        stage.aborted(request)
    master.assert_idle()


def test_stop_fails_all_that_is_here_and_takes_nothing_more() -> None:
    master = solo(LimitsSpec(max_requests=1))
    thinker = master.join("thinker")
    running, queued = master.submit(), master.submit()
    master.handle(StopAsked("the master is going home"))
    for request in (running, queued):
        error = master.error(request)
        assert (error.code, error.message) == (ErrorCode.SHUTTING_DOWN, "the master is going home")
    assert thinker.aborts() == [running]
    assert master.error(master.submit()).code is ErrorCode.SHUTTING_DOWN
    assert thinker.submits() == [running]
    thinker.aborted(running)
    master.assert_idle()


def test_cancelling_what_is_unknown_does_nothing() -> None:
    assert solo().handle(Cancelled(RequestId("nobody"))) == []


def test_five_thousand_queued_requests_can_fail_at_once() -> None:
    """None of them may start another inside its own end: the stack would not hold it."""
    master = solo(LimitsSpec(max_requests=1, max_queued=5000))
    thinker = master.join("thinker")
    check, master.core.orchestrator.check_integrity = master.core.orchestrator.check_integrity, lambda: None  # type: ignore[method-assign]
    requests = [master.submit() for _ in range(5001)]
    master.core.orchestrator.check_integrity = check  # type: ignore[method-assign]
    thinker.die()
    assert all(
        master.error(request).code in (ErrorCode.STAGE_UNAVAILABLE, ErrorCode.REPLICA_LOST) for request in requests
    )
    master.assert_idle()


# --- order on the wire ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_out_of_order_and_doubled_messages_are_put_right(seed: int) -> None:
    master = solo()
    thinker = master.join("thinker")
    request = master.submit()
    rng = random.Random(seed)
    words = [f"{i} " for i in range(30)]
    chunks = [thinker.chunk(request, word) for word in words]
    shuffled = chunks + rng.sample(chunks, 10)
    rng.shuffle(shuffled)
    for chunk in shuffled:
        thinker.send(chunk)
    thinker.says(request, "".join(words))
    assert [part.part for part in master.parts(request)] == [TextDelta(text=word) for word in words]
    assert master.succeeded(request)


def test_a_result_that_overtakes_a_chunk_waits_for_it() -> None:
    master = solo()
    thinker = master.join("thinker")
    request = master.submit()
    chunk = thinker.chunk(request, "word")
    thinker.says(request, "word")
    assert not master.ends(request)
    thinker.send(chunk)
    assert master.succeeded(request)
    assert len(master.parts(request)) == 1


def test_a_message_that_never_comes_fails_its_request_only() -> None:
    master = solo()
    thinker = master.join("thinker")
    broken, fine = master.submit(), master.submit()
    thinker.seq(broken)
    for _ in range(MAX_HELD + 1):
        thinker.delta(broken, "x")
    error = master.error(broken)
    assert (error.code, error.stage) == (ErrorCode.PROTOCOL, "thinker")
    assert "message 0 is missing" in error.message
    thinker.says(fine, "x")
    assert master.succeeded(fine)
    assert thinker.aborts() == [broken]


def test_messages_about_what_a_stage_does_not_run_change_nothing() -> None:
    master = chain()
    thinker, painter = master.join("thinker"), master.join("painter")
    request = master.submit()
    painter.draws(request)  # not its turn
    thinker.fails(f"{request}.negative")  # no such companion
    thinker.fails("nobody")
    assert not master.news[request]
    thinker.says(request, "x")
    assert painter.submits() == [request]


# --- balancing --------------------------------------------------------------------------------------------------------


def test_round_robin_takes_turns_and_passes_over_the_full_and_the_lost() -> None:
    master = solo(replicas=3, balance=Balance.ROUND_ROBIN, room=2)
    stages = [master.join("thinker") for _ in range(3)]
    for _ in range(6):
        master.submit()
    assert [stage.in_flight for stage in stages] == [2, 2, 2]
    first = [stage.submits() for stage in stages]
    stages[1].says(first[1][0], "x")
    extra = master.submit()
    assert stages[1].submits() == [extra]
    stages[0].die()  # its requests wait for room with the others
    assert not stages[1].submits()
    stages[2].says(first[2][0], "x")
    assert stages[2].submits() == first[0][:1]


def test_least_loaded_counts_what_is_in_flight() -> None:
    master = solo(replicas=3)
    stages = [master.join("thinker") for _ in range(3)]
    for _ in range(6):
        master.submit()
    assert [stage.in_flight for stage in stages] == [2, 2, 2]
    for request in stages[2].submits():
        stages[2].says(request, "x")
    assert [stage.in_flight for stage in stages] == [2, 2, 0]
    for _ in range(2):
        master.submit()
    assert [stage.in_flight for stage in stages] == [2, 2, 2]


def test_random_balancing_uses_every_replica_and_comes_again_with_its_seed() -> None:
    def loads() -> list[int]:
        master = solo(replicas=4, balance=Balance.RANDOM)
        stages = [master.join("thinker") for _ in range(4)]
        for _ in range(60):
            master.submit()
        return [stage.in_flight for stage in stages]

    assert loads() == loads()
    assert min(loads()) > 0


def test_requests_of_one_affinity_stay_on_one_replica_while_it_lives() -> None:
    master = solo(replicas=3, balance=Balance.ROUND_ROBIN)
    stages = [master.join("thinker") for _ in range(3)]
    for _ in range(5):
        master.submit(affinity="alice")
        master.submit(affinity="bob")
    assert sorted(stage.in_flight for stage in stages) == [0, 5, 5]
    (home,) = [stage for stage in stages if stage.in_flight and stage is not stages[1]]
    home.die()
    before = [stage.in_flight for stage in stages[1:]]
    for _ in range(4):
        master.submit(affinity="alice")
    assert sorted(after - b for after, b in zip([s.in_flight for s in stages[1:]], before, strict=True)) == [0, 4]


def test_affinity_gives_way_to_room() -> None:
    master = solo(replicas=2, room=1)
    stages = [master.join("thinker") for _ in range(2)]
    master.submit(affinity="alice")
    master.submit(affinity="alice")
    assert [stage.in_flight for stage in stages] == [1, 1]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_the_status_is_json_whatever_numbers_a_stage_reports(number: float) -> None:
    """A stage may report a step time that is no number; nobody who asks for the status may suffer from that."""
    master = solo()
    stage = master.join("thinker")
    stage.say(Heartbeat(epoch=stage.epoch, steps=1, queued=0, running=0, step_s=number))
    body = msgspec.json.encode(status(master))
    assert msgspec.json.decode(body, type=PipelineStatus).stages[0].replicas[0].step_s == 0.0
