"""The API in front of real stage processes, started as an operator starts them, called by the real client.

One pipeline has a language model that says a known text and a tiny Stable Diffusion; the other has fake engines, whose
work a test can hold.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.api.cases import (
    BAD_IMAGE_BODIES,
    CHAT,
    IMAGES,
    SIXTEEN,
    BadBody,
    Colour,
    burst,
    check_refused,
    client,
    colour_prompt,
    picture,
    sixteen_at_once,
    stream_equals_answer,
)
from tests.cli.commands import HEADER, Served
from tests.pipeline.harness import omni_stage, until

# --- real models ------------------------------------------------------------------------------------------------------

REAL = """
stages:
  thinker:
    kind: ar
    model: {path: scripted}
    output: text
  painter:
    kind: diffusion
    model: {path: sd}
    defaults: {num_inference_steps: 2, seed: 7}
    output: image
"""


@pytest.fixture(scope="module")
def real(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    (models / "real.yaml").write_text(HEADER + REAL)
    with Served(models / "real.yaml", tmp_path_factory.mktemp("real") / "log") as served:
        served.until_ready()
        yield served


def test_several_answers_are_as_many_choices_streamed_and_not(real: Served) -> None:
    with client(real.url) as ai:
        hello = {"model": "test/thinker", "messages": [{"role": "user", "content": "hello"}]}
        answer = ai.chat.completions.create(**hello, n=3, extra_body={"prompt_logprobs": 0})
        one = ai.chat.completions.create(**hello)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert {choice.message.content for choice in answer.choices} == {one.choices[0].message.content}
        assert answer.usage is not None
        assert one.usage is not None
        assert answer.usage.prompt_tokens == one.usage.prompt_tokens
        assert answer.usage.completion_tokens == 3 * one.usage.completion_tokens
        assert answer.prompt_logprobs is not None  # type: ignore[attr-defined]
        assert len(answer.prompt_logprobs["content"]) == one.usage.prompt_tokens - 1  # type: ignore[attr-defined]
        texts, ends = ["", "", ""], [0, 0, 0]
        for chunk in ai.chat.completions.create(**hello, n=3, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] += choice.finish_reason == "stop"
        assert texts == [one.choices[0].message.content] * 3
        assert ends == [1, 1, 1]


def test_a_resumable_chat_goes_on_after_its_answer_and_ends_when_it_is_closed(real: Served) -> None:
    with client(real.url) as ai:
        hello = {"model": "test/thinker", "messages": [{"role": "user", "content": "hello"}]}
        said = ai.chat.completions.create(**hello).choices[0].message.content
        texts, told, more = [""], [], iter([{"prompt": "again"}, {"close": True}])
        for chunk in ai.chat.completions.create(**hello, stream=True, extra_body={"resumable": True}):
            if not chunk.choices:
                told.append(chunk.update["state"])  # type: ignore[attr-defined]
                continue
            texts[-1] += chunk.choices[0].delta.content or ""
            if chunk.choices[0].finish_reason and (body := next(more, None)) is not None:
                texts.append("")
                answer = httpx.post(f"{real.url}/v1/requests/{chunk.id}/updates", json={**body, "wait": "accepted"})
                assert answer.status_code == 200, answer.text
        assert texts == [said, said, ""]
        assert told == ["started", "completed", "completed"]


def test_a_picture_under_way_takes_another_prompt(real: Served) -> None:
    body = {"model": "test/painter", "prompt": "a red star", "size": "64x64", "seed": 3, "steps": 200}
    with ThreadPoolExecutor() as pool, httpx.Client(base_url=real.url, timeout=60) as http:
        drawing = pool.submit(httpx.post, real.url + IMAGES, json=body, headers={"x-request-id": "star"}, timeout=60)

        def updated() -> httpx.Response | None:
            answer = http.post("/v1/requests/star/updates", json={"prompt": "a blue sea", "wait": "completed"})
            return None if answer.status_code == 404 else answer

        answer = until(updated, "the request is there")
        done = drawing.result()
    assert (answer.status_code, answer.json()["state"]) == (200, "completed"), answer.text
    assert done.json()["id"] == "star"
    changed = picture(done.json()["data"][0]["b64_json"]).tobytes()
    unchanged = draw(real.url, size="64x64", seed=3, steps=200)
    assert len(changed) == len(unchanged)
    assert changed != unchanged


def test_metrics_tell_what_the_engines_count_and_time(real: Served) -> None:
    with client(real.url) as ai:
        said = ai.chat.completions.create(model="test/thinker", messages=[{"role": "user", "content": "hello"}])
    draw(real.url)
    assert said.usage is not None
    least = {
        'omni_generated_tokens_total{replica="0",stage="thinker"}': said.usage.completion_tokens,
        'omni_prompt_tokens_total{replica="0",stage="thinker"}': said.usage.prompt_tokens,
        'omni_kv_pages{replica="0",stage="thinker"}': 1,
        'omni_first_token_seconds_count{replica="0",stage="thinker"}': 1,
        'omni_inter_token_seconds_bucket{le="+Inf",replica="0",stage="thinker"}': said.usage.completion_tokens - 1,
        'omni_queue_seconds_count{replica="0",stage="painter"}': 1,
        'omni_denoise_steps_total{replica="0",stage="painter"}': 2,
        'omni_denoiser_forwards_total{replica="0",stage="painter"}': 2,
    }

    def missing() -> dict[str, float]:
        lines = httpx.get(f"{real.url}/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: value for name, value in least.items() if float(values.get(name, 0)) < value}

    until(lambda: not missing(), "a beat with what they counted")


def draw(url: str, **settings: object) -> bytes:
    """The pixels of one picture."""
    with client(url) as ai:
        answer = ai.images.generate(prompt="a red star", extra_body=settings)
        assert answer.data is not None
        assert answer.data[0].b64_json is not None
        return picture(answer.data[0].b64_json).tobytes()


def test_sixteen_at_once_each_get_their_own_picture(real: Served) -> None:
    alone: dict[Colour, NDArray[np.int16]] = {}

    def seen(image: Image.Image) -> Colour:
        """Whose picture it is: a shared forward may round a pixel the other way, and no more."""
        found = np.asarray(image).astype(np.int16)
        (colour,) = [colour for colour, own in alone.items() if np.abs(found - own).max() <= 1]
        return colour

    with client(real.url) as ai:
        for colour in SIXTEEN:
            answer = ai.images.generate(prompt=colour_prompt(colour))
            assert answer.data is not None
            assert answer.data[0].b64_json is not None
            alone[colour] = np.asarray(picture(answer.data[0].b64_json)).astype(np.int16)
    asyncio.run(sixteen_at_once(real.url, seen=seen))
    real.until_idle()


def test_bad_bodies_are_refused_and_no_stage_receives_anything(real: Served) -> None:
    before, served = real.steps(), real.status()
    for bad in BAD_IMAGE_BODIES.values():
        check_refused(real.url, IMAGES, bad)
    check_refused(real.url, IMAGES, BadBody({"prompt": "x", "size": "60x64"}, "size"))  # SD draws in multiples of 8
    assert real.steps() == before
    status = real.status()
    assert (status.done, status.failed) == (served.done, served.failed)


def test_guidance_of_nought_is_honoured(real: Served) -> None:
    own = draw(real.url)
    none = draw(real.url, guidance=0)
    assert none == draw(real.url, guidance=0.0)
    assert none != own
    assert own == draw(real.url)


def test_stream_of_emoji_cjk_and_a_stop_string_over_two_tokens_equals_the_answer(real: Served) -> None:
    text = stream_equals_answer(real.url, "test", "Describe what to draw", stop="END")
    assert text == "The boat🎨 of漢字, then"


def test_without_the_stop_string_the_model_says_it(real: Served) -> None:
    with client(real.url) as ai:
        answer = ai.chat.completions.create(model="test", messages=[{"role": "user", "content": "Go on"}])
    assert answer.choices[0].message.content == "The boat🎨 of漢字, thenEND and it."


def test_caller_that_leaves_stops_the_denoising(real: Served) -> None:
    before = real.steps()["painter"]
    body = httpx.Request("POST", real.url + IMAGES, json={"prompt": "long", "steps": 900}).content
    with connect(real.url, IMAGES, body):
        until(lambda: real.replica("painter").steps > before + 2, "some steps")
    real.until_idle()
    assert real.steps()["painter"] - before < 900
    assert draw(real.url) == draw(real.url)


def test_metrics_parse_and_gauges_return_to_nought(real: Served) -> None:
    draw(real.url)
    real.until_idle()
    real.steps()  # what the stages say of themselves is new
    found = real.metrics()
    gauges = ("omni_requests_running", "omni_requests_waiting", "omni_stage_queue", "omni_stage_running", "omni_lease")
    assert {name: value for name, value in found.items() if name.startswith(gauges) and value} == {}
    assert found["omni_requests_done_total{}"] >= 1
    assert found["omni_stage_ready{stage=painter}"] == found["omni_stage_ready{stage=thinker}"] == 1
    assert found["omni_stage_step_seconds{replica=0,stage=painter}"] > 0
    assert found[f"omni_http_requests_total{{route={IMAGES},status=200}}"] >= 1


# --- fake engines -----------------------------------------------------------------------------------------------------

GATED = """
limits: {{max_requests: 1, max_queued: 4}}
stages:
  painter:
    kind: diffusion
    engine: {{use: tests.api.gated:GatedPainter, options: {{gate: "{gate}"}}}}
    output: image
