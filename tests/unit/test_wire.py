"""Framing: whatever bytes come in, a whole checked message comes out, or ProtocolError."""

import os
import pickle
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proto.deploy import ArStage, DiffusionStage, LimitsSpec
from proto.errors import ErrorCode, ErrorInfo, ProtocolError
from proto.framing import CONTROL_DOWN, CONTROL_UP, DATA_DOWN, DATA_UP, MAX_CONTROL_BYTES, MAX_HEADER_BYTES, Lane
from proto.framing import tensor_at as at
from proto.ids import CallId, Epoch, PullId, RequestId, Session, StageName
from proto.messages import (
    MAX_FRAMES,
    Abort,
    Attach,
    Attached,
    BeatAck,
    Call,
    CallReply,
    Chunk,
    ControlDown,
    ControlUp,
    DataDown,
    DataUp,
    Failed,
    Hello,
    Images,
    LoadFailed,
    Partial,
    Piece,
    Preview,
    Published,
    Pull,
    PullRefused,
    Refuse,
    Result,
    Submit,
    Tensor,
    Text,
    Welcome,
)
from proto.params import MAX_JSON_DEPTH, MAX_JSON_ITEMS, DiffusionParams, SamplingParams
from proto.tensors import Dtype, TensorRef, WireTensor
from tests.unit.strategies import frames_of, json_data, union_members, whole_messages

LANES: dict[str, tuple[Lane[Any], object]] = {
    "control up": (CONTROL_UP, ControlUp),
    "control down": (CONTROL_DOWN, ControlDown),
    "data up": (DATA_UP, DataUp),
    "data down": (DATA_DOWN, DataDown),
}
BY_NAME = pytest.mark.parametrize("name", LANES)
REQUEST, EPOCH = RequestId("r1"), Epoch(1)
U8 = TensorRef(Dtype.U8, (4,))
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))

pack = msgspec.msgpack.encode


def pack_call(data: bytes) -> bytes:
    """A Call whose args hold these raw msgpack bytes."""
    return pack({"t": "call", "epoch": 1, "call": 1, "method": "m", "args": {"a": 0}})[:-1] + data


def submit(**fields: object) -> dict[str, object]:
    """A valid Submit as a plain map, with fields replaced."""
    return {"t": "submit", "request": "r", "epoch": 1, "inputs": {}, "params": {"type": "ar"}, **fields}


# --- what is sent arrives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lane", "union", "cls"),
    [
        pytest.param(lane, u, cls, id=f"{n}-{cls.__name__}")
        for n, (lane, u) in LANES.items()
        for cls in union_members(u)
    ],
)
@quick
@given(data=st.data())
def test_every_message_of_every_lane_survives_the_round_trip(
    lane: Lane[Any], union: object, cls: Any, data: st.DataObject
) -> None:
    message, tensors = data.draw(whole_messages(cls))
    back, frames = lane.decode(frames_of(lane, (message, tensors)))
    assert back == message
    assert type(back) is cls
    assert [(t.ref, bytes(t.data)) for t in frames] == [(t.ref, bytes(t.data)) for t in tensors]


def test_the_lanes_hold_every_message_that_the_protocol_has() -> None:
    assert {cls.__name__ for cls in union_members(ControlUp)} >= {"Hello", "Heartbeat", "Ready", "CallReply"}
    assert {cls.__name__ for cls in union_members(DataDown)} >= {"Submit", "Piece", "Release"}


@quick
@given(value=json_data)
def test_user_data_arrives_as_it_was_sent(value: object) -> None:
    sent = Call(
        epoch=EPOCH, call=CallId(1), method="m", args={"data": value, "dtype": "uint8", "shape": [4], "t": "hello"}
    )
    assert CONTROL_DOWN.decode(frames_of(CONTROL_DOWN, (sent, [])))[0] == sent


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_frames_may_be_bytes_bytearrays_or_memoryviews(wrap: Any) -> None:
    frames = [
        wrap(f)
        for f in frames_of(
            DATA_UP, (Piece(epoch=EPOCH, pull=PullId("p"), first=0, tensors=(U8,)), [WireTensor(U8, b"abcd")])
        )
    ]
    assert bytes(DATA_UP.decode(frames)[1][0].data) == b"abcd"


