"""Payloads under way through the master: who may pull what, and when the source may forget it. `omni.leases`."""

import msgspec
import pytest

from proto.deploy import ArStage, Kind, LimitsSpec
from proto.errors import ErrorCode
from proto.ids import Epoch, LeaseId, PullId, RequestId
from proto.messages import Images, Nack, Payload, Piece, Published, Pull, PullRefused, Submit, Tensor
from tests.unit.drive import ITEM, Master, Stage, ar, deploy, diffusion


class Pair:
    """A thinker that has published a payload for a request, and a painter that has got the request."""

    def __init__(self, limits: LimitsSpec | None = None) -> None:
        self.master = Master(
            deploy(
                limits,
                thinker=ArStage(output=Kind.TEXT, replicas=2),
                painter=diffusion(kv="thinker.kv", replicas=2),
            )
        )
        self.thinker, self.painter = self.master.join("thinker"), self.master.join("painter")
        self.request = self.master.submit()
        self.payload = self.thinker.payload(items=2)
        self.thinker.publish(self.request, "kv", self.payload)

    def error(self) -> ErrorCode:
        return self.master.error(self.request).code

    def piece(self, pull: str, first: int = 0, source: Stage | None = None) -> None:
        source = source or self.thinker
        source.send(Piece(epoch=source.epoch, pull=PullId(pull), first=first, tensors=(ITEM.ref,)), ITEM)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def refused(stage: Stage) -> list[str]:
    return [message.reason for message in stage.took(PullRefused)]


# --- relaying ---------------------------------------------------------------------------------------------------------


def test_a_payload_is_pulled_piece_by_piece_and_released_after_the_acknowledgement(pair: Pair) -> None:
    for first in (0, 1):
        pair.painter.pull(pair.request, pair.payload, "p", first)
        (pull,) = pair.thinker.took(Pull)
        assert (pull.first, pull.lease, pull.epoch) == (first, pair.payload.lease, pair.thinker.epoch)
        pair.piece("p", first)
        (piece,) = pair.painter.took(Piece)
        assert (piece.first, piece.epoch, piece.tensors) == (first, pair.painter.epoch, (ITEM.ref,))
    assert pair.master.core.leases.nbytes == 32
    pair.painter.ack("p")
    assert pair.thinker.released() == [pair.payload.lease]
    assert len(pair.master.core.leases) == 0
    pair.painter.ack("p")
    assert not pair.thinker.released()


def test_pieces_go_to_nobody_but_the_one_who_pulls(pair: Pair) -> None:
    other = pair.master.join("thinker")
    pair.painter.pull(pair.request, pair.payload, "p")
    pair.piece("p", source=other)
    pair.piece("unknown")
    assert not pair.painter.took(Piece)


def test_a_source_that_cannot_give_it_refuses_the_pull(pair: Pair) -> None:
    pair.painter.pull(pair.request, pair.payload, "p")
    pair.thinker.send(PullRefused(epoch=pair.thinker.epoch, pull=PullId("p"), reason="its lease has ended"))
    assert refused(pair.painter) == ["its lease has ended"]
    pair.painter.send(Nack(epoch=pair.painter.epoch, pull=PullId("p"), reason="its lease has ended"))
    pair.painter.fails(pair.request, ErrorCode.PAYLOAD_LOST, "thinker.kv -> painter.kv lost")
    assert pair.error() is ErrorCode.PAYLOAD_LOST
    assert pair.thinker.released() == [pair.payload.lease]


def test_a_pull_may_be_given_up_and_begun_again(pair: Pair) -> None:
    pair.painter.pull(pair.request, pair.payload, "1")
    pair.painter.send(Nack(epoch=pair.painter.epoch, pull=PullId("1"), reason="damaged"))
    pair.piece("1")
    assert not pair.painter.took(Piece)
    pair.painter.pull(pair.request, pair.payload, "2")
    pair.piece("2")
    assert len(pair.painter.took(Piece)) == 1


# --- who may pull -----------------------------------------------------------------------------------------------------