"""
TALKING = """
stages:
  thinker:
    kind: ar
    engine: {use: tests.fakes.engines:FakeAr, options: {step_s: 0.02}}
    max_replicas: 2
    output: text
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@pytest.fixture
def gated(tmp_path: Path, gate: Path) -> Iterator[Served]:
    (tmp_path / "gated.yaml").write_text(HEADER + GATED.format(gate=gate))
    with Served(tmp_path / "gated.yaml", tmp_path / "log") as served:
        yield served.until_ready()


@pytest.fixture
def talking(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "talking.yaml").write_text(HEADER + TALKING)
    with Served(tmp_path / "talking.yaml", tmp_path / "log") as served:
        yield served.until_ready()


def connect(url: str, route: str, content: bytes) -> socket.socket:
    """A request by hand; closing the socket is leaving."""
    parts = httpx.URL(url)
    peer = socket.create_connection((parts.host, parts.port))
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    peer.sendall(head.encode() + b"\r\n\r\n" + content)
    return peer


def test_burst_is_admitted_up_to_the_limits_while_health_answers(gated: Served, gate: Path) -> None:
    async def release() -> None:
        await asyncio.to_thread(gate.touch)

    asyncio.run(burst(gated.url, calls=50, admitted=5, release=release))
    status = gated.until_idle()
    assert status.done == 5
    found = gated.metrics()
    assert found["omni_requests_running{}"] == found["omni_requests_waiting{}"] == 0
    assert found[f"omni_http_requests_total{{route={IMAGES},status=429}}"] == 45


