"""Chat completions, called by the real client."""

import openai
import pytest
from openai import OpenAI

from omni.outputs import TextOutput
from proto.errors import StageFailed
from proto.messages import ChatMessage, ToolCall
from tests.api.cases import stream_equals_answer
from tests.api.fake_pipeline import CUT, TEXT, THINKER, Server, only, serving, two_stages


def ask(ai: OpenAI, **settings: object) -> object:
    return ai.chat.completions.create(
        **{"model": "demo", "messages": [{"role": "user", "content": "hello"}], **settings}
    )


def test_answer_has_text_reason_usage_and_id(ai: OpenAI) -> None:
    answer = ai.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hello"}])
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "demo"
    assert answer.id.startswith("chatcmpl-")
    assert answer._request_id == answer.id
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, len(TEXT))
    assert answer.usage.total_tokens == 7 + len(TEXT)


def test_stream_says_the_same_as_the_answer(server: Server) -> None:
    assert stream_equals_answer(server.url, "demo", "hello", stop="END") == CUT


def test_stream_without_usage_has_none(ai: OpenAI) -> None:
    chunks = list(
        ai.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hello"}], stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_answer_cut_by_max_tokens_says_length(ai: OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = ai.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "hello"}], extra_body={name: 5}
        )
        assert answer.choices[0].message.content == TEXT[:5]
        assert answer.choices[0].finish_reason == "length"


def test_settings_and_messages_reach_the_stage(server: Server, ai: OpenAI) -> None:
    ai.chat.completions.create(
        model="demo/thinker",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop="END",
        max_completion_tokens=9,
        user="someone",
        extra_body={"top_k": 5, "repetition_penalty": 1.1},
    )
    (request,) = server.call(lambda pipeline: pipeline.seen)
    assert request.messages is not None
    said = [(message.role, message.content) for message in request.messages]
    assert said == [("system", "Be brief."), ("user", "a\nb"), ("assistant", "c"), ("user", "d")]
    assert request.outputs == (THINKER,)
    assert request.params == {
        THINKER: {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "repetition_penalty": 1.1,
            "seed": 3,
            "stop": ["END"],
            "max_tokens": 9,
        }
    }


def test_settings_that_shape_an_answer_reach_the_stage_in_its_own_words(server: Server, ai: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ask(
        ai,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"7": -100},
        logprobs=True,
        top_logprobs=3,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        extra_body={"min_p": 0.1, "stop_token_ids": [3], "min_tokens": 2, "ignore_eos": True, "bad_words": ["no"]},
    )
    ask(ai, response_format={"type": "json_object"}, logprobs=True)
    first, second = server.call(lambda pipeline: pipeline.seen)
    assert first.params[THINKER] == {
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {"7": -100.0},
        "logprobs": 3,
        "json_schema": schema,
        "min_p": 0.1,
        "stop_token_ids": [3],
        "min_tokens": 2,
        "ignore_eos": True,
        "bad_words": ["no"],
    }
    assert second.params[THINKER] == {"json_schema": {}, "logprobs": 0}


def test_earlier_answer_can_be_sent_back_whole(server: Server, ai: OpenAI) -> None:
    answer = ai.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hello"}])
    again = [
        {"role": "user", "content": "hello"},
        answer.choices[0].message.model_dump(),
        {"role": "user", "content": "x"},
    ]
    ask(ai, messages=again)
    assert len(server.call(lambda pipeline: pipeline.seen)) == 2


def test_openai_defaults_sent_explicitly_are_accepted(ai: OpenAI) -> None:
    ask(
        ai,
        n=1,
        frequency_penalty=0,
        presence_penalty=0.0,
        logprobs=False,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        store=False,
        service_tier="auto",
        stop=None,
        seed=None,
        stream=False,
        metadata={"a": "b"},
    )


def test_error_before_the_first_word_of_a_stream_has_its_status(server: Server, ai: OpenAI) -> None:
    error = StageFailed("stage thinker: out of memory", stage="thinker")
    server.call(lambda pipeline: setattr(pipeline, "fail_after", (0, error)))
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        ask(ai, stream=True)


def test_error_within_a_stream_is_its_last_event(server: Server, ai: OpenAI) -> None:
    error = StageFailed("out of memory", stage="thinker")
    server.call(lambda pipeline: setattr(pipeline, "fail_after", (3, error)))
    text = ""
    with pytest.raises(openai.APIError, match="stage thinker: out of memory") as caught:  # noqa: PT012
        for chunk in ai.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "hello"}], stream=True
        ):
            text += chunk.choices[0].delta.content or ""
    assert text == TEXT[:3]
    assert caught.value.code == "stage_failed"
    server.until(lambda pipeline: pipeline.running == 0)


def test_bug_within_a_stream_is_told_without_its_internals(server: Server, ai: OpenAI) -> None:
    server.call(lambda pipeline: setattr(pipeline, "fail_after", (3, ZeroDivisionError("secret"))))
    with pytest.raises(openai.APIError, match="internal error") as caught:
        list(ask(ai, stream=True))
    assert "secret" not in str(caught.value)


def test_deploy_without_text_says_which_stage_chat_needs() -> None:
    deploy = only("painter", two_stages())
    with serving(deploy) as server, OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as ai:
        with pytest.raises(openai.BadRequestError, match=r"kind ar with `output: text`.*painter \(image\)"):
            ask(ai)
        assert server.call(lambda pipeline: pipeline.seen) == []


def test_model_of_another_stage_says_what_it_gives(ai: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="demo/painter gives image"):
        ask(ai, model="demo/painter")


def test_calls_of_tools_are_openais_streamed_and_not_and_may_be_sent_back_with_their_results(
    server: Server, ai: OpenAI
) -> None:
    says = TextOutput("", reasoning="Where?", tool_calls=(ToolCall("weather", '{"town": "Bonn"}'),))
    server.call(lambda pipeline: setattr(pipeline, "says", says))
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    first = ask(ai, tools=tools, tool_choice="auto").choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content is None
    assert first.message.reasoning_content == "Where?"  # type: ignore[attr-defined]
    (call,) = first.message.tool_calls or ()
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", '{"town": "Bonn"}')
    deltas = [chunk.choices[0] for chunk in ask(ai, tools=tools, stream=True)]
    told = [one for choice in deltas for one in choice.delta.tool_calls or ()]
    assert [(one.index, one.function.name, one.function.arguments) for one in told if one.function] == [
        (0, "weather", '{"town": "Bonn"}')
    ]
    assert deltas[-1].finish_reason == "tool_calls"
    assert "Where?" in [getattr(choice.delta, "reasoning_content", None) for choice in deltas]
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    ask(ai, messages=[{"role": "user", "content": "weather?"}, first.message.model_dump(exclude_none=True), result])
    seen = server.call(lambda pipeline: pipeline.seen)
    assert seen[0].tools[0]["function"]["name"] == "weather"
    assert seen[-1].messages[1].tool_calls == (ToolCall("weather", '{"town": "Bonn"}', call.id),)
    assert seen[-1].messages[1].reasoning == "Where?"
    assert seen[-1].messages[2] == ChatMessage("tool", "rain", tool_call_id=call.id)


def test_tool_choice_none_and_settings_of_the_chat_template_reach_the_stage(server: Server, ai: OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    ask(ai, tools=tools, tool_choice="none", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    (seen,) = server.call(lambda pipeline: pipeline.seen)
    assert (seen.tools, seen.template) == ((), {"enable_thinking": False})
