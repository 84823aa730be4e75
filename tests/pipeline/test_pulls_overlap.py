"""The next request's keys and values travel while the engine draws: neither waits for the other."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from proto.ids import Epoch, LeaseId, RequestId, StageName
from proto.messages import Ack, Payload, PayloadTensor, Piece, Pull, Result
from proto.params import DiffusionParams
from stages.payload.store import checksum
from tests.pipeline.engines import digest, kv_tensors
from tests.pipeline.harness import fake_painter, omni_stage, until
from tests.pipeline.raw_master import EPOCH, RawMaster

pytestmark = pytest.mark.usefixtures("no_leftovers")

STEPS = 5
FIRST, SECOND = RequestId("first"), RequestId("second")
KV = kv_tensors("a red star", 2, 1 << 16)


class Drawing(RawMaster):
    """With a painter, asked for two pictures: one of a prompt alone, one whose keys and values the painter must pull."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__()
        self.inside, self.gate = tmp_path / "inside", tmp_path / "gate"

    def take_in(self) -> None:
        options = {"inside": str(self.inside), "gate": str(self.gate)}
        self.welcome(fake_painter(use="tests.pipeline.engines:HeldInStep", options=options))

    def draw(self, request: RequestId, **inputs: Payload) -> None:
        self.submit("", request, DiffusionParams(num_inference_steps=STEPS), "image", **inputs)

    def give(self, pull: Pull) -> None:
        refs = tuple(tensor.ref for tensor in KV.values())
        piece = Piece(epoch=EPOCH, pull=pull.pull, first=pull.first, tensors=refs)
        self.send(piece, list(KV.values()))

    def drawn(self) -> tuple[RequestId, bytes]:
        """The next picture that is done, and whose it is."""
        result = self.got(Result)
        return result.request, bytes(self.tensors[0].data)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Drawing]:
    with Drawing(tmp_path) as master, omni_stage(master.url, "painter", tmp_path / "log"):
        master.take_in()
        yield master


def payload() -> Payload:
    items = tuple(PayloadTensor(name, tensor.ref, checksum(tensor)) for name, tensor in KV.items())
    return Payload(lease=LeaseId("1.1"), source=StageName("thinker"), replica=0, epoch=Epoch(7), kind="kv", items=items)


def test_a_pull_ends_while_the_engine_is_inside_one_step_of_another_request(master: Drawing) -> None:
    master.draw(FIRST)
    until(master.inside.exists, "the engine is inside a step")
    master.draw(SECOND, kv=payload())
    master.give(master.got(Pull))
    master.got(Ack)  # and still nobody has let the step end
    master.gate.touch()
    pictures = dict([master.drawn(), master.drawn()])
    assert pictures.keys() == {FIRST, SECOND}
    assert pictures[SECOND].startswith(digest(KV))


def test_others_are_drawn_to_their_end_while_a_pull_is_not_answered(master: Drawing) -> None:
    master.gate.touch()
    master.draw(SECOND, kv=payload())
    pull = master.got(Pull)
    master.draw(FIRST)
    assert master.drawn()[0] == FIRST
    master.give(pull)
    request, picture = master.drawn()
    assert request == SECOND
    assert picture.startswith(digest(KV))