def test_callers_that_leave_give_their_slot_to_the_next(gated: Served, gate: Path) -> None:
    body = httpx.Request("POST", gated.url + IMAGES, json={"prompt": "x"}).content
    for _ in range(3):
        with connect(gated.url, IMAGES, body):
            until(lambda: gated.replica("painter").in_flight == 1, "it runs")
        gated.until_idle()
    still = gated.steps()
    assert gated.steps() == still
    gate.touch()
    assert httpx.post(gated.url + IMAGES, json={"prompt": "x"}).status_code == 200
    assert gated.status().done == 1


def test_caller_that_leaves_a_stream_stops_its_words(talking: Served) -> None:
    words = " ".join(["word"] * 2000)
    with client(talking.url) as ai:
        stream = ai.chat.completions.create(model="test", messages=[{"role": "user", "content": words}], stream=True)
        assert next(stream).choices[0].delta.content == ""
        next(stream)
        stream.close()
    talking.until_idle()
    assert talking.steps()["thinker"] < 2000


def test_ready_follows_the_last_replica_of_a_stage(talking: Served, tmp_path: Path) -> None:
    assert httpx.get(f"{talking.url}/health/ready").status_code == 200
    os.kill(talking.replica("thinker").pid, signal.SIGTERM)  # it leaves, and nobody starts it again
    until(lambda: httpx.get(f"{talking.url}/health/ready").status_code == 503, "not ready")
    assert httpx.get(f"{talking.url}/health/live").status_code == 200
    answer = httpx.get(f"{talking.url}/health/ready")
    assert answer.json()["waiting"][0]["stage"] == "thinker"
    asked = httpx.post(talking.url + CHAT, json={"model": "test", "messages": [{"role": "user", "content": "x"}]})
    assert asked.status_code == 503
    assert "retry-after" in asked.headers
    assert "thinker" in asked.json()["error"]["message"]
    master = talking.until_says("omni-stage --master").partition("--master ")[2].split()[0]
    with omni_stage(master, "thinker", tmp_path / "stage"):
        until(lambda: httpx.get(f"{talking.url}/health/ready").status_code == 200, "ready again")
        asked = httpx.post(talking.url + CHAT, json={"model": "test", "messages": [{"role": "user", "content": "x"}]})
        assert asked.json()["choices"][0]["message"]["content"] == "echo: x"


def test_killed_stage_comes_back_by_itself_and_answers(talking: Served) -> None:
    before = talking.replica("thinker").pid
    os.kill(before, signal.SIGKILL)
    until(lambda: not any(r.pid == before for r in talking.status().stages[0].replicas), "it is gone")
    until(lambda: httpx.get(f"{talking.url}/health/ready").status_code == 200, "ready again")
    asked = httpx.post(talking.url + CHAT, json={"model": "test", "messages": [{"role": "user", "content": "x"}]})
    assert asked.json()["choices"][0]["message"]["content"] == "echo: x"


def test_route_that_a_picture_deploy_cannot_serve_says_which_stage_it_needs(gated: Served) -> None:
    answer = httpx.post(gated.url + CHAT, json={"model": "test", "messages": [{"role": "user", "content": "x"}]})
    assert answer.status_code == 400
    assert "needs a stage of kind ar with `output: text`" in answer.json()["error"]["message"]


def test_route_that_a_chat_deploy_cannot_serve_says_which_stage_it_needs(talking: Served) -> None:
    answer = httpx.post(talking.url + IMAGES, json={"prompt": "x"})
    assert answer.status_code == 400
    assert "needs a stage of kind diffusion with `output: image`" in answer.json()["error"]["message"]