def test_a_tensor_frame_is_passed_through_without_a_copy() -> None:
    data = memoryview(bytearray(4))
    message = Piece(epoch=EPOCH, pull=PullId("p"), first=0, tensors=(U8,))
    frames = DATA_UP.encode(message, [WireTensor(U8, data)])
    assert frames[1] is data
    assert DATA_UP.decode(frames)[1][0].data is data


def test_a_message_with_all_its_frames_allowed_passes_and_one_more_does_not() -> None:
    scalar = TensorRef(Dtype.U8, ())
    tensors = [WireTensor(scalar, b"x")] * MAX_FRAMES
    message = Piece(epoch=EPOCH, pull=PullId("p"), first=0, tensors=(scalar,) * MAX_FRAMES)
    assert len(DATA_UP.decode(DATA_UP.encode(message, tensors))[1]) == MAX_FRAMES
    more = Piece(epoch=EPOCH, pull=PullId("p"), first=0, tensors=(scalar,) * (MAX_FRAMES + 1))
    with pytest.raises(ProtocolError, match=str(MAX_FRAMES)):
        DATA_UP.encode(more, [WireTensor(scalar, b"x")] * (MAX_FRAMES + 1))
    with pytest.raises(ProtocolError, match=str(MAX_FRAMES)):
        DATA_UP.decode([pack(more), *[b"x"] * (MAX_FRAMES + 1)])


# --- strangers and mistakes are refused -------------------------------------------------------------------------------


@BY_NAME
@quick
@given(data=st.data())
def test_an_unknown_field_is_refused(name: str, data: st.DataObject) -> None:
    lane, union = LANES[name]
    message, tensors = data.draw(whole_messages(union))
    header, *frames = frames_of(lane, (message, tensors))
    widened = msgspec.msgpack.decode(header) | {"surprise": 1}
    with pytest.raises(ProtocolError, match="surprise"):
        lane.decode([pack(widened), *frames])


@pytest.mark.parametrize(
    "inside", [{"params": {"type": "ar", "x": 1}}, {"inputs": {"p": {"t": "text", "text": "", "x": 1}}}]
)
def test_an_unknown_field_inside_a_message_is_refused(inside: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="unknown field `x`"):
        DATA_DOWN.decode([pack(submit(**inside))])


@BY_NAME
@quick
@given(data=st.data())
def test_a_message_of_another_lane_is_refused(name: str, data: st.DataObject) -> None:
    lane, union = LANES[name]
    here = set(union_members(union))
    foreign = [(other, cls) for other, u in LANES.values() for cls in union_members(u) if cls not in here]
    other, cls = data.draw(st.sampled_from(foreign))
    with pytest.raises(ProtocolError):
        lane.decode(frames_of(other, data.draw(whole_messages(cls))))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", "1"),
        ("epoch", 1.5),
        ("epoch", True),
        ("epoch", None),
        ("epoch", -1),
        ("epoch", [1]),
        ("epoch", b"\x01"),
        ("request", 5),
        ("request", b"r"),
        ("request", "r" * 257),
        ("inputs", []),
        ("inputs", {1: {"t": "text", "text": ""}}),
        ("inputs", {"prompt": {"t": "hello"}}),
        ("inputs", {"prompt": "plain text"}),
        ("inputs", {"prompt": {"t": "tensor", "tensor": -1}}),
        ("params", {}),
        ("params", {"type": "painter"}),
        ("params", {"type": "ar", "temperature": float("nan")}),
        ("params", {"type": "ar", "max_tokens": 0}),
        ("params", {"type": "diffusion", "width": 10**9}),
        ("emit", "text"),
        ("emit", [1]),
        ("tensors", [{"dtype": "object", "shape": []}]),
        ("tensors", [{"dtype": "uint8", "shape": [-1]}]),
        ("tensors", [{"dtype": "uint8", "shape": [1.0]}]),
        ("tensors", [{"dtype": "uint8"}]),
        ("t", "Submit"),
        ("t", 3),
        ("t", "__class__"),
    ],
)
def test_a_wrong_type_or_value_is_refused(field: str, value: object) -> None:
    DATA_DOWN.decode([pack(submit())])
    with pytest.raises(ProtocolError):
        DATA_DOWN.decode([pack(submit(**{field: value}))])


