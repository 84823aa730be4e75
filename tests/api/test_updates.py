"""A running request is changed over HTTP."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.api.cases import CHAT, IMAGES
from tests.api.fake_pipeline import PAINTER, THINKER, Server, only, serving, two_stages

NAMED = {"x-request-id": "my-picture.1"}
UPDATES = "/v1/requests/my-picture.1/updates"


@pytest.fixture
def painter() -> Iterator[Server]:
    with serving(only(PAINTER, two_stages())) as server:
        yield server


@contextmanager
def drawing(server: Server) -> Iterator[httpx.Client]:
    """A picture that is under way, and is done when the test is."""
    server.close_gate()
    with httpx.Client(base_url=server.url, timeout=20) as http, ThreadPoolExecutor() as pool:
        picture = pool.submit(http.post, IMAGES, json={"prompt": "#ff0000"}, headers=NAMED)
        server.until(lambda pipeline: pipeline.running == 1)
        try:
            yield http
        finally:
            server.open()
            done = picture.result()
            assert done.status_code == 200
            assert done.headers["x-request-id"] == done.json()["id"] == "my-picture.1"


def test_a_caller_names_a_request_and_changes_it_while_it_runs(painter: Server) -> None:
    with drawing(painter) as http:
        answer = http.post(UPDATES, json={"prompt": "#00ff00", "event": "e1", "wait": "completed"})
        assert answer.status_code == 200
        assert answer.json() == {
            "request": "my-picture.1", "event": "e1", "state": "completed", "stage": "painter", "step": 3,
            "object": "request.update",
        }  # fmt: skip
        started = http.post(UPDATES, json={"prompt": "#00ff00", "guidance": 2, "transition_steps": 5}).json()
        assert (started["state"], started["event"]) == ("started", "u1")
        assert http.post(UPDATES, json={"prompt": "#0f0", "wait": "accepted"}).json()["state"] == "accepted"
    assert httpx.post(painter.url + UPDATES, json={"prompt": "x"}).status_code == 404


def test_a_refusal_is_a_409_with_the_reason(painter: Server) -> None:
    with drawing(painter) as http:
        for body, reason in (({"prompt": "refuse"}, "as the test asked"),):
            error = http.post(UPDATES, json=body)
            assert error.status_code == 409
            assert error.json()["error"]["code"] == "update_refused"
            assert reason in error.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": " "}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"promt": "x"}, "promt"),
        ({"prompt": "x", "transition_steps": -1}, "transition_steps"),
        ({"prompt": "x", "guidance_scale": 1000.0}, "guidance_scale"),
        ({"prompt": "x", "guidance": 1.0, "guidance_scale": 1.0}, "guidance"),
        ({"prompt": "x", "stage": "panter"}, "stage"),
        ({"prompt": "x", "wait": "forever"}, "wait"),
        ({"prompt": "x", "event": ""}, "event"),
    ],
)
def test_a_bad_update_is_a_400_that_names_the_field(painter: Server, body: dict[str, object], field: str) -> None:
    with drawing(painter) as http:
        answer = http.post(UPDATES, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field


def test_a_request_that_does_not_run_is_a_404(shared: Server) -> None:
    answer = httpx.post(f"{shared.url}/v1/requests/nobody/updates", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")


def test_an_id_is_of_one_running_request_only(painter: Server) -> None:
    with drawing(painter) as http:
        for path, body in ((IMAGES, {"prompt": "x"}),):
            answer = http.post(path, json=body, headers=NAMED)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "request_exists")


def test_a_bad_id_is_refused(shared: Server) -> None:
    for name in ("", "a b", "x" * 129, "ä".encode()):
        answer = httpx.post(shared.url + IMAGES, json={"prompt": "x"}, headers={"x-request-id": name})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "x-request-id"


def test_a_stream_that_is_going_on_can_be_updated_by_the_id_of_its_chunks() -> None:
    with serving(only(THINKER, two_stages())) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        server.call(lambda pipeline: setattr(pipeline, "hold_after", 3))
        body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "stream": True, "resumable": True}
        with http.stream("POST", CHAT, json=body) as stream:
            lines = stream.iter_lines()
            first = json.loads(next(lines).removeprefix("data: "))
            assert first["id"] == stream.headers["x-request-id"]
            path = f"/v1/requests/{first['id']}/updates"
            more = {"messages": [{"role": "user", "content": [{"type": "text", "text": "go on"}]}]}
            assert http.post(path, json=more).json()["stage"] == "thinker"
            refused = http.post(path, json={"negative_prompt": "x"})
            assert refused.status_code == 409
            server.open()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        server.until(lambda pipeline: pipeline.running == 0)
        assert http.post(path, json=more).status_code == 404


def test_a_resumable_answer_needs_a_stream(shared: Server) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "resumable": True}
    answer = httpx.post(shared.url + CHAT, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "resumable")
