"""vLLM behind the engine contract (`engine: vllm`), for deployments that outgrow the built-in AR engine.

It gives text and token ids, takes prompts, chats, token ids and embeddings, and samples as the deploy and the request say.
What it cannot do, hidden states and KV for other stages among it, is refused when the YAML loads (`launch.vllm_checks`)
or by the master, which knows from `StageInfo` what this stage takes.

vLLM schedules by itself; `step` only passes on what has come since the last one, and waits a little if nothing has.

Invariant: a submitted request is in `_requests` until its `Finished` or `Failed` is given or it is aborted.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import Empty
from typing import Any, Final

import msgspec
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from proto.deploy import ArStage
from proto.errors import InvalidRequest, OmniError, StageFailed, StartError
from proto.ids import RequestId
from proto.messages import Answer, StageInfo, Started, Text, TextDelta, TokenLogprobs, Tokens, Usage, Value
from proto.params import Json, SamplingParams
from stages.ar.prompt import PromptReader, answer_length
from stages.ar.sampling import decide
from stages.ar.vllm_params import FIELDS, chances, form, sampling
from stages.ar.vllm_peer import Ask, Came, Peer, Refused, VllmPeer
from stages.demo.models import resolve_model
from stages.engine import Emit, EngineStats, Event, Failed, Finished, Job, LoadContext

WAIT_S: Final = 0.05
"""How long a step waits for news: an abort or a new request waits no longer."""

OUTPUTS: Final = ("text", "tokens")
INPUTS: Final = ("prompt", "tokens", "prompt_embeds")


@dataclass(slots=True)
class _Choice:
    """One of the answers to a prompt, as far as it is there."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    told: int = 0  # of `logprobs`, sent with a delta
    reason: str | None = None


@dataclass(slots=True)
class _Request:
    job: Job
    params: SamplingParams
    key: str
    prompt: int
    choices: list[_Choice]
    scores: tuple[TokenLogprobs, ...] = ()
    arrived: float = field(default_factory=time.perf_counter)
    first: float | None = None


