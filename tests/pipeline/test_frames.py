"""Whole messages through real sockets on loopback: what goes in comes out, and large frames are not copied."""

from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proto.frames import SMALL, receive_frames, send_frames
from proto.framing import DATA_UP
from proto.ids import Epoch, PullId
from proto.messages import Piece
from proto.numpy_tensors import from_wire, to_wire

Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A ROUTER and a DEALER connected to it by TCP."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        for sock in (router, dealer):
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.RCVTIMEO, 20_000)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind("tcp://127.0.0.1:0")
        dealer.connect(router.getsockopt_string(zmq.LAST_ENDPOINT))
        yield router, dealer


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.binary(max_size=300) | st.just(b"x" * (SMALL + 1)), min_size=1, max_size=5))
def test_frames_arrive_whole_and_in_order_both_ways(pair: Pair, frames: list[bytes]) -> None:
    router, dealer = pair
    send_frames(dealer, frames)
    route, *there = receive_frames(router, 2)
    assert [bytes(frame) for frame in there] == frames
    assert isinstance(there[0], bytes)
    assert all(isinstance(frame, memoryview) for frame in there[1:])
    send_frames(router, [route, *there])
    back = receive_frames(dealer, 1)
    assert [bytes(frame) for frame in back] == frames


@pytest.mark.parametrize("size", [0, 1, 7, 1000, SMALL // 8, SMALL])
def test_tensors_of_every_size_survive_the_socket(pair: Pair, size: int) -> None:
    """Small ones come out of ZeroMQ's shared buffer at any address; large ones are sent from where they lie."""
    router, dealer = pair
    sent = [
        to_wire(np.arange(size, dtype=np.float64)),
        to_wire(np.arange(size, dtype=np.uint8)),
        to_wire(np.float32(7)),
    ]
    message = Piece(epoch=Epoch(1), pull=PullId("p"), first=0, tensors=tuple(t.ref for t in sent))
    send_frames(dealer, DATA_UP.encode(message, sent))
    back, tensors = DATA_UP.decode(receive_frames(router, 2)[1:])
    assert back == message
    arrays = [from_wire(tensor) for tensor in tensors]
    assert np.array_equal(arrays[0], np.arange(size, dtype=np.float64))
    assert np.array_equal(arrays[1], np.arange(size, dtype=np.uint8))
    assert arrays[2].item() == 7.0


def test_a_received_frame_outlives_the_socket_and_the_next_messages() -> None:
    array = np.arange(1 << 16, dtype=np.int32)
    with zmq.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.bind("tcp://127.0.0.1:0")
        right.connect(left.getsockopt_string(zmq.LAST_ENDPOINT))
        kept = []
        for turn in range(5):
            send_frames(right, [b"h", memoryview((array + turn).tobytes())])
            kept.append(receive_frames(left, 1)[1])
    for turn, frame in enumerate(kept):
        assert np.array_equal(np.frombuffer(frame, np.int32), array + turn)


def test_an_empty_socket_says_so_at_once(pair: Pair) -> None:
    for sock, small in zip(pair, (2, 1), strict=True):
        with pytest.raises(zmq.Again):
            receive_frames(sock, small, zmq.NOBLOCK)


def test_a_peer_that_is_not_there_is_an_error_and_sends_nothing(pair: Pair) -> None:
    router, dealer = pair
    with pytest.raises(zmq.ZMQError) as caught:
        send_frames(router, [b"nobody", b"header", b"x" * (SMALL + 1)], zmq.NOBLOCK)
    assert caught.value.errno == zmq.EHOSTUNREACH
    send_frames(dealer, [b"still", b"whole"])
    assert [bytes(frame) for frame in receive_frames(router, 2)[1:]] == [b"still", b"whole"]


def takes(sock: "zmq.Socket[bytes]", frames: list[bytes]) -> bool:
    try:
        send_frames(sock, frames, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def test_a_full_peer_refuses_a_message_whole() -> None:
    """Nobody reads: after the high-water mark a message is refused at its first frame, and no half of one is sent."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        for sock in (left, right):
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.SNDHWM, 2)
            sock.setsockopt(zmq.RCVHWM, 2)
            sock.setsockopt(zmq.RCVTIMEO, 20_000)
        left.bind("inproc://full")
        right.connect("inproc://full")
        sent = 0
        while takes(right, [b"%d" % sent, b"a", b"b" * SMALL]):
            sent += 1
        assert 0 < sent < 100
        for number in range(sent):
            assert [bytes(frame)[:2] for frame in receive_frames(left, 1)] == [b"%d" % number, b"a", b"bb"]
        with pytest.raises(zmq.Again):
            receive_frames(left, 1, zmq.NOBLOCK)
