"""POST /v1/chat/completions: the text of one AR stage, whole or as server-sent events, and pictures of it.

A stream's first byte is sent when there is a first piece of text, so a request that is refused or fails before that
still gets its proper status. `seed` goes to every stage that the answer needs; the other settings to the stage
that answers.
"""

import functools
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from time import time
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omni.api import bodies
from omni.api.catalog import Catalog
from omni.api.chat_pictures import Drawing, draw, drawing_for, instructed
from omni.api.decode import convert, drop_harmless, read_object
from omni.api.errors import error_answer, log_bug
from omni.api.lifetime import Events, Lifetime, while_connected
from omni.api.messages import to_message, tools_of
from omni.api.params import Spelling, caller_spelling, one_of, per_stage
from omni.api.requests import HEADER, Requests
from omni.api.sse import line, open_stream
from omni.outputs import RequestEvent, RequestOutput, StageDone, StagePaused, StageUpdated, TextDelta, TextOutput
from omni.pipeline import Pipeline
from omni.request import GenerateRequest
from proto.deploy import Kind
from proto.errors import InvalidRequest, OmniError, StageFailed
from proto.ids import StageName
from proto.messages import Answer, TokenLogprobs, ToolCall
from proto.params import Json, SamplingParams

ROUTE: Final = "/v1/chat/completions"
_FINISH: Final = {"length": "length"}
"""OpenAI's word for a stage's finish reason; any other is "stop"."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One checked call."""

    id: str
    created: int
    model: str
    stage: StageName
    request: GenerateRequest
    spelling: Spelling
    stream: bool
    usage_chunk: bool
    choices: int
    drawing: Drawing | None


