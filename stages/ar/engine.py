"""The AR engine: causal language models behind the engine contract, continuously batched.

A step schedules, runs, picks a token for each sequence that is due one, and tells. What each of these does stands in its
own file: `scheduler` (whose tokens, whose pages), `runner` and `attention` (the forward), `sampler` and `penalties` (the
tokens), `sequence` and `detokenizer` (the text), `exports` (tensors for other stages).

Invariant: a submitted request is in `_sequences` until its `Finished` or `Failed` is given or it is aborted, and its track
is in the scheduler for exactly as long. A fault in one sequence ends that one: what a forward raises is looked for by
running its chunks one by one.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from functools import partial

import msgspec
import torch

from proto.errors import InvalidRequest, OmniError, StageFailed
from proto.ids import RequestId
from proto.messages import StageInfo, Started, Tensor, Text, TextDelta, Tokens, Value
from proto.params import Json
from stages.ar.exports import hidden_payload, kv_payload
from stages.ar.metrics import Metrics
from stages.ar.runner import Output
from stages.ar.sampler import sample
from stages.ar.scheduler import Chunk, Plan
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
        self._sequences: dict[RequestId, Sequence] = {}
        self._metrics = Metrics()

    def load(self, context: LoadContext) -> StageInfo:
        """Load `model.path` (a folder, a GGUF file or demo://NAME). Raises `StartError`."""
        self._parts = start(context)
        return self._parts.info

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def submit(self, job: Job) -> None:
        """Queue a job. Raises `InvalidRequest` naming the field if it cannot run, now or ever."""
        sequence = self._loaded.intake.sequence(job)
        try:
            self._loaded.scheduler.add(sequence.track)
        except OmniError as error:
            raise self._named(error) from error
        self._sequences[job.request] = sequence

    def step(self) -> list[Event]:
        """One forward: a token for every answer that is under way, and chunks of prompts."""
        events: list[Event] = []
        plan = self._loaded.scheduler.schedule()
        self._start(plan, events)
        chunks, output = self._run(plan.chunks, events)
        self._loaded.scheduler.commit(chunks)
        self._read(chunks, output, events)
        self._pick(chunks, output, events)
        return events

    def abort(self, request: RequestId) -> None:
        if request in self._sequences:
            self._forget(self._sequences[request])

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        """`stats`: requests, pages, times and counters. `info`: what `load` returned. `reset_prefix_cache`: forget all
        prefixes; how many pages were known. None takes arguments."""
        methods: dict[str, Callable[[], Json]] = {
            "stats": lambda: self._metrics.report(self._loaded.scheduler),
            "info": lambda: msgspec.to_builtins(self._loaded.info),
            "reset_prefix_cache": lambda: self._loaded.scheduler.blocks.forget(),
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
        if self._parts is None:
            return EngineStats()
        scheduler = self._parts.scheduler
        return EngineStats(queued=len(scheduler.waiting), running=len(scheduler.running))

    def close(self) -> None:
        """Forget every request and the model."""
        self._sequences.clear()
        self._parts = None

    @property
    def _loaded(self) -> Parts:
        if self._parts is None:
            raise StageFailed("the AR engine was used before it was loaded or after it was closed")
        return self._parts

    # --- the parts of a step ------------------------------------------------------------------------------------------

    def _start(self, plan: Plan, events: list[Event]) -> None:
        now = time.perf_counter()
        for track in plan.started:
            clocks = self._sequences[track.request].clocks
            clocks.started = now
            self._metrics.queue.add(now - clocks.arrived)
            events.append(Emit(track.request, "", Started(now - clocks.arrived)))

    def _run(self, chunks: Many[Chunk], events: list[Event]) -> tuple[Many[Chunk], Output | None]:
        """The chunks that could be computed, and what came out. Those that could not have failed."""
        if not chunks:
            return (), None
        hidden = any(self._wants_hidden(chunk) for chunk in chunks)
        try:
            return chunks, self._loaded.runner.run(chunks, hidden=hidden)
        except Exception as error:  # noqa: BLE001  # the fault boundary of requests: a model may raise anything
            if len(chunks) == 1:
                self._fail(self._sequences[chunks[0].track.request], error, events)
                return (), None
        parts = [self._run([chunk], events) for chunk in chunks]
        outputs = [output for _, output in parts if output is not None]
        if not outputs:
            return (), None
        logits = torch.cat([output.logits for output in outputs])
        states = tuple(state for output in outputs for state in output.hidden) if hidden else ()
        return [chunk for done, _ in parts for chunk in done], Output(logits, states)

    def _read(self, chunks: Many[Chunk], output: Output | None, events: list[Event]) -> None:
        """What prompts give that have been read: payloads, and the end of requests that wanted nothing else."""
        for number, chunk in enumerate(chunks):
            sequence = self._sequences[chunk.track.request]
            if sequence.read:
                continue
            if output is not None and output.hidden and self._wants_hidden(chunk):
                if chunk.start == 0:
                    sequence.hidden.clear()
                sequence.hidden.append(output.hidden[number])
            if chunk.end == sequence.prompt:
                sequence.read = True
                sequence.clocks.read = time.perf_counter()
                self._guard(sequence, self._give_prompt, events)

    def _pick(self, chunks: Many[Chunk], output: Output | None, events: list[Event]) -> None:
        """One token for each chunk that is its track's last."""
        due = [(row, chunk) for row, chunk in enumerate(chunk for chunk in chunks if chunk.last)]
        due = [(row, chunk) for row, chunk in due if self._answers(chunk)]
        if output is None or not due:
            return
        sequences = [self._sequences[chunk.track.request] for _, chunk in due]
        logits = output.logits
        if len(due) < logits.shape[0]:
            logits = logits[torch.tensor([row for row, _ in due], device=logits.device)]
        picked = sample(logits, [sequence.picker for sequence in sequences])
        now = time.perf_counter()
        for sequence, token, chances in zip(sequences, picked.tokens, picked.logprobs, strict=True):
            if token is None:
                problem = "the model gave logits that are not numbers; if its dtype is float16, try bfloat16 or float32"
                self._fail(sequence, StageFailed(problem), events)
                continue
            self._metrics.token(sequence.clocks, now)
            if chances is not None:
                sequence.logprobs.append(self._loaded.intake.named(token, chances))
            self._guard(sequence, partial(self._say, token), events)

    # --- one sequence -------------------------------------------------------------------------------------------------

    def _answers(self, chunk: Chunk) -> bool:
        return chunk.track.request in self._sequences

    def _wants_hidden(self, chunk: Chunk) -> bool:
        sequence = self._sequences[chunk.track.request]
        return not sequence.read and "hidden" in sequence.wanted

    def _give_prompt(self, sequence: Sequence, events: list[Event]) -> None:
        job = sequence.job
        if sequence.hidden:
            payload = hidden_payload(
                torch.cat(sequence.hidden, dim=1) if len(sequence.hidden) > 1 else sequence.hidden[0]
            )
            sequence.hidden.clear()
            if "hidden" in job.publish:
                events.append(Publish(job.request, "hidden", payload))
            if "hidden" in job.emit:
                sequence.visible.append(payload.tensors["hidden"])
        if "kv" in job.publish:
            kv = kv_payload(self._loaded.runner, sequence.track, self._loaded.kv_layers, sequence.prompt)
            events.append(Publish(job.request, "kv", kv))
        if sequence.prefill_only:
            sequence.finish_reason = "stop"

    def _say(self, token: int, sequence: Sequence, events: list[Event]) -> None:
        delta = sequence.accept(token)
        if delta and "text" in sequence.job.emit:
            chances = tuple(sequence.logprobs[sequence.told :])
            sequence.told = len(sequence.logprobs)
            events.append(Emit(sequence.job.request, "text", TextDelta(text=delta, logprobs=chances)))

    def _guard(self, sequence: Sequence, work: Callable[[Sequence, list[Event]], None], events: list[Event]) -> None:
        """Do one sequence's share; what it raises is its own failure and nobody else's. End it if it is done."""
        try:
            work(sequence, events)
        except Exception as error:  # noqa: BLE001  # the fault boundary of one request
            self._fail(sequence, error, events)
            return
        if sequence.finish_reason is not None:
            events.append(_finished(sequence, sequence.finish_reason))
            self._metrics.finished += 1
            self._forget(sequence)

    def _fail(self, sequence: Sequence, error: Exception, events: list[Event]) -> None:
        """Its pages are wiped: whatever is not a number there must not reach the next who gets them."""
        stage = self._loaded.stage
        if isinstance(error, OmniError):
            info = self._named(error).info
        else:
            info = StageFailed(
                f"stage {stage} failed on this request: {type(error).__name__}: {error}", stage=stage
            ).info
        pages = self._loaded.scheduler.condemn(sequence.track)
        if pages:
            self._loaded.runner.wipe(pages)
        self._metrics.failed += 1
        self._forget(sequence)
        events.append(Failed(sequence.job.request, info))

    def _forget(self, sequence: Sequence) -> None:
        self._loaded.scheduler.remove(sequence.track)
        self._loaded.runner.forget(sequence.track)
        del self._sequences[sequence.job.request]

    def _named(self, error: OmniError) -> OmniError:
        """With the stage's name in front."""
        stage = self._loaded.stage
        message = f"stage {stage}: {error.info.message}"
        named = type(error)(message, stage=stage, field=error.info.field)
        named.info = msgspec.structs.replace(error.info, message=message, stage=stage)
        return named


def _finished(sequence: Sequence, reason: str) -> Finished:
    outputs: dict[str, Value] = {}
    if "text" in sequence.wanted:
        outputs["text"] = Text(text=sequence.detokenizer.text, logprobs=tuple(sequence.logprobs))
    if "tokens" in sequence.wanted:
        outputs["tokens"] = Tokens(ids=sequence.answer)
    if sequence.visible:
        outputs["hidden"] = Tensor(tensor=0)
    return Finished(
        request=sequence.job.request,
        outputs=outputs,
        tensors=tuple(sequence.visible),
        finish_reason=reason,
        usage=sequence.usage,
        detail=sequence.clocks.detail(time.perf_counter()),
    )
