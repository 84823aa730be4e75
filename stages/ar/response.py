"""What an answer is made of: what the model thought, what it says, and the functions that it calls.

transformers' own response parser finds the parts (`tokenizer.response_template`, transformers 5.24). For checkpoints that
have none yet, the two forms that chat templates show most are known here: <think>...</think>, and the JSON of Hermes and
Qwen in <tool_call>...</tool_call>. An answer of any other form is text, as it is.

Invariants: the deltas' texts, joined, are the text, whatever pieces it comes in. What cannot be parsed (a call whose JSON
is broken, an answer cut off within one) is never lost and never fails the request: it is text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from transformers import PreTrainedTokenizerBase

from proto.messages import ToolCall
from proto.params import Json

REASONING: Final = ("reasoning", "reasoning_content", "thinking")
"""Names that response templates give to what the model thought."""

_THINK: Final = {"open": "<think>", "close": "</think>"}
_CALLS: Final = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "content_args": {"allow_non_json": True},
}
_NOWHERE: Final = "\0"
"""An anchor that no prompt has: the prefix is cut before the parser sees it."""


@dataclass(frozen=True, slots=True)
class Delta:
    """More of an answer. Tool calls come whole."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls)

    def __add__(self, other: "Delta") -> "Delta":
        return joined((self, other))


def joined(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        "".join(one.text for one in deltas),
        "".join(one.reasoning for one in deltas),
        tuple(call for one in deltas for call in one.tool_calls),
    )


class Response(Protocol):
    """Takes one answer's text in pieces and gives its parts as they are known."""

    def push(self, text: str) -> Delta: ...

    def finish(self) -> Delta:
        """What was held back, now that nothing more will come."""
        ...


class PlainResponse:
    """All of it is text."""

    def push(self, text: str) -> Delta:
        return Delta(text)

    def finish(self) -> Delta:
        return Delta()


@dataclass(slots=True)
class _Trimmed:
    """Text in pieces, without white space at its start and its end."""

    begun: bool = False
    held: str = ""

    def push(self, text: str) -> str:
        text = self.held + (text if self.begun else text.lstrip())
        kept = text.rstrip()
        self.begun, self.held = self.begun or bool(kept), text[len(kept) :]
        return kept


@dataclass(slots=True)
class ParsedResponse:
    """Around one parser of transformers. `raw` is what the region that is open has taken in, should it not parse."""

    parser: Any
    text: _Trimmed = field(default_factory=_Trimmed)
    reasoning: _Trimmed = field(default_factory=_Trimmed)
    raw: str = ""
    broken: bool = False

    def push(self, text: str) -> Delta:
        if self.broken:
            return Delta(self.text.push(text))
        try:
            return self._read(self.parser.feed(text))
        except ValueError:
            return self._give_up(text)

    def finish(self) -> Delta:
        if self.broken:
            return Delta()
        try:
            _, events = self.parser.finalize()
            return self._read(events)
        except ValueError:
            return self._give_up("")

    def _give_up(self, text: str) -> Delta:
        self.broken = True
        return Delta(self.text.push(self.raw + text))

    def _read(self, events: Sequence[Mapping[str, Any]]) -> Delta:
        delta = Delta()
        for event in events:
            name = event["field"]
            if event["type"] == "region_chunk" and (event["dirty"] or name == "tool_calls"):
                self.raw += event["text"]
            elif event["type"] == "region_chunk":
                delta += self._said(name, event["text"])
            elif event["type"] == "region_close":
                if name == "tool_calls":
                    delta += self._called(event["value"])
                self.raw = ""
        return delta

    def _said(self, name: str, text: str) -> Delta:
        if name == "content":
            return Delta(self.text.push(text))
        return Delta(reasoning=self.reasoning.push(text)) if name in REASONING else Delta()

    def _called(self, value: Json) -> Delta:
        calls = [_call(one) for one in (value if isinstance(value, list) else [value])]
        if calls and all(calls):
            return Delta(tool_calls=tuple(one for one in calls if one is not None))
        return Delta(self.text.push(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))


def _call(value: Json) -> ToolCall | None:
    """One parsed call, if it is one."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", function.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(function["name"][:256], text, str(function.get("id", value.get("id", "")))[:256])


class ResponseForms:
    """How one tokenizer's answers are parsed. `kept` are special tokens that mark their parts: they must stay in the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        own = tokenizer.response_template
        self._own = own is not None
        self._form: Mapping[str, Json] | None = own if own is not None else _known_form(tokenizer.chat_template)
        written = json.dumps(self._form, ensure_ascii=False) if self._form else ""
        special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        self.kept = frozenset(int(one) for text, one in special if text in written)

    def response(self, prompt: str, opening: str, tools: Sequence[Mapping[str, Json]]) -> Response:
        """For the answer to a prompt that the chat template wrote, of which `opening` begins the answer."""
        if self._form is None:
            return PlainResponse()
        parser = self._tokenizer.get_response_parser(
            dict(self._form), prefix=prompt if self._own else opening, tools=[dict(one) for one in tools] or None
        )
        return ParsedResponse(parser)


def _known_form(template: str | Mapping[str, str] | None) -> Mapping[str, Json] | None:
    """The response template that a chat template's own words ask for."""
    text = template if isinstance(template, str) else " ".join((template or {}).values())
    fields: dict[str, Json] = {}
    if "</think>" in text:
        fields["reasoning"] = _THINK
    if "</tool_call>" in text and re.search(r"<tool_call>(?:(?!</tool_call>).){0,400}arguments", text, re.DOTALL):
        fields["tool_calls"] = _CALLS
    return {"start_anchor": _NOWHERE, "fields": {**fields, "content": {}}} if fields else None
