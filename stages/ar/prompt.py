"""From a job's inputs to the token ids of its prompt. Pure apart from the tokenizer.

- `prompt_embeds`: embeddings in place of tokens, whose ids are then of no meaning. They are the whole prompt.
- `tokens`: ids as they are. They are the whole prompt: a `prompt` beside them is not read.
- `prompt` as Chat: the messages as they are, through the tokenizer's chat template.
- `prompt` as Text, which may be empty for a companion: the stage's `prompt.template` and `prompt.system` around it, then the chat template as one user
  message; with `prompt.chat: false`, or a tokenizer without a chat template, the plain text, the system text first and a
  blank line between.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import torch
from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

from proto.deploy import PromptSpec
from proto.errors import InvalidRequest, ProtocolError
from proto.framing import tensor_at
from proto.messages import Chat, ChatMessage, Tensor, Text, Tokens
from proto.params import Json
from proto.suggest import hint
from proto.tensors import WireTensor
from proto.torch_tensors import from_wire
from stages.engine import Job

RESERVED: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}
    | {"chat_template", "tokenize", "raise_exception", "strftime_now", "tojson"}
)
"""Names in a chat template that are not the caller's to set."""

_JINJA: Final = Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])

DEFAULT_MAX_TOKENS: Final = 1024
"""Length of an answer for which neither the request, nor the deploy, nor the model's generation config sets one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was read. `field` is the input that it came by. `written` is what a chat template made of it, of which `opening`
    begins the answer; `tools` are what the answer may call."""

    ids: tuple[int, ...]
    field: str
    written: str = ""
    opening: str = ""
    tools: tuple[Mapping[str, Json], ...] = ()