@pytest.mark.parametrize("missing", ["t", "request", "epoch", "inputs", "params"])
def test_a_missing_field_is_refused(missing: str) -> None:
    whole = submit()
    del whole[missing]
    with pytest.raises(ProtocolError):
        DATA_DOWN.decode([pack(whole)])


@pytest.mark.parametrize(
    "junk", [b"", b"\xc1", b"\x00", b"hello", b"\x90", pack(None), pack([]), pack("x"), b"\xff" * 64]
)
@BY_NAME
def test_junk_is_refused(name: str, junk: bytes) -> None:
    with pytest.raises(ProtocolError):
        LANES[name][0].decode([junk])


@BY_NAME
def test_a_message_without_frames_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError, match="frame, this one has"):
        LANES[name][0].decode([])


def test_bytes_behind_the_header_are_refused() -> None:
    with pytest.raises(ProtocolError, match="trailing"):
        CONTROL_DOWN.decode([pack(BeatAck(epoch=EPOCH)) + b"\x00"])


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ProtocolError, match="UTF-8"):
        DATA_DOWN.decode([pack(submit(request="abcd")).replace(b"abcd", b"ab\xff\xfe")])
    with pytest.raises(ProtocolError, match="UTF-8"):
        CONTROL_DOWN.decode([pack_call(b"\xa2\xc3\x28")])


def test_a_repeated_key_leaves_one_checked_value() -> None:
    """msgpack cannot forbid it; the last value counts, and it is checked like any other."""
    repeated = b"\x83\xa1t\xa8beat_ack\xa5epoch\x01\xa5epoch"
    assert CONTROL_DOWN.decode([repeated + b"\x02"])[0] == BeatAck(epoch=Epoch(2))
    with pytest.raises(ProtocolError):
        CONTROL_DOWN.decode([repeated + b"\xff"])
    with pytest.raises(ProtocolError):
        CONTROL_DOWN.decode([b"\x83\xa1t\xa8beat_ack\xa5epoch\x01\xa1t\xa8shutdown"])


# --- sizes ------------------------------------------------------------------------------------------------------------


@BY_NAME
def test_an_oversized_header_is_refused_unread(name: str) -> None:
    lane = LANES[name][0]
    limit = MAX_CONTROL_BYTES if "control" in name else MAX_HEADER_BYTES
    with pytest.raises(ProtocolError, match=f"the limit is {limit}"):
        lane.decode([bytes(limit + 1)])


def test_what_is_too_big_is_not_sent() -> None:
    text = Text(text="x" * MAX_HEADER_BYTES)
    with pytest.raises(ProtocolError, match="Published"):
        DATA_UP.encode(Published(request=REQUEST, epoch=EPOCH, seq=0, output="text", value=text))
    with pytest.raises(ProtocolError, match="CallReply"):
        CONTROL_UP.encode(CallReply(epoch=EPOCH, call=CallId(1), ok=True, value="x" * MAX_CONTROL_BYTES))


@pytest.mark.parametrize("name", ["control up", "control down"])
def test_the_control_lane_has_no_tensors(name: str) -> None:
    lane = LANES[name][0]
    header = (
        pack(Hello(protocol=1, build="b", stage=StageName("s"), nonce="n", host="h", pid=1))
        if "up" in name
        else pack(BeatAck(epoch=EPOCH))
    )
    lane.decode([header])
    with pytest.raises(ProtocolError, match="has one frame, this one has 2"):
        lane.decode([header, b""])
    with pytest.raises(ProtocolError, match="unknown field `tensors`"):
        lane.decode([pack(msgspec.msgpack.decode(header) | {"tensors": []})])


@pytest.mark.parametrize("delta", [-1, 1])
def test_a_frame_that_does_not_fit_its_description_is_refused(delta: int) -> None:
    message = Piece(epoch=EPOCH, pull=PullId("p"), first=0, tensors=(TensorRef(Dtype.BF16, (3, 5)),))
    DATA_UP.decode([pack(message), bytes(30)])
    with pytest.raises(ProtocolError, match=f"needs 30 bytes, its frame has {30 + delta}"):
        DATA_UP.decode([pack(message), bytes(30 + delta)])