class Chat:
    def __init__(self, pipeline: Pipeline, catalog: Catalog, lifetime: Lifetime, requests: Requests) -> None:
        self._pipeline: Final = pipeline
        self._catalog: Final = catalog
        self._lifetime: Final = lifetime
        self._requests: Final = requests

    async def complete(self, http: Request) -> Response:
        data = await read_object(http, self._pipeline.deploy.api.max_body_bytes)
        call = self._check(data, self._requests.new_id(http, "chatcmpl"))
        events = self._pipeline.generate(call.request)
        if call.stream:
            first = functools.partial(self._first_text, call.stage, events)
            lines = functools.partial(self._lines, call, events=events)
            return await open_stream(http, self._requests, call.id, call.spelling, events, first, lines)
        with caller_spelling(call.spelling), self._requests.running(call.id, events):
            output = await while_connected(http, self._lifetime.last(events))
        done = _done(output, call.stage)
        pictures = await while_connected(http, self._pictures(call, output))
        choices = [
            bodies.Choice(
                msgspec.structs.replace(_message(one, call.id, index), images=pictures or msgspec.UNSET),
                _finish(one),
                index,
                _chances(one.logprobs),
            )
            for index, one in enumerate(_answers(done))
        ]
        prompt = _chances(done.output.prompt_logprobs) if isinstance(done.output, TextOutput) else None
        answer = bodies.ChatAnswer(
            call.id, call.created, call.model, choices, _usage(done), prompt_logprobs=prompt or msgspec.UNSET
        )
        return Response(msgspec.json.encode(answer), media_type="application/json", headers={HEADER: call.id})

    def _check(self, data: dict[str, Json], name: str) -> ChatCall:
        drop_harmless(data, bodies.CHAT_REFUSED)
        body = convert(data, bodies.ChatBody, known=bodies.CHAT_REFUSED)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options needs stream=true", field="stream_options")
        if body.resumable and not body.stream:
            raise InvalidRequest("resumable needs stream=true, or nobody would know when to go on", field="resumable")
        stage = self._catalog.stage_for(body.model, Kind.TEXT, ROUTE)
        spelling: Spelling = {"prompt": "messages"}
        params = _sampling(body, spelling)
        convert(params, SamplingParams, spelling=spelling)
        drawing = drawing_for(body, stage, self._catalog, ROUTE)
        messages = tuple(to_message(message, index) for index, message in enumerate(body.messages))
        given: dict[StageName, Mapping[str, Json]] = dict(per_stage(self._pipeline, self._catalog, stage, params))
        if drawing is not None and not drawing.afterwards:
            given.update(drawing.params)
        request = GenerateRequest(
            messages=instructed(messages, self._pipeline, drawing),
            tools=tools_of(body),
            template=body.chat_template_kwargs or {},
            outputs=(stage,) if drawing is None else drawing.outputs,
            params=given,
        )
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return ChatCall(
            name, int(time()), body.model, stage, request, spelling, bool(body.stream), usage, body.n or 1, drawing
        )

    async def _pictures(self, call: ChatCall, output: RequestOutput) -> list[bodies.ImagePart]:
        """Of what the answer says; none where none was asked for."""
        if call.drawing is None:
            return []
        text = _answers(_done(output, call.stage))[0].text
        return await draw(call.drawing, output, text, self._pipeline, self._lifetime)

    async def _first_text(self, stage: StageName, events: Events) -> RequestEvent:
        while True:
            event = await self._lifetime.next(events)
            if isinstance(event, RequestOutput) or (
                isinstance(event, TextDelta | StagePaused) and event.stage == stage
            ):
                return event

    async def _lines(self, call: ChatCall, event: RequestEvent, events: Events) -> AsyncGenerator[bytes, None]:
        """The stream. Once begun, an error can only be one more event, and the last: no [DONE] follows it."""
        none_yet = None if call.usage_chunk else msgspec.UNSET
        try:
            for index in range(call.choices):
                yield _chunk(call, bodies.Delta(role="assistant", content=""), index, usage=none_yet)
            told: Counter[int] = Counter()
            calls: Counter[int] = Counter()
            while not isinstance(event, RequestOutput):
                if isinstance(event, TextDelta) and event.stage == call.stage:
                    told[event.choice] += len(event.logprobs)
                    delta = bodies.Delta(
                        content=event.text or None,
                        reasoning_content=event.reasoning or None,
                        tool_calls=_called(event.tool_calls, call.id, event.choice, calls[event.choice]) or None,
                    )
                    calls[event.choice] += len(event.tool_calls)
                    yield _chunk(call, delta, event.choice, usage=none_yet, logprobs=_chances(event.logprobs))
                elif isinstance(event, StagePaused) and event.stage == call.stage:
                    yield _chunk(call, bodies.Delta(), finish=_FINISH.get(event.finish_reason, "stop"), usage=none_yet)
                elif isinstance(event, StageUpdated):
                    yield _chunk(call, None, usage=none_yet, update=_told(event))
                event = await self._lifetime.next(events)
            done = _done(event, call.stage)
            if pictures := await self._pictures(call, event):
                yield _chunk(call, bodies.Delta(images=pictures), usage=none_yet)
            for index, one in enumerate(_answers(done)):
                rest = _chances(one.logprobs[told[index] :])
                yield _chunk(call, bodies.Delta(), index, finish=_finish(one), usage=none_yet, logprobs=rest)
            if call.usage_chunk:
                yield _chunk(call, None, usage=_usage(done))
            yield line(b"[DONE]")
        except OmniError as error:
            yield line(msgspec.json.encode(error_answer(error.info)))
        except Exception:  # noqa: BLE001 the status is sent already: only an event can tell the caller
            log_bug()
            yield line(msgspec.json.encode(error_answer(OmniError("internal error").info)))