class PromptReader:
    """Turns inputs into ids for one tokenizer. Everything that is wrong with an input is an `InvalidRequest`.

    `vocabulary` is the number of ids that the model has, `width` the size of an embedding, `context` the most tokens of
    prompt and answer together.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, spec: PromptSpec, *, vocabulary: int, context: int, width: int = 0
    ) -> None:
        self._width = width
        self._settings = _template_settings(tokenizer)
        self._tokenizer = tokenizer
        self._spec = spec
        self._vocabulary = vocabulary
        self._context = context

    def embeds(self, job: Job) -> torch.Tensor | None:
        """The prompt as embeddings (T, D), if it is given so; a copy."""
        given = job.inputs.get("prompt_embeds")
        if isinstance(given, Tensor):
            wire = tensor_at(job.tensors, given.tensor)
        elif given is not None:
            raise InvalidRequest(f"prompt_embeds must be a tensor, not {type(given).__name__}", field="prompt_embeds")
        elif "prompt_embeds" in job.payloads:
            tensors = job.payloads["prompt_embeds"].tensors
            wire = tensors.get("prompt_embeds") or tensors.get("hidden") or _refuse_payload(tensors, "prompt_embeds")
        else:
            return None
        try:
            embeds = from_wire(wire)
        except ProtocolError as error:
            raise InvalidRequest(f"prompt_embeds cannot be read: {error}", field="prompt_embeds") from error
        fits = embeds.dim() == 2 or (embeds.dim() == 3 and embeds.shape[0] == 1)
        if not fits or not embeds.is_floating_point() or embeds.shape[-1] != self._width:
            raise InvalidRequest(
                f"prompt_embeds must be floats of shape (T, {self._width}) or (1, T, {self._width}), not"
                f" {wire.ref.dtype.value} of {list(wire.ref.shape)}",
                field="prompt_embeds",
            )
        if not bool(embeds.isfinite().all()):
            raise InvalidRequest("prompt_embeds holds what is not a number", field="prompt_embeds")
        return embeds.reshape(-1, self._width).clone()

    def read(self, job: Job, embeds: torch.Tensor | None = None) -> Prompt:
        """The prompt: at least one id, and few enough to leave room for one more. With `embeds` they are only places."""
        return self._checked(Prompt((0,) * len(embeds), "prompt_embeds") if embeds is not None else self._read(job))

    def conversation(self, job: Job) -> Chat | None:
        """The prompt as messages, if the chat template has written it; else None."""
        prompt = job.inputs.get("prompt")
        if "tokens" in job.inputs or "tokens" in job.payloads or self._tokenizer.chat_template is None:
            return None
        if isinstance(prompt, Text) and self._spec.chat:
            system = (ChatMessage("system", self._spec.system),) if self._spec.system else ()
            return Chat(messages=(*system, self.turn(prompt.text)))
        return prompt if isinstance(prompt, Chat) else None

    def turn(self, text: str) -> ChatMessage:
        """A plain prompt as what the user says next."""
        return ChatMessage("user", self._spec.template.replace("{prompt}", text))

    def conversed(self, chat: Chat) -> Prompt:
        """A whole conversation, as if it were a prompt."""
        return self._checked(self._chat(chat))

    def longer(self, before: Sequence[int], value: Text | Tokens) -> Prompt:
        """Tokens that were there, and more behind them as they are."""
        more = value.ids if isinstance(value, Tokens) else self._encode(value.text, special=False)
        return self._checked(Prompt((*before, *more), "tokens" if isinstance(value, Tokens) else "prompt"))

    def _checked(self, prompt: Prompt) -> Prompt:
        ids, field = prompt.ids, prompt.field
        if not ids:
            raise InvalidRequest(f"the {field} is empty; it must give at least one token", field=field)
        strange = [one for one in ids if not 0 <= one < self._vocabulary]
        if strange:
            raise InvalidRequest(
                f"{field} holds id {strange[0]}; the model has ids 0 to {self._vocabulary - 1}", field=field
            )
        if len(ids) + 1 > self._context:
            raise InvalidRequest(
                f"the {field} has {len(ids)} tokens; with one for the answer that is more than the {self._context} that"
                " the stage takes (engine.max_model_len, or what the model was made for); shorten it",
                field=field,
            )
        return prompt

    def _read(self, job: Job) -> Prompt:
        if "tokens" in job.payloads:
            tensors = job.payloads["tokens"].tensors
            return Prompt(_tensor_ids(tensors.get("tokens") or _refuse_payload(tensors, "tokens")), "tokens")
        given = job.inputs.get("tokens")
        if isinstance(given, Tokens):
            return Prompt(given.ids, "tokens")
        if isinstance(given, Tensor):
            return Prompt(_tensor_ids(tensor_at(job.tensors, given.tensor)), "tokens")
        if given is not None:
            raise InvalidRequest(f"tokens must be token ids, not {type(given).__name__}", field="tokens")
        prompt = job.inputs.get("prompt")
        if isinstance(prompt, Text):
            empty = not prompt.text and bool(job.emit)  # a companion may be empty; nobody can be answered
            return Prompt((), "prompt") if empty else self._text(prompt.text)
        if isinstance(prompt, Chat):
            return self._chat(prompt)
        if prompt is None:
            raise InvalidRequest("the stage needs a prompt, chat messages or tokens, and got none", field="prompt")
        raise InvalidRequest(f"prompt must be text or chat messages, not {type(prompt).__name__}", field="prompt")

    def _text(self, text: str) -> Prompt:
        text = self._spec.template.replace("{prompt}", text)
        system = self._spec.system
        if self._tokenizer.chat_template is None or not self._spec.chat:
            return Prompt(self._encode(f"{system}\n\n{text}" if system else text, special=True), "prompt")
        messages: list[dict[str, Json]] = [{"role": "user", "content": text}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return self._template(messages, "prompt")

    def _chat(self, chat: Chat) -> Prompt:
        if self._tokenizer.chat_template is None:
            raise InvalidRequest(
                "the model's tokenizer has no chat template, so it cannot take messages; send a plain prompt",
                field="messages",
            )
        if not chat.messages:
            return Prompt((), "messages")
        if chat.tools and "tools" not in self._settings:
            raise InvalidRequest("the model's chat template takes no tools; leave them out", field="tools")
        for name in chat.template:
            if name not in self._settings - RESERVED:
                raise InvalidRequest(
                    f"the model's chat template has no setting {name!r}; {hint(name, self._settings - RESERVED, 'it has')}",
                    field="chat_template_kwargs",
                )
        messages = [_message(one, number) for number, one in enumerate(chat.messages)]
        return self._template(messages, "messages", chat.tools, chat.template)

    def _template(
        self,
        messages: list[dict[str, Json]],
        field: str,
        tools: tuple[Mapping[str, Json], ...] = (),
        settings: Mapping[str, Json] | None = None,
    ) -> Prompt:
        further: dict[str, Json] = {"tools": [dict(one) for one in tools] or None, **(settings or {})}
        try:
            closed, text = (
                str(
                    self._tokenizer.apply_chat_template(
                        messages, tokenize=False, add_generation_prompt=opened, **further
                    )
                )
                for opened in (False, True)
            )
        except (TemplateError, TypeError, ValueError) as error:  # a template computes with what it is given
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", field=field) from error
        opening = text[len(closed) :] if text.startswith(closed) else ""
        return Prompt(self._encode(text, special=False), field, text, opening, tools)

    def _encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        """A chat template writes its own special tokens; plain text gets those that the tokenizer adds."""
        return tuple(self._tokenizer(text, add_special_tokens=special)["input_ids"])


def _template_settings(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """The names that a chat template asks for."""
    template = tokenizer.chat_template
    texts = [template] if isinstance(template, str) else list((template or {}).values())
    try:
        return frozenset(name for text in texts for name in meta.find_undeclared_variables(_JINJA.parse(text)))
    except TemplateError:
        return frozenset({"tools"})  # of some extension: what it takes is not known


def _message(message: ChatMessage, number: int) -> dict[str, Json]:
    """As chat templates expect it: arguments of calls are objects."""
    written: dict[str, Json] = {"role": message.role, "content": message.content}
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        written["tool_call_id"] = message.tool_call_id
    if message.name:
        written["name"] = message.name
    if message.tool_calls:
        where = f"messages[{number}].tool_calls"
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments, f"{where}[{place}]")},
            }
            for place, call in enumerate(message.tool_calls)
        ]
    return written


def _arguments(text: str, where: str) -> Json:
    try:
        arguments = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{where}: the arguments are not JSON: {error}", field="messages") from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}: the arguments must be a JSON object", field="messages")
    return arguments


def _refuse_payload(tensors: Mapping[str, WireTensor], name: str) -> WireTensor:
    raise InvalidRequest(f"the {name} payload holds {sorted(tensors)}, not a tensor {name!r}", field=name)


def _tensor_ids(tensor: WireTensor) -> tuple[int, ...]:
    try:
        ids = from_wire(tensor)
    except ProtocolError as error:
        raise InvalidRequest(f"tokens cannot be read: {error}", field="tokens") from error
    fits = ids.dim() == 1 or (ids.dim() == 2 and ids.shape[0] == 1)
    if not fits or ids.is_floating_point() or ids.dtype is torch.bool:
        raise InvalidRequest(
            f"tokens must be integers of shape (T,) or (1, T), not {tensor.ref.dtype.value} of {list(tensor.ref.shape)}",
            field="tokens",
        )
    return tuple(ids.reshape(-1).tolist())


def answer_length(asked: int | None, models: int | None, room: int) -> int:
    """How many tokens an answer may have: what was asked for, clipped to the room that the prompt leaves.

    Not asked for, it is the model's own `max_new_tokens`, else `DEFAULT_MAX_TOKENS`.
    """
    return min(room, asked or models or DEFAULT_MAX_TOKENS)
