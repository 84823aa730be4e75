"""A payload that is late, damaged or refused fails its own request, with the edge and the bytes in the message.

The source is a stage in the test's hands; the consumer is a real worker process.
"""

from collections.abc import Callable, Iterator

import msgspec
import pytest

from omni.outputs import StageStarted
from proto.deploy import EdgeSpec, Link
from proto.errors import PayloadLost, ProtocolError
from proto.messages import Payload, Published, Pull, Result, StageInfo, Submit, Text
from proto.params import Json
from tests.pipeline.harness import Flight, Running, deploy, fake_ar, fake_painter, until
from tests.pipeline.raw_stage import RawStage, tensor

DATA = tensor(b"kv" * 500)
EDGE = "payload thinker.kv -> painter.kv (1000 bytes)"


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Running]:
    inputs = {"prompt": Link(source="thinker.text"), "kv": Link(source="thinker.kv")}
    stages = {
        "thinker": fake_ar(local=0),
        "painter": fake_painter(
            use="tests.pipeline.engines:Witness", inputs=inputs, edge=EdgeSpec(deadline=1.0, lease=60.0)
        ),
    }
    with Running(deploy(stages), wait=False) as running:
        yield running


@pytest.fixture(scope="module")
def source(pipeline: Running) -> Iterator[RawStage]:
    info = StageInfo(inputs=("prompt",), outputs=("text", "kv"))
    with RawStage(pipeline.url, "thinker", info) as stage:
        pipeline.until_ready()
        yield stage


def publish(source: RawStage, submit: Submit, payload: Payload) -> None:
    request, epoch = submit.request, source.epoch
    source.send(Published(request=request, epoch=epoch, seq=source.number(request), output="kv", value=payload))
    source.send(
        Result(request=request, epoch=epoch, seq=source.number(request), outputs={"text": Text(text="an answer")})
    )


def ask(pipeline: Running, source: RawStage, prompt: str, payload: Payload | None = None) -> tuple[Flight, Pull]:
    """A request whose kv is published, and the painter's pull of it."""
    flight = pipeline.launch(prompt)
    submit = source.submitted()
    chosen = payload or source.keep("kv", DATA)
    publish(source, submit, chosen)
    return flight, source.got(Pull, lambda pull: pull.lease == chosen.lease)


def until_nothing_is_held(pipeline: Running, source: RawStage) -> None:
    source.beat()
    status = pipeline.until_idle()
    assert (status.leases, status.lease_bytes) == (0, 0)


def test_a_payload_that_never_arrives_fails_its_request_alone_at_the_deadline(
    pipeline: Running, source: RawStage
) -> None:
    lost, _ = ask(pipeline, source, "lost")
    kept, pull = ask(pipeline, source, "kept")
    source.answer(pull)
    assert kept.result().images
    error = lost.error()
    assert isinstance(error, PayloadLost)
    assert EDGE in str(error)
    assert "edge.deadline" in str(error)
    assert "0 of 1000 bytes" in str(error)
    assert error.info.stage == "painter"
    assert not [event for event in lost.events if isinstance(event, StageStarted)]  # nothing was drawn of it
    until_nothing_is_held(pipeline, source)


def test_a_late_piece_changes_nothing(pipeline: Running, source: RawStage) -> None:
    flight, pull = ask(pipeline, source, "late")
    assert isinstance(flight.error(), PayloadLost)
    source.answer(pull)
    after, pull = ask(pipeline, source, "after")
    source.answer(pull)
    assert after.result().images
    until_nothing_is_held(pipeline, source)


def answer_damaged(source: RawStage, pull: Pull) -> None:
    source.answer(pull, tensor(b"vk" * 500))


def answer_with_another_shape(source: RawStage, pull: Pull) -> None:
    source.answer(pull, tensor(b"kv"))


def answer_with_too_many(source: RawStage, pull: Pull) -> None:
    source.answer(pull, DATA, DATA)


def refuse(source: RawStage, pull: Pull) -> None:
    source.refuse(pull, "the test does not want to")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (answer_damaged, "wrong checksum"),
        (answer_with_another_shape, "does not match its description"),
        (answer_with_too_many, "does not match its description"),
        (refuse, "the test does not want to"),
    ],
)
def test_a_payload_that_is_not_what_was_promised_fails_its_request_alone(
    pipeline: Running, source: RawStage, wrong: Callable[[RawStage, Pull], None], words: str
) -> None:
    flight, pull = ask(pipeline, source, "damaged")
    kept, good = ask(pipeline, source, "kept")
    wrong(source, pull)
    source.answer(good)
    error = flight.error()
    assert isinstance(error, PayloadLost)
    assert EDGE in str(error)
    assert words in str(error)
    assert kept.result().images
    until_nothing_is_held(pipeline, source)


@pytest.mark.parametrize(
    ("kind", "meta"),
    [
        *(("audio", {}), ("audio", {"sample_rate": "many"}), ("video", {"fps": [1]}), ("image", {"seeds": 5})),
        *(("image", {"seeds": [None]}), ("image", {"seeds": ["x"]})),
    ],
)
def test_a_payload_that_lacks_what_its_kind_needs_fails_its_request_alone(
    pipeline: Running, source: RawStage, kind: str, meta: dict[str, Json]
) -> None:
    flight, pull = ask(pipeline, source, "odd", msgspec.structs.replace(source.keep(kind, DATA), meta=meta))
    kept, good = ask(pipeline, source, "kept")
    source.answer(pull)
    source.answer(good)
    error = flight.error()
    assert isinstance(error, ProtocolError)
    assert f"stage thinker is no {kind}" in str(error)
    assert error.info.stage == "painter"
    assert kept.result().images
    until_nothing_is_held(pipeline, source)


def test_a_payload_that_its_source_has_no_more_is_refused_to_the_consumer(pipeline: Running, source: RawStage) -> None:
    flight = pipeline.launch("gone")
    submit = source.submitted()
    payload = source.keep("kv", DATA)
    publish(source, submit, payload)
    pull = source.got(Pull)
    source.refuse(pull, "its lease has ended (edge.lease), or it never was there")
    assert "edge.lease" in str(flight.error())
    until_nothing_is_held(pipeline, source)


def test_a_request_that_is_left_while_its_payload_is_awaited_is_acknowledged(
    pipeline: Running, source: RawStage
) -> None:
    flight, _ = ask(pipeline, source, "left")
    flight.leave()
    until(lambda: pipeline.replica("painter").in_flight == 0, "the painter let go of it")
    until_nothing_is_held(pipeline, source)
