"""From a job to a sequence that can run, or to a refusal that says what to change. Nothing runs here."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec
import torch
import xxhash
from transformers import PreTrainedTokenizerBase

from proto.deploy import OUTPUTS, ArStage, KvAt
from proto.errors import InvalidRequest, OmniError
from proto.ids import RequestId, StageName
from proto.messages import Chat, ChatMessage, Text, TokenChance, TokenLogprobs, Tokens
from proto.params import SamplingParams, lora_use
from stages.ar.detokenizer import Decode, Detokenizer
from stages.ar.grammar import Grammars
from stages.ar.loading import LoadedModel
from stages.ar.loras import ArLoras
from stages.ar.prompt import Prompt, PromptReader, answer_length
from stages.ar.response import PlainResponse, Response, ResponseForms, joined
from stages.ar.sampler import Logprobs
from stages.ar.sampling import decide, picker
from stages.ar.scheduler import Track
from stages.ar.sequence import PREFILL_OUTPUTS, Clocks, Family, Following, Turns
from stages.ar.sequence import Sequence as Work
from stages.engine import Job

EDGE_ONLY: Final = frozenset({"kv"})
"""Outputs that no caller can be given, for there is no one value that holds them."""


class Intake:
    """Checks jobs against one loaded model. `outputs` are those that it can give, `pool` the tokens that its KV pool
    can hold."""

    def __init__(
        self,
        stage: StageName,
        spec: ArStage,
        loaded: LoadedModel,
        outputs: tuple[str, ...],
        loras: ArLoras,
        *,
        pool: int,
    ) -> None:
        self._loras = loras
        self._pool = pool
        self._grammars = Grammars(loaded.tokenizer, loaded.vocabulary, loaded.eos)
        self._stage = stage
        self._loaded = loaded
        self._outputs = outputs
        self._reader = PromptReader(
            loaded.tokenizer,
            spec.prompt,
            vocabulary=loaded.vocabulary,
            context=loaded.context,
            width=int(loaded.model.get_input_embeddings().weight.shape[1]),
        )
        self._spec = spec.engine
        self._forms = ResponseForms(loaded.tokenizer)
        self._decode = decoder_of(loaded.tokenizer)
        self._decode_parts = decoder_of(loaded.tokenizer, self._forms.kept) if self._forms.kept else self._decode

    def sequence(self, job: Job) -> Work:
        """Raises `InvalidRequest` naming the stage and the field."""
        try:
            return self._sequence(job)
        except OmniError as error:
            raise error.at_stage(self._stage) from error

    def named(self, token: int, chances: Logprobs) -> TokenLogprobs:
        """With the tokens' texts in place of their ids."""
        top = tuple(TokenChance(self._name(one), logprob) for one, logprob in chances.top)
        return TokenLogprobs(self._name(token), chances.token, top)

    def _name(self, token: int) -> str:
        return str(self._loaded.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _sequence(self, job: Job) -> Work:
        params = self._params(job)
        self._check_outputs(job, params)
        embeds = self._reader.embeds(job)
        read = self._reader.read(job, embeds)
        tokens = list(read.ids)
        prompt = len(tokens)
        wanted = {*job.emit, *job.publish}
        if "hidden" in wanted and prompt <= self._spec.hidden_skip:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens, and `hidden` leaves out the first {self._spec.hidden_skip}"
                " (engine.hidden_skip): nothing would be left",
                field="prompt",
            )
        prefill_only = wanted <= self._prefill_outputs
        length = self._length(params, prompt)
        lora = self._loras.choice(lora_use(params))
        whole = params.prompt_logprobs is not None or "hidden" in wanted
        track = Track(
            request=job.request,
            tokens=tokens,
            longest=prompt if prefill_only else prompt + length,
            priority=params.priority or 0,
            salt=_salt(params, embeds, lora),
            lora=lora,
            reads_cache=not whole,  # what tokens gave that were read for somebody else is not kept
        )
        rule = decide(params, self._loaded.generation, self._loaded.eos, self._encode)
        return Work(
            job=job,
            prompt=prompt,
            max_tokens=length,
            track=track,
            picker=picker(rule, tokens, self._grammars.matcher(params), unknown=0 if embeds is None else prompt),
            detokenizer=Detokenizer(self._decoder(read), params.stop or ()),
            response=self._response(read),
            read_prompt=read,
            prefill_only=prefill_only,
            embeds=embeds,
            family=Family(params.n) if params.n is not None and params.n > 1 else None,
            turns=Turns(self._reader.conversation(job)) if params.resumable else None,
        )

    def following(self, work: Work, more: Text | Chat | Tokens) -> Following:
        """What a resumable request reads next: the conversation with its answer and more, or its tokens and more. Raises
        `InvalidRequest`."""
        assert work.turns is not None
        params, chat = self._params(work.job), work.turns.chat
        if chat is not None and not isinstance(more, Tokens):
            said = joined(work.deltas[work.turns.said_before :])
            answer = ChatMessage("assistant", said.text, said.tool_calls, said.reasoning)
            new = more.messages if isinstance(more, Chat) else (self._reader.turn(more.text),)
            chat = msgspec.structs.replace(chat, messages=(*chat.messages, answer, *new))
            prompt = self._reader.conversed(chat)
        elif isinstance(more, Chat):
            problem = "the request did not begin as a conversation, so it takes a prompt or tokens, and no messages"
            raise InvalidRequest(problem, field="messages")
        else:
            tokens = work.track.tokens
            ended = len(tokens) > work.prompt and tokens[-1] in work.picker.rule.ends
            prompt, chat = self._reader.longer(tokens[:-1] if ended else tokens, more), None
        return Following(prompt, chat, self._length(params, len(prompt.ids)))

    def go_on(self, work: Work, following: Following) -> None:
        """Begin the next answer just as that to a prompt of its own."""
        params = self._params(work.job)
        rule = decide(params, self._loaded.generation, self._loaded.eos, self._encode)
        work.go_on(
            following,
            picker(rule, work.track.tokens, self._grammars.matcher(params)),
            Detokenizer(self._decoder(following.prompt), params.stop or ()),
            self._response(following.prompt),
        )

    def sibling(self, first: Work, choice: int) -> Work:
        """Another answer to a prompt that has been read: as if it were asked alone, with the seed `seed + choice`."""
        params = self._params(first.job)
        tokens = first.track.tokens[: first.prompt]
        rule = first.picker.rule
        if rule.seed is not None:
            rule = replace(rule, seed=rule.seed + choice)
        track = replace(
            first.track,
            request=RequestId(f"{first.job.request}#{choice}"),
            tokens=tokens,
            reads_cache=True,
            computed=0,
            hits=0,
            preempted=0,
            pages=[],
            hashes=list(first.track.hashes),
            started=False,
            seated=False,
        )
        unknown = first.prompt if first.embeds is not None else 0
        return Work(
            job=first.job,
            prompt=first.prompt,
            max_tokens=first.max_tokens,
            track=track,
            picker=picker(rule, tokens, self._grammars.matcher(params), unknown=unknown),
            detokenizer=Detokenizer(self._decoder(first.read_prompt), params.stop or ()),
            response=self._response(first.read_prompt),
            read_prompt=first.read_prompt,
            embeds=first.embeds,
            choice=choice,
            family=first.family,
            read=True,
            clocks=Clocks(arrived=first.clocks.arrived),
        )

    def _response(self, prompt: Prompt) -> Response:
        """How the answer is parsed: only those to a chat template are of its form."""
        return self._forms.response(prompt.written, prompt.opening, prompt.tools) if prompt.written else PlainResponse()

    def _decoder(self, prompt: Prompt) -> Decode:
        return self._decode_parts if prompt.written else self._decode

    @property
    def _prefill_outputs(self) -> frozenset[str]:
        return PREFILL_OUTPUTS if self._spec.kv_at is KvAt.PREFILL else PREFILL_OUTPUTS - {"kv"}

    def _length(self, params: SamplingParams, prompt: int) -> int:
        """Of the answer. One that nobody asked to be so long is no longer than the KV pool allows."""
        room = self._loaded.context - prompt
        if params.max_tokens is None:
            room = max(1, min(room, self._pool - prompt))
        return answer_length(params.max_tokens, self._loaded.generation.max_new_tokens, room)

    def _encode(self, text: str) -> list[int]:
        return list(self._loaded.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _params(self, job: Job) -> SamplingParams:
        if not isinstance(job.params, SamplingParams):
            raise InvalidRequest("params are those of a diffusion stage; this stage generates text", field="params")
        if job.params.extra:
            raise InvalidRequest(
                f"params.extra holds {sorted(job.params.extra)}; the built-in AR engine takes none", field="extra"
            )
        self._check_tokens(job.params)
        return job.params

    def _check_tokens(self, params: SamplingParams) -> None:
        ids = {"stop_token_ids": params.stop_token_ids or (), "logit_bias": map(int, params.logit_bias or ())}
        for field, named in ids.items():
            strange = [one for one in named if one >= self._loaded.vocabulary]
            if strange:
                last = self._loaded.vocabulary - 1
                raise InvalidRequest(f"{field} names token {strange[0]}; the model has tokens 0 to {last}", field=field)

    def _check_resumable(self, job: Job, params: SamplingParams) -> None:
        """What there is once for a prompt has no meaning for one that grows."""
        if params.n is not None and params.n > 1:
            raise InvalidRequest(f"a resumable request has one answer at a time; n is {params.n}", field="n")
        if params.prompt_logprobs is not None:
            raise InvalidRequest("a resumable request has no prompt_logprobs; leave them out", field="prompt_logprobs")
        if {*job.emit, *job.publish} & PREFILL_OUTPUTS:
            raise InvalidRequest("a resumable request gives text and tokens, and no hidden or kv", field="resumable")
        if _embedded(job):
            raise InvalidRequest("a prompt of embeddings cannot be resumed; give text or tokens", field="resumable")

    def _check_outputs(self, job: Job, params: SamplingParams) -> None:
        if params.n is not None and params.n > 1 and "text" not in job.emit:
            raise InvalidRequest(f"n is {params.n}, but no text is asked for; leave n out", field="n")
        several = sorted({*job.emit, *job.publish} - self._prefill_outputs - ({"text"} - {*job.publish}))
        if several and params.n is not None and params.n > 1:
            raise InvalidRequest(
                f"n is {params.n}, but only a visible text may have several answers, and this request also takes"
                f" {', '.join(several)} of this stage; set n to 1",
                field="n",
            )
        if params.resumable:
            self._check_resumable(job, params)
        if params.prompt_logprobs is not None and "text" not in job.emit:
            raise InvalidRequest("prompt_logprobs come with the text, which is not asked for", field="prompt_logprobs")
        if params.prompt_logprobs is not None and _embedded(job):
            problem = "a prompt of embeddings has no tokens, so no prompt_logprobs; leave them out"
            raise InvalidRequest(problem, field="prompt_logprobs")
        for name in (*job.emit, *job.publish):
            if name not in self._outputs:
                known = name in OUTPUTS["ar"]
                why = "this model cannot give it" if known else f"it has {', '.join(self._outputs)}"
                raise InvalidRequest(f"output {name!r} is not to be had: {why}", field="outputs")
        for name in EDGE_ONLY.intersection(job.emit):
            raise InvalidRequest(f"output {name!r} can go to another stage only, not to a caller", field="outputs")


def _embedded(job: Job) -> bool:
    return "prompt_embeds" in job.inputs or "prompt_embeds" in job.payloads


def _salt(params: SamplingParams, embeds: torch.Tensor | None, lora: tuple[int, float] | None) -> str:
    """Equal embeddings share their prefixes, and with nothing else. So do requests of one adapter at one scale."""
    salt = params.cache_salt or ""
    if lora is not None:
        salt = f"{salt}\0lora {lora[0]} {lora[1]!r}"
    if embeds is None:
        return salt
    content = xxhash.xxh3_128_hexdigest(embeds.contiguous().view(torch.uint8).numpy())
    return f"{salt}\0{embeds.dtype}{content}"


def decoder_of(tokenizer: PreTrainedTokenizerBase, kept: frozenset[int] = frozenset()) -> Decode:
    """The tokenizer's text for ids, as a `Detokenizer` needs it: without special tokens but for those that are `kept`."""
    dropped = frozenset(tokenizer.all_special_ids) - kept

    def decode_some(ids: Sequence[int]) -> str:
        left = [one for one in ids if one not in dropped]
        return str(tokenizer.decode(left, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    if kept:
        return decode_some

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return decode