@pytest.mark.parametrize("frames", [0, 1, 3])
def test_frames_and_descriptions_must_be_as_many(frames: int) -> None:
    message = Piece(epoch=EPOCH, pull=PullId("p"), first=0, tensors=(U8, U8))
    with pytest.raises(ProtocolError, match=f"describes 2 tensors and has {frames} frames"):
        DATA_UP.decode([pack(message), *[b"abcd"] * frames])


def test_a_sender_cannot_describe_other_tensors_than_it_sends() -> None:
    message = Attach(session=Session("s"), epoch=EPOCH, tensors=(U8,))
    for tensors in ([], [WireTensor(U8, b"abcd")] * 2, [WireTensor(TensorRef(Dtype.I8, (4,)), b"abcd")]):
        with pytest.raises(ProtocolError, match="Attach describes"):
            DATA_UP.encode(message, tensors)


@pytest.mark.parametrize(
    "message",
    [
        Chunk(request=REQUEST, epoch=EPOCH, seq=0, output="image", part=Preview(step=1, tensor=1), tensors=(U8,)),
        Published(request=REQUEST, epoch=EPOCH, seq=0, output="latents", value=Tensor(tensor=1), tensors=(U8,)),
        Result(
            request=REQUEST, epoch=EPOCH, seq=0, outputs={"a": Tensor(tensor=0), "b": Images(tensor=1)}, tensors=(U8,)
        ),
        Submit(
            request=REQUEST, epoch=EPOCH, inputs={"image": Images(tensor=1)}, params=DiffusionParams(), tensors=(U8,)
        ),
        Submit(
            request=REQUEST,
            epoch=EPOCH,
            inputs={"image": Images(tensor=0, more=(0, 1))},
            params=DiffusionParams(),
            tensors=(U8,),
        ),
        Chunk(
            request=REQUEST,
            epoch=EPOCH,
            seq=0,
            output="image",
            part=Partial(index=0, value=Images(tensor=1)),
            tensors=(U8,),
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_value_that_names_a_missing_tensor_is_refused(message: Any) -> None:
    lane = DATA_DOWN if isinstance(message, Submit) else DATA_UP
    with pytest.raises(ProtocolError, match="names tensor 1 and has 1"):
        lane.decode([pack(message), b"abcd"])


def test_tensor_at_gives_the_named_tensor_or_says_what_is_missing() -> None:
    tensor = WireTensor(U8, b"abcd")
    assert at([tensor], 0) is tensor
    with pytest.raises(ProtocolError, match="names tensor 1"):
        at([tensor], 1)


@pytest.mark.parametrize(
    "shape",
    [[2**48], [2**63 - 1] * 16, [0, 2**48, 2**48], [2**64 - 1], [1] * 17, [2] * 100_000, [2**40, 0, 2**40]],
    ids=lambda shape: f"{len(shape)} dims",
)
def test_a_huge_shape_is_refused_without_being_allocated(shape: list[int]) -> None:
    piece = {"t": "piece", "epoch": 1, "pull": "p", "first": 0, "tensors": [{"dtype": "float64", "shape": shape}]}
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError) as caught:
            DATA_UP.decode([pack(piece), b""])
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 2000


def test_a_payload_cannot_describe_impossible_tensors() -> None:
    item = {"name": "k", "ref": {"dtype": "uint8", "shape": [2] * 1000}, "checksum": 0}
    payload = {"t": "payload", "lease": "l", "source": "s", "replica": 0, "epoch": 1, "kind": "kv", "items": [item]}
    with pytest.raises(ProtocolError, match="length <= 16"):
        DATA_DOWN.decode([pack(submit(inputs={"kv": payload}))])


@pytest.mark.parametrize("count", [10**6, 2**31, 2**32 - 1])
@pytest.mark.parametrize("marker", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
def test_a_declared_length_without_content_costs_nothing(marker: bytes, count: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            CONTROL_DOWN.decode([pack_call(marker + struct.pack(">I", count))])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- numbers, depth and what user data may hold ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**64 - 1, -(2**63)])
def test_ints_of_64_bits_pass(number: int) -> None:
    sent = Call(epoch=EPOCH, call=CallId(1), method="m", args={"n": number})
    assert CONTROL_DOWN.decode(CONTROL_DOWN.encode(sent))[0] == sent


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**5000], ids=["2**64", "-2**63-1", "10**5000"])
def test_an_int_over_64_bits_is_refused_by_the_sender(number: int) -> None:
    with pytest.raises(ProtocolError, match="Call cannot be sent"):
        CONTROL_DOWN.encode(Call(epoch=EPOCH, call=CallId(1), method="m", args={"n": number}))