class VllmEngine:
    """See the module's docstring, and `stages.engine.Engine` for the contract."""

    def __init__(self, peer: Peer | None = None) -> None:
        self._peer: Peer = peer or VllmPeer()
        self._requests: dict[RequestId, _Request] = {}
        self._by_key: dict[str, RequestId] = {}
        self._keys = itertools.count()
        self._stage = ""
        self._info = StageInfo()

    def load(self, context: LoadContext) -> StageInfo:
        """Start vLLM on `model.path` (a checkpoint folder or demo://NAME). Raises `StartError`."""
        self._stage = context.stage
        spec = context.spec
        if not isinstance(spec, ArStage) or not spec.model.path:
            raise StartError(f"stage {context.stage}: vLLM needs an ar stage with a model.path", field="model.path")
        path = resolve_model(spec.model.path, context.report)
        try:
            tokenizer = AutoTokenizer.from_pretrained(spec.model.tokenizer or path, local_files_only=True)
            config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config(decoder=True)
            self._generation = _generation(path)
            context.report("vLLM is starting", None)
            length = self._peer.start(_arguments(str(path), spec), lambda: context.report("vLLM is loading", None))
        except ModuleNotFoundError as error:
            raise StartError(
                f"stage {context.stage}: this Python has no vLLM ({error}); name one that has in `python`",
                stage=context.stage,
                field="engine.use",
            ) from error
        except Exception as error:  # the fault boundary of the load: vLLM may raise anything
            self._peer.stop()
            raise StartError(
                f"stage {context.stage}: vLLM does not start: {type(error).__name__}: {error}",
                stage=context.stage,
                field="engine.use",
            ) from error
        self._context = length
        self._reader = PromptReader(
            tokenizer, spec.prompt, vocabulary=int(config.vocab_size), context=length, width=int(config.hidden_size)
        )
        self._info = StageInfo(
            model=(config.architectures or ["?"])[0],
            dtype=spec.model.dtype,
            device=context.device,
            inputs=INPUTS,
            outputs=OUTPUTS,
            params=FIELDS,
            context_length=length,
        )
        return self._info

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def submit(self, job: Job) -> None:
        """Hand a job on. Raises `InvalidRequest` naming the stage and the field if it cannot run."""
        try:
            request, ask = self._asked(job)
        except OmniError as error:
            raise error.at_stage(self._stage) from error
        self._requests[job.request] = request
        self._by_key[request.key] = job.request
        self._peer.ask(ask)

    def step(self) -> list[Event]:
        """What has come. Raises `StageFailed` if vLLM has ended."""
        events: list[Event] = []
        try:
            self._take(self._peer.results.get(timeout=WAIT_S), events)
            while True:
                self._take(self._peer.results.get_nowait(), events)
        except Empty:
            return events

    def abort(self, request: RequestId) -> None:
        if request in self._requests:
            self._peer.drop(self._forget(request).key)

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        """`stats`: requests. `info`: what `load` returned. `reset_prefix_cache`: whether it could be done now."""
        methods: dict[str, Callable[[], Json]] = {
            "stats": lambda: {"queued": self.stats().queued, "running": self.stats().running},
            "info": lambda: msgspec.to_builtins(self._info),
            "reset_prefix_cache": lambda: self._peer.forget_prefixes(),
        }
        problem = f"there is no method {method!r}; there are {', '.join(methods)}" if method not in methods else ""
        if problem or args:
            problem = problem or f"method {method!r} takes no arguments, got {sorted(args)}"
            field = "args" if method in methods else "method"
            raise InvalidRequest(f"stage {self._stage}: {problem}", stage=self._stage, field=field)
        return methods[method]()

    def stats(self) -> EngineStats:
        running = sum(one.first is not None for one in self._requests.values())
        return EngineStats(queued=len(self._requests) - running, running=running)

    def close(self) -> None:
        for request in list(self._requests):
            self.abort(request)
        self._peer.stop()

    # --- one request --------------------------------------------------------------------------------------------------

    def _asked(self, job: Job) -> tuple[_Request, Ask]:
        if not isinstance(job.params, SamplingParams):
            raise InvalidRequest("params are those of a diffusion stage; this stage generates text", field="params")
        for name in (*job.emit, *job.publish):
            if name not in OUTPUTS:
                raise InvalidRequest(f"vLLM gives no {name}; it has {', '.join(OUTPUTS)}", field="outputs")
        params = job.params
        embeds = self._reader.embeds(job)
        ids = self._reader.read(job, embeds).ids
        rule = decide(params, self._generation)
        longest = answer_length(params.max_tokens, self._generation.max_new_tokens, self._context - len(ids))
        prompt: dict[str, object] = (
            {"prompt_token_ids": list(ids)} if embeds is None else {"prompt_embeds": embeds.clone()}
        )
        if params.cache_salt:
            prompt["cache_salt"] = params.cache_salt
        key = f"{job.request}.{next(self._keys)}"
        ask = Ask(key, prompt, sampling(params, rule, longest), form(params), params.priority or 0)
        return _Request(job, params, key, len(ids), [_Choice() for _ in range(params.n or 1)]), ask

    def _take(self, news: Came | Refused, events: list[Event]) -> None:
        if isinstance(news, Refused) and news.fatal:
            raise StageFailed(f"stage {self._stage}: {news.error}", stage=self._stage)
        name = self._by_key.get(news.key)
        if name is None:
            return  # aborted
        request = self._requests[name]
        if isinstance(news, Refused):
            kind = InvalidRequest if news.bad else StageFailed
            self._forget(name)
            words = f"stage {self._stage}: vLLM refuses this request: {news.error}"
            events.append(Failed(name, kind(words, stage=self._stage).info))
            return
        self._came(request, news.output, events)
        if news.output.finished:
            self._forget(name)
            events.append(_finished(request))

    def _came(self, request: _Request, output: Any, events: list[Event]) -> None:
        name = request.job.request
        if request.first is None:
            request.first = time.perf_counter()
            events.append(Emit(name, "", Started(request.first - request.arrived)))
        if output.prompt_logprobs and request.params.prompt_logprobs is not None:
            request.scores = chances(
                output.prompt_token_ids or (), output.prompt_logprobs, request.params.prompt_logprobs
            )
        for part in output.outputs:
            choice = request.choices[part.index]
            choice.text += part.text
            choice.tokens += part.token_ids
            if part.logprobs and request.params.logprobs is not None:
                choice.logprobs += chances(part.token_ids, part.logprobs, request.params.logprobs)
            choice.reason = part.finish_reason or choice.reason
            if part.text and "text" in request.job.emit:
                new = tuple(choice.logprobs[choice.told :])
                choice.told = len(choice.logprobs)
                events.append(Emit(name, "text", TextDelta(text=part.text, logprobs=new, choice=part.index)))

    def _forget(self, name: RequestId) -> _Request:
        request = self._requests.pop(name)
        del self._by_key[request.key]
        return request


def _arguments(path: str, spec: ArStage) -> dict[str, object]:
    """vLLM's engine arguments. The deploy's `engine.options` are further ones, and win."""
    engine = spec.engine
    given: dict[str, object] = {
        "model": path,
        "tokenizer": spec.model.tokenizer,
        "dtype": spec.model.dtype,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enable_prefix_caching": engine.prefix_caching,
        "kv_cache_memory_bytes": engine.kv_cache_bytes,
        "enforce_eager": not engine.compile,
        "enable_prompt_embeds": True,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
    }
    return {name: value for name, value in given.items() if value is not None} | dict(engine.options)


def _generation(path: object) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:
        return GenerationConfig()


def _finished(request: _Request) -> Finished:
    first, *others = request.choices
    outputs: dict[str, Value] = {}
    wanted = {*request.job.emit, *request.job.publish}
    if "text" in wanted:
        more = tuple(Answer(one.text, one.reason or "stop", tuple(one.logprobs)) for one in others)
        outputs["text"] = Text(
            text=first.text, logprobs=tuple(first.logprobs), prompt_logprobs=request.scores, more=more
        )
    if "tokens" in wanted:
        outputs["tokens"] = Tokens(ids=tuple(first.tokens))
    now = time.perf_counter()
    begun = now if request.first is None else request.first
    return Finished(
        request=request.job.request,
        outputs=outputs,
        finish_reason=first.reason or "stop",
        usage=Usage(prompt_tokens=request.prompt, completion_tokens=sum(len(one.tokens) for one in request.choices)),
        detail={"first_token": begun - request.arrived, "decode": now - begun},
    )
