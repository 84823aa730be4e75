"""Messages of a usual size, as a two-stage deploy sends them."""

from proto.deploy import ArStage, LimitsSpec, Link
from proto.ids import Epoch, PullId, RequestId, Session
from proto.messages import (
    Chunk,
    DataMessage,
    Heartbeat,
    Piece,
    Result,
    Submit,
    Text,
    TextDelta,
    Timings,
    Usage,
    Welcome,
)
from proto.params import SamplingParams
from proto.tensors import WireTensor

REQUEST, EPOCH = RequestId("01JDZK3V7Q8W4M2N5P6R9S0T1X"), Epoch(1732970000123)
BULK_BYTES = 64 << 20

SUBMIT = Submit(
    request=REQUEST,
    epoch=EPOCH,
    inputs={"prompt": Text(text="A red fox crossing a frozen river at dawn, in the style of an old woodcut print.")},
    params=SamplingParams(max_tokens=128, temperature=0.7, top_p=0.9, seed=7, stop=("END",)),
    emit=("text",),
    publish=("text",),
)
CHUNK = Chunk(request=REQUEST, epoch=EPOCH, seq=17, output="text", part=TextDelta(text=" frozen"))
RESULT = Result(
    request=REQUEST,
    epoch=EPOCH,
    seq=40,
    outputs={"text": Text(text="A fox the colour of rust steps onto the ice. " * 4)},
    usage=Usage(24, 41),
    timings=Timings(0.0003, 0.82, 0.0, {"first_token": 0.05, "encode": 0.002}),
)
HEARTBEAT = Heartbeat(epoch=EPOCH, steps=918273, queued=3, running=8, step_s=0.0213, rss_bytes=1_288_490_188)
WELCOME = Welcome(
    session=Session("f3a9c1d2e4b5a6978812345678abcdef"),
    epoch=EPOCH,
    replica=1,
    pipeline="painter",
    spec=ArStage(inputs={"prompt": Link(source="thinker.text")}),
    limits=LimitsSpec(),
    publishes=("text",),
    data_port=43117,
    heartbeat_s=1.0,
    config_hash="9b2c4d6e8f0a1b3c",
)


def bulk(tensor: WireTensor) -> tuple[Piece, list[WireTensor]]:
    """A piece of a payload that holds one tensor."""
    return Piece(epoch=EPOCH, pull=PullId("p-1"), first=0, tensors=(tensor.ref,)), [tensor]


def name_of(message: object) -> str:
    return type(message).__name__


CONTROL: tuple[Heartbeat | Welcome, ...] = (HEARTBEAT, WELCOME)
DATA: tuple[DataMessage, ...] = (SUBMIT, CHUNK, RESULT)
