"""What must not run is refused before any stage hears of it, in the caller's own words."""

import httpx
import msgspec
import pytest

from omni.api import decode
from proto.deploy import ApiSpec
from tests.api import cases
from tests.api.cases import BAD_IMAGE_BODIES, CHAT, IMAGES, BadBody, check_refused
from tests.api.fake_pipeline import PAINTER, Server, serving, two_stages

HELLO: list[object] = [{"role": "user", "content": "hello"}]

BAD_CHAT_BODIES: dict[str, BadBody] = {
    "no messages": BadBody({"model": "demo"}, "messages"),
    "empty messages": BadBody({"model": "demo", "messages": []}, "messages"),
    "no model": BadBody({"messages": HELLO}, "model"),
    "unknown model": BadBody({"model": "gpt-9", "messages": HELLO}, "model", 404),
    "unknown role": BadBody({"model": "demo", "messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    "no content": BadBody({"model": "demo", "messages": [{"role": "user"}]}, "messages[0].content"),
    "image part": BadBody(
        {
            "model": "demo",
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
            ],
        },
        "messages[0].content[0]",
    ),
    "tool calls": BadBody(
        {"model": "demo", "messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    "n 129": BadBody({"model": "demo", "messages": HELLO, "n": 129}, "n"),
    "n true": BadBody({"model": "demo", "messages": HELLO, "n": True}, "n"),
    "temperature 3": BadBody({"model": "demo", "messages": HELLO, "temperature": 3}, "temperature"),
    "temperature in words": BadBody({"model": "demo", "messages": HELLO, "temperature": "hot"}, "temperature"),
    "top_p 0": BadBody({"model": "demo", "messages": HELLO, "top_p": 0}, "top_p"),
    "top_k -1": BadBody({"model": "demo", "messages": HELLO, "top_k": -1}, "top_k"),
    "max_tokens 0": BadBody({"model": "demo", "messages": HELLO, "max_tokens": 0}, "max_tokens"),
    "max_tokens beyond any model": BadBody({"model": "demo", "messages": HELLO, "max_tokens": 2**70}, "max_tokens"),
    "top_k beyond any vocabulary": BadBody({"model": "demo", "messages": HELLO, "top_k": 2**63}, "top_k"),
    "too many stop strings": BadBody({"model": "demo", "messages": HELLO, "stop": ["x"] * 65}, "stop"),
    "max_completion_tokens 0": BadBody(
        {"model": "demo", "messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"
    ),
    "max_tokens twice": BadBody(
        {"model": "demo", "messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"
    ),
    "empty stop": BadBody({"model": "demo", "messages": HELLO, "stop": ""}, "stop"),
    "empty stop in a list": BadBody({"model": "demo", "messages": HELLO, "stop": ["a", ""]}, "stop[1]"),
    "stream options without stream": BadBody(
        {"model": "demo", "messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"
    ),
    "audio": BadBody({"model": "demo", "messages": HELLO, "modalities": ["text", "audio"]}, "modalities[1]"),
    "tool without function": BadBody(
        {"model": "demo", "messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function"
    ),
    "tool choice required": BadBody({"model": "demo", "messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    "calls of a user": BadBody(
        {
            "model": "demo",
            "messages": [
                {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}
            ],
        },
        "messages[0].tool_calls",
    ),
    "result of no call": BadBody(
        {"model": "demo", "messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"
    ),
    "a schema that is not there": BadBody(
        {"model": "demo", "messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema"
    ),
    "an unknown form": BadBody(
        {"model": "demo", "messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type"
    ),
    "frequency_penalty 3": BadBody({"model": "demo", "messages": HELLO, "frequency_penalty": 3}, "frequency_penalty"),
    "presence_penalty -3": BadBody({"model": "demo", "messages": HELLO, "presence_penalty": -3}, "presence_penalty"),
    "logit_bias in words": BadBody({"model": "demo", "messages": HELLO, "logit_bias": {"the": 1}}, "logit_bias"),
    "logit_bias 101": BadBody({"model": "demo", "messages": HELLO, "logit_bias": {"5": 101}}, "logit_bias"),
    "top_logprobs 21": BadBody(
        {"model": "demo", "messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"
    ),
    "top_logprobs alone": BadBody({"model": "demo", "messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    "min_p 2": BadBody({"model": "demo", "messages": HELLO, "min_p": 2}, "min_p"),
    "mistyped field": BadBody({"model": "demo", "messages": HELLO, "temprature": 1}, "temprature"),
    "mistyped field of a message": BadBody(
        {"model": "demo", "messages": [{"role": "user", "contnet": "x"}]}, "messages[0].contnet"
    ),
}


@pytest.mark.parametrize("name", BAD_IMAGE_BODIES)
def test_bad_image_body_is_refused_by_field_and_reaches_no_stage(shared: Server, name: str) -> None:
    check_refused(shared.url, IMAGES, BAD_IMAGE_BODIES[name])
    assert shared.call(lambda pipeline: pipeline.seen) == []


@pytest.mark.parametrize("name", BAD_CHAT_BODIES)
def test_bad_chat_body_is_refused_by_field_and_reaches_no_stage(shared: Server, name: str) -> None:
    check_refused(shared.url, CHAT, BAD_CHAT_BODIES[name])
    assert shared.call(lambda pipeline: pipeline.seen) == []


def test_refusal_shows_the_value_and_the_remedy(shared: Server) -> None:
    message = check_refused(shared.url, IMAGES, BadBody({"prompt": "x", "steps": 0}, "steps"))
    assert message == "steps: expected int >= 1; the value is 0"
    assert "'guidance_scale'" in check_refused(shared.url, IMAGES, BAD_IMAGE_BODIES["mistyped field"])
    assert "temperature" in check_refused(shared.url, CHAT, BAD_CHAT_BODIES["mistyped field"])
    assert "b64_json" in check_refused(shared.url, IMAGES, BAD_IMAGE_BODIES["response format url"])
    assert "multiple of 8" in check_refused(shared.url, IMAGES, BAD_IMAGE_BODIES["size 513x512"])


TRICKY_NAMES = (
    *("", " ", ".", "[0]", "a.b[3].c", "`", "a\nb`", "\0", "{0}", "$", " - at `$.a.b", " - at `$.prompt[3]"),
    *(" - at `$.messages[0].content[7]`", " - at `" * 50, "Object contains unknown field `x` - at `$.prompt`"),
)


@pytest.mark.parametrize("name", TRICKY_NAMES)
def test_unknown_field_is_refused_whatever_its_name(shared: Server, name: str) -> None:
    inner = {"model": "demo", "messages": [{"role": "user", "content": "x", name: 1}]}
    for route, body, where in ((IMAGES, {"prompt": "x", name: 1}, ""), (CHAT, inner, "messages[0].")):
        answer = httpx.post(f"{shared.url}{route}", json=body, timeout=cases.PATIENCE_S)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == where + decode.cut(name)


def test_refusal_of_something_huge_is_short() -> None:
    huge, many = "a" * 5_000_000, [1] * 1_000_000
    painted: tuple[dict[str, object], ...] = (
        *({"prompt": "x", huge: 1}, {"prompt": many}, {"prompt": "x", "size": huge}, {"prompt": "x", "model": huge}),
        *({"prompt": "x", "quality": many}, {"prompt": "x", "user": many}, {"prompt": "x", "seed": huge}),
    )
    said: tuple[dict[str, object], ...] = (
        {"model": "demo", "messages": [{"role": "user", "content": "", huge: 1}]},
        {"model": "demo", "messages": HELLO * 10_001},
    )
    with serving(msgspec.structs.replace(two_stages(), api=ApiSpec(port=0))) as server:
        for route, bodies in ((IMAGES, painted), (CHAT, said)):
            for body in bodies:
                answer = httpx.post(f"{server.url}{route}", json=body, timeout=cases.PATIENCE_S)
                assert answer.status_code in (400, 404)
                assert len(answer.content) < 1000


@pytest.mark.parametrize("name", ["guidance", "guidance_scale"])
def test_guidance_zero_is_honoured(server: Server, name: str) -> None:
    with cases.client(server.url) as ai:
        ai.images.generate(prompt="x", extra_body={name: 0})
    (request,) = server.call(lambda pipeline: pipeline.seen)
    assert request.params[PAINTER]["guidance_scale"] == 0


def test_temperature_zero_and_no_stop_strings_are_honoured(server: Server) -> None:
    with cases.client(server.url) as ai:
        ai.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "x"}], temperature=0, top_p=1, stop=[]
        )
    (request,) = server.call(lambda pipeline: pipeline.seen)
    assert request.params["thinker"] == {"temperature": 0, "top_p": 1, "stop": []}
