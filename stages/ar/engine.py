"""The AR engine: causal language models behind the engine contract, in the simple loop.

Each step is either one prefill, of the sequence that has waited longest, or one token for every running sequence, one
forward after another. Nothing is batched: the loop is here to be plainly right, and to be what a batching engine is
checked against. `Sequence`, `Sampler`, `Detokenizer` and `Intake` know nothing of the loop and serve both.

Invariant: a submitted request is in exactly one of `_waiting` and `_running` until its `Finished` or `Failed` is given or
it is aborted. A fault in one sequence ends that one.
"""

import time
from collections.abc import Callable, Mapping

import msgspec
import torch

from proto.errors import InvalidRequest, OmniError, StageFailed
from proto.ids import RequestId
from proto.messages import StageInfo, Started, Tensor, Text, TextDelta, Tokens, Value
from proto.params import Json
from stages.ar.exports import hidden_payload, kv_payload
from stages.ar.runner import Prefilled
from stages.ar.sequence import Sequence
from stages.ar.startup import Parts, start
from stages.engine import Emit, EngineStats, Event, Failed, Finished, Job, LoadContext, Publish


class ArEngine:
    """See the module's docstring, and `stages.engine.Engine` for the contract.

    What a job may ask for: `text` (streamed), `tokens` (every generated id, an end-of-sequence id included), `hidden` and
    `kv` (of the prompt, published right after the prefill). A job that asks only for the last two generates nothing.
    """

    def __init__(self) -> None:
        self._parts: Parts | None = None
        self._waiting: dict[RequestId, Sequence] = {}
        self._running: dict[RequestId, Sequence] = {}

    def load(self, context: LoadContext) -> StageInfo:
        """Load `model.path` (a folder, a GGUF file or demo://NAME). Raises `StartError`."""
        self._parts = start(context)
        return self._parts.info

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, job: Job) -> None:
        """Queue a job. Raises `InvalidRequest` naming the field if it cannot run."""
        self._waiting[job.request] = self._loaded.intake.sequence(job)

    def step(self) -> list[Event]:
        """One prefill, or one token for every running sequence."""
        events: list[Event] = []
        if self._waiting and len(self._running) < self._loaded.max_running:
            self._guard(self._admit(), self._prefill, events)
        else:
            for sequence in list(self._running.values()):
                self._guard(sequence, self._decode, events)
        return events

    def abort(self, request: RequestId) -> None:
        self._waiting.pop(request, None)
        self._running.pop(request, None)

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        """`stats`: queued and running. `info`: what `load` returned. Neither takes arguments."""
        methods: dict[str, Callable[[], Json]] = {
            "stats": lambda: {"queued": len(self._waiting), "running": len(self._running)},
            "info": lambda: msgspec.to_builtins(self._loaded.info),
        }
        stage = self._loaded.stage
        if method not in methods:
            known = ", ".join(methods)
            raise InvalidRequest(
                f"stage {stage}: there is no method {method!r}; there are {known}", stage=stage, field="method"
            )
        if args:
            raise InvalidRequest(
                f"stage {stage}: method {method!r} takes no arguments, got {sorted(args)}", stage=stage, field="args"
            )
        return methods[method]()

    def stats(self) -> EngineStats:
        return EngineStats(queued=len(self._waiting), running=len(self._running))

    def close(self) -> None:
        """Forget every request and the model."""
        self._waiting.clear()
        self._running.clear()
        self._parts = None

    @property
    def _loaded(self) -> Parts:
        if self._parts is None:
            raise StageFailed("the AR engine was used before it was loaded or after it was closed")
        return self._parts

    def _admit(self) -> Sequence:
        request = next(iter(self._waiting))
        sequence = self._running[request] = self._waiting.pop(request)
        return sequence

    def _guard(self, sequence: Sequence, work: Callable[[Sequence, list[Event]], None], events: list[Event]) -> None:
        """Do one sequence's share of a step; what it raises is its own failure and nobody else's."""
        request, stage = sequence.job.request, self._loaded.stage
        try:
            work(sequence, events)
        except OmniError as error:
            message = f"stage {stage}: {error.info.message}"
            events.append(Failed(request, msgspec.structs.replace(error.info, message=message, stage=stage)))
        except Exception as error:  # noqa: BLE001  # the fault boundary of one request: a model may raise anything
            message = f"stage {stage} failed on this request: {type(error).__name__}: {error}"
            events.append(Failed(request, StageFailed(message, stage=stage).info))
        else:
            if sequence.finish_reason is None:
                return
            events.append(_finished(sequence, sequence.finish_reason))
        del self._running[request]

    def _prefill(self, sequence: Sequence, events: list[Event]) -> None:
        clocks, began = sequence.clocks, time.perf_counter()
        events.append(Emit(sequence.job.request, "", Started(began - clocks.arrived)))
        prefilled = self._loaded.runner.prefill(sequence.prompt, hidden="hidden" in sequence.wanted)
        self._publish(sequence, prefilled, events)
        clocks.prefill = time.perf_counter() - began
        if sequence.prefill_only:
            sequence.finish_reason = "stop"
            return
        sequence.cache = prefilled.cache
        self._next_token(sequence, prefilled.logits, events)
        clocks.first_token = time.perf_counter() - clocks.arrived

    def _decode(self, sequence: Sequence, events: list[Event]) -> None:
        began = time.perf_counter()
        if sequence.cache is None:
            raise StageFailed("a sequence runs without a cache")
        logits = self._loaded.runner.decode(sequence.generated[-1], sequence.cache)
        self._next_token(sequence, logits, events)
        sequence.clocks.decode += time.perf_counter() - began

    def _next_token(self, sequence: Sequence, logits: torch.Tensor, events: list[Event]) -> None:
        ids = torch.tensor([[*sequence.prompt, *sequence.generated]], dtype=torch.int64)
        delta = sequence.accept(sequence.sampler.sample(ids, logits), self._loaded.eos)
        if delta and "text" in sequence.job.emit:
            events.append(Emit(sequence.job.request, "text", TextDelta(delta)))

    def _publish(self, sequence: Sequence, prefilled: Prefilled, events: list[Event]) -> None:
        job = sequence.job
        if prefilled.hidden is not None:
            payload = hidden_payload(prefilled.hidden)
            if "hidden" in job.publish:
                events.append(Publish(job.request, "hidden", payload))
            if "hidden" in job.emit:
                sequence.visible.append(payload.tensors["hidden"])
        if "kv" in job.publish:
            kv = kv_payload(prefilled.cache, self._loaded.kv_layers, len(sequence.prompt))
            events.append(Publish(job.request, "kv", kv))


def _finished(sequence: Sequence, reason: str) -> Finished:
    outputs: dict[str, Value] = {}
    if "text" in sequence.wanted:
        outputs["text"] = Text(text=sequence.detokenizer.text)
    if "tokens" in sequence.wanted:
        outputs["tokens"] = Tokens(ids=tuple(sequence.generated))
    if sequence.visible:
        outputs["hidden"] = Tensor(tensor=0)
    return Finished(
        request=sequence.job.request,
        outputs=outputs,
        tensors=tuple(sequence.visible),
        finish_reason=reason,
        usage=sequence.usage,
        detail=sequence.clocks.detail(),
    )