def _sampling(body: bodies.ChatBody, spelling: Spelling) -> dict[str, Json]:
    """The stage's parameters that the caller set. Renames are noted in `spelling`."""
    params: dict[str, Json] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "typical_p": body.typical_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": body.logit_bias,
        "bad_words": body.bad_words,
        "seed": body.seed,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop,
        "stop_token_ids": body.stop_token_ids,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "n": body.n,
        "logprobs": _logprobs_wanted(body),
        "prompt_logprobs": body.prompt_logprobs,
        "json_schema": _schema(body.response_format),
        "regex": body.regex,
        "grammar": body.grammar,
        "cache_salt": body.cache_salt,
        "resumable": body.resumable,
        "lora": body.lora,
        "lora_scale": body.lora_scale,
    }
    spelling["json_schema"] = "response_format"
    if body.top_logprobs is not None:
        spelling["logprobs"] = "top_logprobs"
    if isinstance(body.stop, str):
        spelling["stop[0]"] = "stop"
    spelling["max_tokens"], params["max_tokens"] = one_of(
        ("max_tokens", body.max_tokens), ("max_completion_tokens", body.max_completion_tokens)
    )
    return {name: value for name, value in params.items() if value is not None}


def _logprobs_wanted(body: bodies.ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", field="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _schema(form: bodies.ResponseFormat | None) -> dict[str, Json] | None:
    """The JSON schema that the answer must follow; {} is any object."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {}
    if form.json_schema is None or form.json_schema.schema is None:
        raise InvalidRequest(
            'response_format.json_schema is missing its schema; send {"name": ..., "schema": {...}}',
            field="response_format.json_schema",
        )
    return form.json_schema.schema


def _chances(logprobs: Sequence[TokenLogprobs]) -> bodies.ChoiceLogprobs | None:
    if not logprobs:
        return None
    return bodies.ChoiceLogprobs(
        [
            bodies.ContentLogprob(
                one.token, one.logprob, [bodies.TopLogprob(other.token, other.logprob) for other in one.top]
            )
            for one in logprobs
        ]
    )


def _done(output: RequestOutput, stage: StageName) -> StageDone:
    done = output.stages.get(stage)
    if done is None:
        raise StageFailed(f"stage {stage} gave no text", stage=stage)
    return done


def _answers(done: StageDone) -> list[Answer]:
    """All answers, in their order."""
    said = done.output if isinstance(done.output, TextOutput) else TextOutput("")
    first = Answer(said.text, done.finish_reason, said.logprobs, said.reasoning, said.tool_calls)
    return [first, *said.more]


def _message(answer: Answer, name: str, choice: int) -> bodies.AnswerMessage:
    """An answer that only calls tools has no content, as in OpenAI's API."""
    return bodies.AnswerMessage(
        answer.text or (None if answer.tool_calls else ""),
        reasoning_content=answer.reasoning or msgspec.UNSET,
        tool_calls=_called(answer.tool_calls, name, choice, 0, indexed=False) or msgspec.UNSET,
    )


def _called(
    calls: Sequence[ToolCall], name: str, choice: int, first: int, *, indexed: bool = True
) -> list[bodies.CallItem]:
    """`first` of the answer's calls have been told before; a stream numbers them."""
    return [
        bodies.CallItem(
            one.id or f"call_{name.removeprefix('chatcmpl-')}_{choice}_{place}",
            bodies.CalledFunction(one.name, one.arguments),
            place if indexed else msgspec.UNSET,
        )
        for place, one in enumerate(calls, first)
    ]


def _finish(answer: Answer) -> str:
    return "tool_calls" if answer.tool_calls else _FINISH.get(answer.finish_reason, "stop")


def _usage(done: StageDone) -> bodies.ChatUsage:
    usage = done.usage
    return bodies.ChatUsage(usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens + usage.completion_tokens)


def _chunk(
    call: ChatCall,
    delta: bodies.Delta | None,
    index: int = 0,
    *,
    finish: str | None = None,
    usage: bodies.ChatUsage | msgspec.UnsetType | None,
    logprobs: bodies.ChoiceLogprobs | None = None,
    update: bodies.UpdateTold | msgspec.UnsetType = msgspec.UNSET,
) -> bytes:
    choices = [] if delta is None else [bodies.ChunkChoice(delta, finish, index, logprobs)]
    return line(msgspec.json.encode(bodies.ChatChunk(call.id, call.created, call.model, choices, usage, update)))


def _told(event: StageUpdated) -> bodies.UpdateTold:
    return bodies.UpdateTold(event.event, event.state.value, event.reason or None, event.step)