def test_text_with_half_a_surrogate_pair_is_refused_by_the_sender() -> None:
    with pytest.raises(ProtocolError, match="Published cannot be sent"):
        DATA_UP.encode(Published(request=REQUEST, epoch=EPOCH, seq=0, output="text", value=Text(text="\ud83d")))


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"])
@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH, sys.getrecursionlimit() + 10, 200_000])
def test_deep_nesting_is_refused(opening: bytes, depth: int) -> None:
    nested = opening * depth + b"\x01"
    with pytest.raises(ProtocolError):
        CONTROL_DOWN.decode([pack_call(nested)])
    with pytest.raises(ProtocolError):  # and where the decoder has to skip it to find the tag
        CONTROL_DOWN.decode([b"\x82\xa4args" + nested + b"\xa1t\xa4call"])


@pytest.mark.parametrize(
    "raw",
    [
        pack(b"bytes"),
        pack(msgspec.msgpack.Ext(5, b"abc")),
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\xd7\xff" + b"\xff" * 8,  # an impossible one
        pack({1: 2}),
        b"\x81\xc0\x01",  # a map whose key is null
        b"\x81\x80\x01",  # a map whose key is a map
        b"\x81\x91\x91\x01\x01",  # a map whose key is an array
    ],
)
def test_data_that_json_cannot_say_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        CONTROL_DOWN.decode([pack_call(raw)])
    extra = pack(submit(params={"type": "ar", "extra": {"a": 0}}))
    with pytest.raises(ProtocolError):
        DATA_DOWN.decode([extra.replace(b"\xa1a\x00", b"\xa1a" + raw)])


def test_more_data_than_the_limit_is_refused() -> None:
    CONTROL_DOWN.decode([pack_call(pack([0] * (MAX_JSON_ITEMS - 1)))])
    with pytest.raises(ProtocolError, match=str(MAX_JSON_ITEMS)):
        CONTROL_DOWN.decode([pack_call(pack([0] * MAX_JSON_ITEMS))])


def test_our_own_code_cannot_send_data_that_is_not_data() -> None:
    with pytest.raises(ValueError, match="`extra` holds a object"):
        SamplingParams(extra={"a": object()})
    with pytest.raises(ValueError, match="`value` holds a bytes"):
        CallReply(epoch=EPOCH, call=CallId(1), ok=True, value=[b"x"])


# --- attacks and accidents ----------------------------------------------------------------------------------------------


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@BY_NAME
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_never_loaded(name: str, protocol: int, tmp_path: Path) -> None:
    lane = LANES[name][0]
    bomb = pickle.dumps(_Bomb(tmp_path / "marker"), protocol)
    with pytest.raises(ProtocolError):
        lane.decode([bomb])
    with pytest.raises(ProtocolError):
        lane.decode([bomb, bomb])
    piece = Piece(epoch=EPOCH, pull=PullId("p"), first=0, tensors=(TensorRef(Dtype.U8, (len(bomb),)),))
    _, (tensor,) = DATA_UP.decode([pack(piece), bomb])
    assert bytes(tensor.data) == bomb
    assert not (tmp_path / "marker").exists()


def refuses_or_decodes(lane: Lane[Any], frames: list[bytes]) -> None:
    """Anything but ProtocolError escapes and fails the test."""
    try:
        message, tensors = lane.decode(frames)
    except ProtocolError:
        return
    assert lane.decode(frames_of(lane, (message, tensors)))[1] == tensors


