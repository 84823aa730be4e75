"""Tensors cross an edge whole, to the byte, and nobody keeps them afterwards."""

from collections.abc import Iterator

import pytest

from omni.outputs import ImageOutput, RequestOutput
from proto.deploy import Link
from tests.pipeline.engines import digest, kv_tensors
from tests.pipeline.harness import Running, deploy, fake_ar, fake_painter

TENSORS, NBYTES = 4, 12 << 20  # four of 12 MiB: pieces of two, since a piece has at most 32 MiB


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Running]:
    inputs = {
        "prompt": Link(source="thinker.text"),
        "kv": Link(source="thinker.kv", companion="negative_prompt"),
    }
    stages = {
        "thinker": fake_ar(use="tests.pipeline.engines:BigKv", options={"tensors": TENSORS, "nbytes": NBYTES}),
        "painter": fake_painter(use="tests.pipeline.engines:Witness", inputs=inputs),
    }
    with Running(deploy(stages)) as running:
        yield running


def digests(output: RequestOutput) -> list[bytes]:
    image = output.outputs["painter"]
    assert isinstance(image, ImageOutput)
    seen = image.array.tobytes()
    return [seen[i : i + 32] for i in range(0, 64, 32)]


def expected(prompt: str) -> bytes:
    return digest(kv_tensors(prompt, TENSORS, NBYTES))


def test_kv_of_several_pieces_arrives_byte_identical_and_the_companions_beside_it(pipeline: Running) -> None:
    done = pipeline.run("a red star", negative_prompt="a blue one")
    assert digests(done) == [expected("a red star"), expected("a blue one")]


def test_an_unset_negative_prompt_is_an_empty_companion(pipeline: Running) -> None:
    assert digests(pipeline.run("alone")) == [expected("alone"), expected("")]


def test_payloads_of_concurrent_requests_are_never_mixed_up(pipeline: Running) -> None:
    flights = {name: pipeline.launch(name, negative_prompt=f"not {name}") for name in ("one", "two", "three")}
    for name, flight in flights.items():
        assert digests(flight.result()) == [expected(name), expected(f"not {name}")]


def test_leases_and_bytes_are_zero_on_both_sides_and_the_edge_counted_what_crossed(pipeline: Running) -> None:
    before = {edge.source: edge for edge in pipeline.until_idle().edges}
    pipeline.run("counted")
    after = {edge.source: edge for edge in pipeline.until_idle().edges}
    assert after["thinker.kv"].payloads - before["thinker.kv"].payloads == 1
    assert after["thinker.kv"].bytes - before["thinker.kv"].bytes == TENSORS * NBYTES
    assert after["thinker.text"].bytes - before["thinker.text"].bytes == len("echo: counted")


def test_a_request_that_ends_while_its_payload_waits_gives_it_back(pipeline: Running) -> None:
    flight = pipeline.launch("left early", num_inference_steps=1000)
    flight.leave()
    pipeline.until_idle()


@pytest.mark.parametrize("tensors", [0, 5000])
def test_a_payload_of_no_tensors_or_too_many_fails_its_request_alone(tensors: int) -> None:
    inputs = {"kv": Link(source="thinker.kv")}
    stages = {
        "thinker": fake_ar(use="tests.pipeline.engines:BigKv", options={"tensors": tensors, "nbytes": 4}),
        "painter": fake_painter(use="tests.pipeline.engines:Witness", inputs=inputs),
    }
    with Running(deploy(stages)) as pipeline:
        error = pipeline.launch("many", outputs=["painter"]).error()
        assert f"1 to 4096 tensors, this one {tensors}" in str(error)
        assert pipeline.run("unharmed", outputs=["thinker"]).text == "echo: unharmed"
        pipeline.until_idle()
