"""Strangers on both sockets: nothing that they send is run, believed, or felt by anybody else."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from proto.deploy import ApiSpec, MasterSpec
from proto.framing import DATA_UP
from proto.ids import Epoch, Session
from proto.messages import Attach, Goodbye, Heartbeat, Refuse, Result, StageInfo
from proto.sockets import is_loopback, split_endpoint
from tests.pipeline.harness import Running, text_to_image, until
from tests.pipeline.raw_stage import RawPeer, RawStage


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Running]:
    with Running(text_to_image(painter={"max_replicas": 2})) as running:
        yield running


@pytest.fixture(params=["control", "data"])
def url(request: pytest.FixtureRequest, pipeline: Running) -> str:
    endpoints = pipeline.omni.endpoints
    assert endpoints is not None
    return endpoints.control if request.param == "control" else endpoints.data


class Marker:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def junk(path: Path) -> list[list[bytes]]:
    return [
        [os.urandom(64)],
        [b""],
        [pickle.dumps(Marker(path))],
        [msgspec.msgpack.encode({"t": "no such message"})],
        [msgspec.msgpack.encode({"t": "beat", "epoch": "one"})],
        [b"\xdd\xff\xff\xff\xff"],  # an array of 4 billion
        [os.urandom(16) for _ in range(100)],
        [b"\x80", pickle.dumps(Marker(path))],
    ]


def test_junk_is_counted_and_dropped_and_a_pickle_is_never_opened(pipeline: Running, url: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    before = pipeline.status().junk
    frames = junk(marker)
    with RawPeer(url) as stranger:
        for one in frames:
            stranger.control.send_multipart(one)
        until(lambda: pipeline.status().junk == before + len(frames), "all of it is counted")
    assert not marker.exists()
    assert pipeline.run("unharmed").text == "echo: unharmed"


def test_hellos_that_cannot_be_served_are_refused_in_words(pipeline: Running) -> None:
    before = pipeline.status().junk
    with RawPeer(pipeline.url) as stranger:
        for hello, code, words in (
            (stranger.hello("painter", protocol=99), "protocol", "you speak 99"),
            (stranger.hello("sculptor"), "stage", "thinker, painter"),
            (stranger.hello("painter", replica=7), "slot", "0..1, not 7"),
            (stranger.hello("thinker"), "slot", "max_replicas"),
        ):
            stranger.tell(hello)
            refuse = stranger.heard(Refuse)
            assert refuse.code == code
            assert words in refuse.reason
    assert pipeline.status().junk == before + 4
    assert [len(stage.replicas) for stage in pipeline.status().stages] == [1, 1]


def test_a_heartbeat_of_nobody_is_answered_with_a_refusal(pipeline: Running) -> None:
    with RawPeer(pipeline.url) as stranger:
        stranger.tell(Heartbeat(epoch=Epoch(1), steps=0, queued=0, running=0))
        assert stranger.heard(Refuse).code == "session"
    assert pipeline.replica("thinker").state == "ready"


def test_a_guessed_session_attaches_to_nothing(pipeline: Running) -> None:
    endpoints = pipeline.omni.endpoints
    assert endpoints is not None
    before = pipeline.status().junk
    epoch = pipeline.replica("painter").epoch
    with RawPeer(endpoints.data) as stranger:
        stranger.control.send_multipart(DATA_UP.encode(Attach(session=Session("guessed"), epoch=epoch)))
        until(lambda: pipeline.status().junk == before + 1, "it is counted")
    assert pipeline.run("unharmed").images


def test_a_stranger_cannot_speak_for_a_replica_by_its_epoch(pipeline: Running) -> None:
    endpoints = pipeline.omni.endpoints
    assert endpoints is not None

    flight = pipeline.launch("hang", outputs=["thinker"])
    until(lambda: pipeline.replica("thinker").in_flight == 1, "it is under way")
    request = next(iter(pipeline.omni.engine._streams))
    forged = Result(request=request, epoch=pipeline.replica("thinker").epoch, seq=0, outputs={})
    with RawPeer(endpoints.data) as stranger:
        stranger.control.send_multipart(DATA_UP.encode(forged))
        pipeline.run("meanwhile")
    assert not flight.over
    flight.leave()
    pipeline.until_idle()


def test_a_member_that_sends_junk_costs_itself_alone(pipeline: Running) -> None:
    before = pipeline.status().junk
    with RawStage(pipeline.url, "painter", StageInfo(inputs=("prompt",), outputs=("image",))) as member:
        until(lambda: pipeline.stage("painter").ready == 2, "it is a member")
        member.control.send(os.urandom(32))
        member.data.send(os.urandom(32))
        until(lambda: pipeline.status().junk == before + 2, "it is counted")
        assert pipeline.stage("painter").ready == 2
        member.tell(Goodbye(epoch=member.epoch))
        until(lambda: pipeline.stage("painter").ready == 1, "it left")
    assert pipeline.run("unharmed").images


def test_the_default_bind_is_loopback() -> None:
    assert is_loopback(split_endpoint(MasterSpec().bind)[0])
    assert is_loopback(ApiSpec().host)
