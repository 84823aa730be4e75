"""What holds for every route: OpenAI's error shape, the status of each kind of error, the cap on bodies."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import OpenAI

from omni.api.errors import STATUS
from omni.api.server import KEPT_S
from proto import errors
from proto.errors import ErrorCode, ErrorInfo, OmniError, to_exception
from tests.api.cases import CHAT, IMAGES
from tests.api.fake_pipeline import Server


def error_of(answer: httpx.Response) -> dict[str, str | None]:
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, str | None] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/metrics", 405),
    ],
)
def test_wrong_route_or_method_has_the_error_shape(shared: Server, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, shared.url + path)
    assert answer.status_code == status
    assert error_of(answer)["type"] == "invalid_request_error"
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize("route", [CHAT, IMAGES])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"n": 1e999}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
        b"\x80\x04\x95pickle",
    ],
    ids=lambda body: repr(body[:16]),
)
def test_body_that_is_no_json_object_is_refused(shared: Server, route: str, body: bytes) -> None:
    answer = httpx.post(shared.url + route, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error_of(answer)


def test_body_of_another_type_is_refused(shared: Server) -> None:
    answer = httpx.post(shared.url + IMAGES, data={"prompt": "x"})
    assert answer.status_code == 415
    assert "application/json" in str(error_of(answer)["message"])


def chunks(count: int) -> Iterator[bytes]:
    for _ in range(count):
        yield b" " * 1024


@pytest.mark.parametrize("kib", [257, 400, 4096])
def test_body_over_the_cap_gets_413_with_or_without_a_length(shared: Server, kib: int) -> None:
    headers = {"content-type": "application/json"}
    for content in (b" " * (kib << 10), chunks(kib)):
        answer = httpx.post(shared.url + IMAGES, content=content, headers=headers)
        assert answer.status_code == 413
        assert "api.max_body_bytes" in str(error_of(answer)["message"])
    assert httpx.get(f"{shared.url}/health/live").status_code == 200


def test_body_at_the_cap_is_taken(server: Server) -> None:
    body = b'{"prompt": "x"}'.ljust(256 << 10)
    answer = httpx.post(server.url + IMAGES, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200


def test_every_error_code_has_a_status() -> None:
    assert set(STATUS) == set(ErrorCode)


@pytest.mark.parametrize("code", ErrorCode)
def test_error_of_the_pipeline_becomes_its_status_and_names_the_stage(server: Server, code: ErrorCode) -> None:
    error = to_exception(ErrorInfo(code, "it did not work", stage="painter"))
    server.call(lambda pipeline: setattr(pipeline, "fail_at_start", error))
    answer = httpx.post(server.url + IMAGES, json={"prompt": "x"})
    assert answer.status_code == STATUS[code]
    assert error_of(answer)["message"] == "stage painter: it did not work"
    wait = answer.headers.get("retry-after")
    assert (wait == "1") == (answer.status_code in (429, 503))


@pytest.mark.parametrize(
    ("error", "caught"),
    [
        (errors.QueueFull("full", retry_after_s=2.5), openai.RateLimitError),
        (errors.StageUnavailable("no painter", retry_after_s=2.5), openai.InternalServerError),
    ],
)
def test_client_is_told_when_to_come_back(
    server: Server, ai: OpenAI, error: OmniError, caught: type[openai.APIStatusError]
) -> None:
    server.call(lambda pipeline: setattr(pipeline, "fail_at_start", error))
    with pytest.raises(caught) as refused:
        ai.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}], stream=True)
    assert refused.value.response.headers["retry-after"] == "3"


def test_bug_is_a_500_without_its_internals(server: Server) -> None:
    server.call(lambda pipeline: setattr(pipeline, "fail_at_start", ZeroDivisionError("secret")))
    answer = httpx.post(server.url + IMAGES, json={"prompt": "x"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert error_of(answer)["code"] == "internal"


def test_models_lists_the_deploy_and_its_visible_stages(ai: OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == ["demo", "demo/thinker", "demo/painter"]
    assert ai.models.retrieve("demo/painter").id == "demo/painter"
    with pytest.raises(openai.NotFoundError, match="served are: demo, demo/thinker, demo/painter"):
        ai.models.retrieve("gpt-9")


def test_connection_not_in_use_is_kept_for_longer_than_clients_keep_theirs() -> None:
    """Else one is closed now and then just when a request comes on it."""
    for theirs in (httpx.Limits().keepalive_expiry, openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry):
        assert theirs is not None
        assert 2 * theirs < KEPT_S
