"""What a model thought, what it says and the tools that it calls are told apart, streamed in any pieces and whole."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.errors import InvalidRequest
from proto.messages import Chat, ChatMessage, Text, TextDelta, ToolCall
from proto.params import SamplingParams
from stages.ar.engine import ArEngine
from stages.ar.response import ResponseForms, joined
from stages.engine import Emit, Event
from tests.models.tiny_ar import CHAT_TEMPLATE, build_tiny_llama, build_tiny_tokenizer
from tests.pipeline.test_ar_engine import finished, job, loaded, run

TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>'
CALLED = ToolCall("weather", '{"town": "Köln"}')


def forms(template: str = TOOLS_TEMPLATE, **more: object) -> ResponseForms:
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = template
    for name, value in more.items():
        setattr(tokenizer, name, value)
    return ResponseForms(tokenizer)


FORMS = forms()


def parsed(text: str, cuts: list[int], opening: str = ""):
    response = FORMS.response("a prompt", opening, ())
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    deltas = [response.push(text[a:b]) for a, b in pairwise(places)]
    return joined([*deltas, response.finish()])


CASES = {
    "plain text": ("It is 5 < 6 and so on.", "It is 5 < 6 and so on.", "", ()),
    "thought and text": ("<think>\nHm, 2 < 3.\n</think>\n\nYes.\n", "Yes.", "Hm, 2 < 3.", ()),
    "thought, text and calls": (f"<think>a</think>Let me see. {CALL}\n{CALL}", "Let me see.", "a", (CALLED, CALLED)),
    "a call alone": (CALL, "", "", (CALLED,)),
    "a call that is no JSON": ("<tool_call>weather(Köln)</tool_call>", "weather(Köln)", "", ()),
    "a call that names nothing": ('<tool_call>{"a": 1}</tool_call>', '{"a": 1}', "", ()),
    "a thought that is cut off": ("<think>so far", "", "so far", ()),
    "a call that is cut off": ('Look: <tool_call>{"name": "wea', 'Look: {"name": "wea', "", ()),
    "marks that only begin": ("a <thin and <tool_cal", "a <thin and <tool_cal", "", ()),
}


@pytest.mark.parametrize("case", CASES)
@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_parts_are_the_same_in_whatever_pieces_an_answer_comes(case: str, cuts: list[int]) -> None:
    text, says, thought, calls = CASES[case]
    found = parsed(text, cuts)
    assert found.text == says
    assert (found.reasoning, found.tool_calls) == (thought, calls)


def test_a_thought_that_the_prompt_begins_goes_on() -> None:
    assert parsed("so</think>Yes.", [], "<|im_start|>assistant\n<think>").reasoning == "so"
    assert parsed("so</think>Yes.", [], "<|im_start|>assistant\n").reasoning == ""


def test_a_chat_template_without_such_parts_leaves_answers_as_they_are() -> None:
    response = forms(CHAT_TEMPLATE).response("", "", ())
    assert response.push(" <think>a</think> ").text == " <think>a</think> "


def test_a_checkpoints_own_response_template_is_used_and_its_marks_may_be_special_tokens() -> None:
    own = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"thinking": {"open": "<|endoftext|>", "close": "<|im_end|>"}, "content": {}},
    }
    made = forms(CHAT_TEMPLATE, response_template=own)
    assert len(made.kept) == 3
    response = made.response("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n", "", ())
    assert (
        joined([response.push("<|endoftext|>hm<|im_"), response.push("end|>Yes"), response.finish()]).reasoning == "hm"
    )


# --- through the engine -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ArEngine:
    folder = build_tiny_llama(tmp_path_factory.mktemp("models") / "tools")
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = TOOLS_TEMPLATE
    tokenizer.save_pretrained(folder)
    return loaded(folder)


def asked(words: str, *more: ChatMessage, tools=(WEATHER,), says: str = "", **template: object):
    """A chat whose answer is `says`, forced."""
    chat = Chat(messages=(ChatMessage("user", words), *more), tools=tools, template=template)
    return job("r", chat, SamplingParams(regex=re.escape(says), max_tokens=200), emit=("text",))


def said(events: list[Event]) -> Text:
    value = finished(events).outputs["text"]
    assert isinstance(value, Text)
    return value


def test_an_answer_streams_its_parts_and_ends_with_them(engine: ArEngine) -> None:
    events = run(engine, [asked("weather?", says=f"<think>Where?</think>One moment. {CALL}", enable_thinking=False)])[
        "r"
    ]
    parts = [event.part for event in events if isinstance(event, Emit) and isinstance(event.part, TextDelta)]
    whole = said(events)
    assert (whole.text, whole.reasoning, whole.tool_calls) == ("One moment.", "Where?", (CALLED,))
    assert "".join(part.text for part in parts) == whole.text
    assert "".join(part.reasoning for part in parts) == whole.reasoning
    assert [call for part in parts for call in part.tool_calls] == [CALLED]
    assert sum(bool(part.text) for part in parts) > 1


def test_a_thought_that_the_template_begins_is_the_answers(engine: ArEngine) -> None:
    assert said(run(engine, [asked("x", says="hm</think>Yes", enable_thinking=True)])["r"]).reasoning == "hm"


def test_tools_earlier_calls_and_their_results_are_in_the_prompt(engine: ArEngine) -> None:
    call = ChatMessage("assistant", "", (ToolCall("weather", '{"town": "Bonn"}', "c1"),), "Bonn it is")
    result = ChatMessage("tool", "rain", tool_call_id="c1")
    sequence = engine._loaded.intake.sequence(asked("x", call, result))
    written = sequence.read_prompt.written
    assert json.dumps(WEATHER["function"]["name"]) in written
    assert (
        '<think>Bonn it is</think><tool_call>{"name": "weather", "arguments": {"town": "Bonn"}}</tool_call>' in written
    )
    assert "<|im_start|>tool\nrain" in written


@pytest.mark.parametrize(
    ("chat", "field", "problem"),
    [
        (asked("x", enable_thinkin=True), "chat_template_kwargs", "did you mean 'enable_thinking'"),
        (asked("x", messages=[]), "chat_template_kwargs", "no setting 'messages'"),
        (asked("x", chat_template="{{ 1 }}"), "chat_template_kwargs", "no setting 'chat_template'"),
        (asked("x", ChatMessage("assistant", "", (ToolCall("a", "{"),))), "messages", "not JSON"),
        (asked("x", ChatMessage("assistant", "", (ToolCall("a", "[]"),))), "messages", "JSON object"),
    ],
)
def test_what_the_chat_template_cannot_take_is_refused(engine: ArEngine, chat, field: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(problem)) as error:
        engine.submit(chat)
    assert error.value.info.field == field


def test_tools_are_refused_where_the_chat_template_has_no_place_for_them(tmp_path: Path) -> None:
    engine = loaded(build_tiny_llama(tmp_path / "tiny"))
    with pytest.raises(InvalidRequest, match="takes no tools"):
        engine.submit(asked("x"))