def test_a_consumer_can_pull_only_what_was_granted_to_it(pair: Pair) -> None:
    other = pair.master.join("painter")
    second = pair.master.submit()
    wrong = [
        (other, pair.request, pair.payload),  # it runs on the first painter
        (pair.painter, second, pair.payload),  # another request's
        (pair.thinker, pair.request, pair.payload),  # the source is no consumer
        (pair.painter, pair.request, msgspec.structs.replace(pair.payload, lease=LeaseId("1.99"))),
        (pair.painter, pair.request, msgspec.structs.replace(pair.payload, epoch=Epoch(99))),
    ]
    for number, (stage, request, payload) in enumerate(wrong):
        stage.pull(request, payload, f"wrong-{number}")
        assert len(refused(stage)) == 1, number
    assert not pair.thinker.took(Pull)
    assert not pair.master.core.leases._pulls


def test_a_pull_cannot_take_over_the_number_of_another(pair: Pair) -> None:
    thinker, painter = pair.thinker, pair.master.join("painter")
    second = pair.master.submit()
    payload = thinker.payload()
    thinker.publish(second, "kv", payload)
    assert painter.submits() == [second]
    pair.painter.pull(pair.request, pair.payload, "p")
    painter.pull(second, payload, "p")
    assert refused(painter) == ["another pull has this number"]
    pair.piece("p")
    assert pair.painter.took(Piece)
    assert not painter.took(Piece)


def test_what_was_acknowledged_cannot_be_pulled_again() -> None:
    master = Master(deploy(thinker=ar(None), a=diffusion(kv="thinker.kv"), b=diffusion(kv="thinker.kv")))
    thinker, a, b = master.join("thinker"), master.join("a"), master.join("b")
    request = master.submit()
    payload = thinker.payload()
    thinker.publish(request, "kv", payload)
    a.pull(request, payload, "1")
    a.ack("1")
    a.pull(request, payload, "2")
    assert refused(a)
    b.pull(request, payload, "3")
    assert not refused(b)


# --- every ending -----------------------------------------------------------------------------------------------------


def test_leases_end_with_a_request_that_fails_or_is_aborted() -> None:
    for ending in ("failed", "aborted"):
        pair = Pair()
        pair.painter.pull(pair.request, pair.payload, "p")
        if ending == "failed":
            pair.painter.fails(pair.request)
        else:
            pair.master.cancel(pair.request)
            pair.painter.aborted(pair.request)
        assert pair.thinker.released() == [pair.payload.lease]
        pair.thinker.aborted(pair.request)
        pair.master.assert_idle()
        pair.piece("p")
        assert not pair.painter.took(Piece)


def test_a_lost_source_is_told_to_who_pulls_from_it(pair: Pair) -> None:
    pair.thinker.says(pair.request, "done")
    pair.painter.pull(pair.request, pair.payload, "p")
    pair.thinker.die()
    (reason,) = refused(pair.painter)
    assert "thinker/0" in reason
    pair.painter.pull(pair.request, pair.payload, "again")
    assert refused(pair.painter)
    pair.painter.fails(pair.request, ErrorCode.PAYLOAD_LOST)
    assert pair.error() is ErrorCode.PAYLOAD_LOST
    pair.master.assert_idle()


def test_a_lost_consumer_leaves_the_payload_for_its_successor(pair: Pair) -> None:
    pair.thinker.says(pair.request, "done")
    successor = pair.master.join("painter")
    pair.painter.pull(pair.request, pair.payload, "p")
    pair.painter.die()
    assert not pair.thinker.released()
    (submit,) = successor.took(Submit)
    assert submit.inputs == {"kv": pair.payload}
    pair.piece("p")
    successor.pull(pair.request, pair.payload, "q")
    successor.ack("q")
    assert pair.thinker.released() == [pair.payload.lease]
    successor.draws(pair.request)
    assert pair.master.succeeded(pair.request)
    pair.master.assert_idle()


def test_a_consumer_lost_after_its_acknowledgement_cannot_be_replaced(pair: Pair) -> None:
    successor = pair.master.join("painter")
    pair.painter.pull(pair.request, pair.payload, "p")
    pair.painter.ack("p")
    pair.painter.die()
    assert pair.error() is ErrorCode.REPLICA_LOST
    assert not successor.submits()