@BY_NAME
@thorough
@given(frames=st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_do_no_harm(name: str, frames: list[bytes]) -> None:
    refuses_or_decodes(LANES[name][0], frames)


@BY_NAME
@thorough
@given(data=st.data())
def test_damaged_messages_do_no_harm(name: str, data: st.DataObject) -> None:
    lane, union = LANES[name]
    frames = frames_of(lane, data.draw(whole_messages(union)))
    header = bytearray(frames[0])
    for _ in range(data.draw(st.integers(1, 4))):
        spot = data.draw(st.integers(0, len(header)))
        cut = data.draw(st.integers(0, 3))
        header[spot : spot + cut] = data.draw(st.binary(max_size=6))
    frames[0] = bytes(header)
    refuses_or_decodes(lane, data.draw(st.permutations(frames)) if data.draw(st.booleans()) else frames)


@BY_NAME
@quick
@given(data=st.data())
def test_every_truncation_is_refused(name: str, data: st.DataObject) -> None:
    lane, union = LANES[name]
    header, *frames = frames_of(lane, data.draw(whole_messages(union)))
    end = data.draw(st.integers(0, len(header) - 1))
    with pytest.raises(ProtocolError):
        lane.decode([header[:end], *frames])


@BY_NAME
@thorough
@given(tag=st.sampled_from([c.__struct_config__.tag for _, u in LANES.values() for c in union_members(u)]), fields=json_data, key=st.sampled_from(["epoch", "tensors", "inputs", "part", "args", "spec"]))  # fmt: skip
def test_right_tags_with_wild_fields_do_no_harm(name: str, tag: str, fields: object, key: str) -> None:
    wild = {"t": tag, key: fields, **(fields if isinstance(fields, dict) else {})}
    refuses_or_decodes(LANES[name][0], [pack(wild)])


# --- what the messages promise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [ArStage(), DiffusionStage()])
def test_a_worker_gets_its_whole_stage_config_in_welcome(stage: ArStage | DiffusionStage) -> None:
    sent = Welcome(
        session=Session("s"), epoch=EPOCH, replica=0, pipeline="p", spec=stage, limits=LimitsSpec(), publishes=("text",),
        data_port=1, heartbeat_s=1.0, config_hash="c",
    )  # fmt: skip
    assert CONTROL_DOWN.decode(CONTROL_DOWN.encode(sent))[0] == sent


def test_a_zero_is_carried_and_is_not_the_same_as_unset() -> None:
    params = DiffusionParams(guidance_scale=0.0, seed=0)
    sent = Submit(request=REQUEST, epoch=EPOCH, inputs={}, params=params)
    back, _ = DATA_DOWN.decode(DATA_DOWN.encode(sent))
    assert isinstance(back, Submit)
    assert isinstance(back.params, DiffusionParams)
    assert (back.params.guidance_scale, back.params.seed, back.params.strength) == (0.0, 0, None)


def test_an_error_crosses_with_its_stage_and_field() -> None:
    info = ErrorInfo(ErrorCode.STAGE_FAILED, "stage painter: boom", "painter", "width", 1.5)
    sent = Failed(request=REQUEST, epoch=EPOCH, seq=3, error=info)
    assert DATA_UP.decode(DATA_UP.encode(sent))[0] == sent


@pytest.mark.parametrize(
    ("lane", "message"),
    [
        (DATA_DOWN, Attached(epoch=EPOCH)),
        (DATA_DOWN, PullRefused(epoch=EPOCH, pull=PullId("p"), reason="gone")),
        (DATA_UP, PullRefused(epoch=EPOCH, pull=PullId("p"), reason="gone")),
        (CONTROL_DOWN, Abort(epoch=EPOCH, request=REQUEST)),
        (CONTROL_DOWN, Refuse(code="stage", reason="no stage `x`")),
        (CONTROL_UP, LoadFailed(epoch=EPOCH, error="no such file")),
    ],
    ids=lambda item: type(item).__name__,
)
def test_small_messages_stay_small(lane: Lane[Any], message: Any) -> None:
    assert len(lane.encode(message)[0]) < 100


def test_requests_and_sessions_are_bounded_names() -> None:
    for cls in (Pull, Attach):
        info = msgspec.inspect.type_info(cls)
        assert isinstance(info, msgspec.inspect.StructType)
        names = [f for f in info.fields if isinstance(f.type, msgspec.inspect.StrType)]
        assert names
        assert all(isinstance(f.type, msgspec.inspect.StrType) and f.type.max_length for f in names)