def test_a_payload_that_nobody_takes_is_released_at_once() -> None:
    master = Master(deploy(thinker=ar(), painter=diffusion(kv="thinker.kv")))
    thinker, _ = master.join("thinker"), master.join("painter")
    request = master.submit(outputs=["thinker"])
    thinker.publish(request, "kv", thinker.payload())
    assert thinker.released() == ["1.1"]
    thinker.says(request, "x")
    assert master.succeeded(request)


def test_a_payload_over_the_limit_fails_its_request_with_both_numbers() -> None:
    pair = Pair(LimitsSpec(max_payload_bytes=31))
    error = pair.master.error(pair.request)
    assert (error.code, error.stage) == (ErrorCode.PAYLOAD_LOST, "thinker")
    assert "32 bytes" in error.message
    assert "limits.max_payload_bytes is 31" in error.message
    assert pair.thinker.released() == [pair.payload.lease]
    assert not pair.painter.submits()
    pair.thinker.aborted(pair.request)
    pair.master.assert_idle()


# --- what a stage may publish -----------------------------------------------------------------------------------------


def test_a_second_notice_of_a_payload_does_not_take_it_away(pair: Pair) -> None:
    """A doubled message that comes when its sender is done already, and the consumer not yet."""
    pair.thinker.says(pair.request, "done")
    pair.thinker.send(Published(request=pair.request, epoch=pair.thinker.epoch, seq=0, output="kv", value=pair.payload))
    assert not pair.thinker.released()
    pair.painter.pull(pair.request, pair.payload, "p")
    assert not refused(pair.painter)


def _forged(pair: Pair) -> list[Payload]:
    own = pair.thinker.payload()
    return [
        pair.payload,  # its own, but of another request
        msgspec.structs.replace(own, epoch=Epoch(99)),
        msgspec.structs.replace(own, replica=1),
        msgspec.structs.replace(own, source=pair.painter.stage, epoch=pair.painter.epoch),
    ]


@pytest.mark.parametrize("case", range(4))
def test_a_stage_that_publishes_what_is_not_its_to_give_fails_that_request_only(pair: Pair, case: int) -> None:
    payload = _forged(pair)[case]
    bad = pair.master.submit()
    pair.thinker.publish(bad, "kv", payload)
    error = pair.master.error(bad)
    assert (error.code, error.stage) == (ErrorCode.PROTOCOL, "thinker")
    pair.thinker.aborted(bad)
    assert not pair.thinker.released()
    pair.thinker.says(pair.request, "x")
    pair.painter.pull(pair.request, pair.payload, "p")
    assert not refused(pair.painter)
    pair.painter.draws(pair.request)
    assert pair.master.succeeded(pair.request)
    pair.master.assert_idle()


def test_late_notices_of_others_payloads_release_nothing(pair: Pair) -> None:
    other = pair.master.join("thinker")
    other.send(Published(request=RequestId("nobody"), epoch=other.epoch, seq=0, output="kv", value=pair.payload))
    assert not pair.thinker.released()
    assert len(pair.master.core.leases) == 1


@pytest.mark.parametrize("value", [Tensor(tensor=0), Images(tensor=0)])
def test_tensors_cross_an_edge_as_payloads_only(pair: Pair, value: Tensor | Images) -> None:
    bad = pair.master.submit()
    message = Published(request=bad, epoch=pair.thinker.epoch, seq=0, output="kv", value=value, tensors=(ITEM.ref,))
    pair.thinker.send(message, ITEM)
    error = pair.master.error(bad)
    assert (error.code, error.stage) == (ErrorCode.PROTOCOL, "thinker")
    assert "as payloads" in error.message


def test_a_notice_that_waited_for_a_missing_message_is_released_when_its_request_ends(pair: Pair) -> None:
    request = pair.master.submit()
    early = pair.thinker.payload()
    pair.thinker.seq(request)  # a message that is still on its way
    pair.thinker.publish(request, "kv", early)
    assert not pair.thinker.released()
    pair.master.cancel(request)
    assert pair.thinker.released() == [early.lease]
    assert len(pair.master.core.leases) == 1
