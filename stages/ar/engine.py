"""The AR engine: causal language models behind the engine contract, continuously batched.

A step schedules, runs, picks a token for each sequence that is due one, and tells. What each of these does stands in its
own file: `scheduler` (whose tokens, whose pages), `runner` and `attention` (the forward), `sampler` and `penalties` (the
tokens), `sequence` and `detokenizer` (the text), `exports` (tensors for other stages).

Invariant: a submitted request is in `_sequences` until its `Finished` or `Failed` is given or it is aborted, and its track
is in the scheduler for exactly as long. A fault in one sequence ends that one: what a forward raises is looked for by
running its chunks one by one.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from functools import partial

import torch

from proto.calls import Method, NoArgs
from proto.deploy import ArStage
from proto.errors import InvalidRequest, OmniError, StageFailed
from proto.figures import Figures
from proto.ids import EventId, RequestId
from proto.messages import Change, StageInfo, Started, TextDelta
from proto.params import Json, lora_use
from stages.ar.answers import finished
from stages.ar.flight import Flight
from stages.ar.metrics import Metrics
from stages.ar.ranks import lead
from stages.ar.resuming import Resting, refused
from stages.ar.runner import Output, joined
from stages.ar.sampler import sample
from stages.ar.scheduler import Chunk, Plan
from stages.ar.sequence import Sequence
from stages.ar.startup import Parts, start
from stages.engine import Emit, EngineStats, Event, Failed, Finished, Job, LoadContext
from stages.operator_calls import OperatorCalls
from stages.parallel.distributed import leave
from stages.parallel.group import Group
from stages.rpc import Handler


class ArEngine:
    """See the module's docstring, and `stages.engine.Engine` for the contract.

    What a job may ask for: `text` (streamed), `tokens` (every generated id, an end-of-sequence id included), `hidden` (of
    the prompt, published right after the prefill) and `kv` (then too, or when the deploy's `kv_at` says). A job that asks
    only for what the prefill gives generates nothing.
    """

    def __init__(self) -> None:
        self._parts: Parts | None = None
        self._sequences: dict[RequestId, Sequence] = {}
        self._metrics = Metrics()
        self._group: Group | None = None
        self._flight: Flight | None = None

    def load(self, context: LoadContext) -> StageInfo:
        """Load `model.path` (a folder, a GGUF file or demo://NAME). Raises `StartError`."""
        if context.ranks:
            self._group, context = lead(context)
        parts = self._parts = start(context, self._group)
        assert isinstance(context.spec, ArStage)
        self._resting = Resting(parts, context.spec.engine.resume_timeout)
        reset = Handler(NoArgs, lambda _: parts.scheduler.blocks.forget())
        self._operator = OperatorCalls(
            parts.stage,
            parts.info,
            parts.loras,
            parts.bed,
            self._lora_uses,
            lambda: self._metrics.report(parts.scheduler),
            {Method.RESET_PREFIX_CACHE: reset},
        )
        self._operator.load_from_deploy(context)
        if parts.overlap:
            self._flight = Flight()
        return self._operator.info

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or (self._parts is not None and self._resting.has_work)

    def wake_s(self) -> float | None:
        """Until a resumable request has waited too long for more input."""
        return self._resting.wake_s()

    def update(self, request: RequestId, event: EventId, change: Change) -> None:
        """More input for a resumable request. Raises `InvalidRequest` for one that cannot take it."""
        here = next(iter(self._with_siblings(request)), None) or self._resting.find(request)
        try:
            self._resting.ask(here, event, change)
        except InvalidRequest as error:
            raise error.at_stage(self._loaded.stage) from error

    def submit(self, job: Job) -> None:
        """Queue a job. Raises `InvalidRequest` naming the field if it cannot run, now or ever."""
        intake = self._loaded.intake
        self._operator.check(lora_use(job.params))
        sequence = intake.sequence(job)
        try:
            self._loaded.scheduler.add(sequence.track)
        except OmniError as error:
            raise error.at_stage(self._loaded.stage) from error
        self._enter(sequence)

    def _enter(self, sequence: Sequence) -> None:
        if sequence.embeds is not None:
            self._loaded.runner.embed(sequence.track, sequence.embeds)
        self._sequences[sequence.track.request] = sequence

    def step(self) -> list[Event]:
        """One forward: a token for every answer that is under way, and chunks of prompts."""
        return self._plain_step() if self._flight is None else self._overlapped_step(self._flight)

    def _plain_step(self) -> list[Event]:
        events = self._wake()
        plan = self._loaded.scheduler.schedule()
        self._start(plan, events)
        chunks, output = self._run(plan.chunks, events)
        self._loaded.scheduler.commit(chunks)
        self._read(chunks, output, events)
        for sequence, token in self._pick(chunks, output, events):
            self._guard(sequence, partial(self._say, token), events)
        return events

    def _overlapped_step(self, flight: Flight) -> list[Event]:
        """The same, with the next forward under way before the words of this one are told. A stop string is found when the
        token after it is being computed already: that one is dropped. Those whose pages must be read at their end are
        told before: the next plan may take the pages."""
        events: list[Event] = []
        if flight.empty:
            self._launch(flight, events)
            if flight.empty:
                return events
        chunks, landed = flight.land()
        chunks, output = self._run(chunks, events) if isinstance(landed, Exception) else (chunks, landed)
        self._loaded.scheduler.commit([chunk for chunk in chunks if self._answers(chunk)])
        self._read(chunks, output, events)
        going_on = []
        for sequence, token in self._pick(chunks, output, events):
            if sequence.goes_on(token) and not self._loaded.exports.owes_kv(sequence):
                self._guard(sequence, partial(self._take, token), events)
                going_on.append((sequence, token))
            else:
                self._guard(sequence, partial(self._say, token), events)
        self._launch(flight, events)
        for sequence, token in going_on:
            if self._sequences.get(sequence.track.request) is sequence:
                self._guard(sequence, partial(self._tell, token), events)
        return events

    def _wake(self) -> list[Event]:
        """Resumable requests that rest go on or end, now that nothing is being computed that they were part of."""
        going, events = self._resting.wake()
        self._metrics.finished += sum(isinstance(event, Finished) for event in events)
        for sequence in going:
            self._enter(sequence)
        return events

    def _launch(self, flight: Flight, events: list[Event]) -> None:
        events += self._wake()
        plan = self._loaded.scheduler.schedule()
        self._start(plan, events)
        chunks = [chunk for chunk in plan.chunks if self._answers(chunk)]
        if chunks:
            wish = self._loaded.exports.wish(chunks, [self._sequences[chunk.track.request] for chunk in chunks])
            flight.launch(chunks, partial(self._loaded.runner.run, chunks, wish))

    def _settle(self) -> None:
        """Nothing is being computed from here on until the next step."""
        if self._flight is not None:
            self._flight.settle()

    def abort(self, request: RequestId) -> None:
        for sequence in self._with_siblings(request):
            self._forget(sequence)
        resting = self._resting.find(request)
        if resting is not None:
            self._settle()
            self._resting.forget(resting)

    def _with_siblings(self, request: RequestId) -> list[Sequence]:
        """All sequences of a request that have not ended; none if it is not here."""
        return [one for one in self._sequences.values() if one.job.request == request]

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        """See `stages.operator_calls`. `reset_prefix_cache`: forget all prefixes; how many pages were known."""
        self._settle()
        return self._operator.call(method, args)

    def _lora_uses(self) -> Counter[str]:
        """Requests under way, by adapter."""
        used = {
            one.job.request: use.name
            for one in (*self._sequences.values(), *self._resting.sequences)
            if (use := lora_use(one.job.params))
        }
        return Counter(used.values())

    def stats(self) -> EngineStats:
        if self._parts is None:
            return EngineStats()
        scheduler = self._parts.scheduler
        return EngineStats(queued=len(scheduler.waiting), running=len(scheduler.running) + len(scheduler.resting))

    def figures(self) -> Figures:
        return Figures() if self._parts is None else self._metrics.figures(self._parts.scheduler)

    def close(self) -> None:
        """Forget every request and the model."""
        if self._flight is not None:
            self._flight.close()
            self._flight = None
        self._sequences.clear()
        if self._parts is not None:
            self._operator.close()
        self._parts = None
        if self._group is not None:
            self._group.close()
            leave()
            self._group = None

    @property
    def _loaded(self) -> Parts:
        if self._parts is None:
            raise StageFailed("the AR engine was used before it was loaded or after it was closed")
        return self._parts

    # --- the parts of a step ------------------------------------------------------------------------------------------

    def _start(self, plan: Plan, events: list[Event]) -> None:
        now = time.perf_counter()
        for track in plan.started:
            sequence = self._sequences[track.request]
            clocks = sequence.clocks
            clocks.started = now
            if sequence.choice:
                continue  # its request has left the queue already
            self._metrics.queue.add(now - clocks.arrived)
            events.append(Emit(sequence.job.request, "", Started(now - clocks.arrived)))

    def _run(self, chunks: Many[Chunk], events: list[Event]) -> tuple[Many[Chunk], Output | None]:
        """The chunks that could be computed, and what came out. Those that could not have failed."""
        chunks = [chunk for chunk in chunks if self._answers(chunk)]
        if not chunks:
            return (), None
        wish = self._loaded.exports.wish(chunks, [self._sequences[chunk.track.request] for chunk in chunks])
        try:
            return chunks, self._loaded.runner.run(chunks, wish)
        except Exception as error:  # noqa: BLE001  # the fault boundary of requests: a model may raise anything
            if len(chunks) == 1:
                self._fail(self._sequences[chunks[0].track.request], error, events)
                return (), None
        parts = [
            (done, output) for chunk in chunks for done, output in [self._run([chunk], events)] if output is not None
        ]
        parts = [(done, output) for done, output in parts if self._answers(done[0])]
        if not parts:
            return (), None
        return [chunk for done, _ in parts for chunk in done], joined([output for _, output in parts], wish)

    def _read(self, chunks: Many[Chunk], output: Output | None, events: list[Event]) -> None:
        """What prompts give that have been read, payloads that are due, and the end of requests that wanted nothing else."""
        for number, chunk in enumerate(chunks):
            if output is None or not self._answers(chunk):
                continue
            sequence = self._sequences[chunk.track.request]
            if sequence.read:
                if sequence.kv_due is not None:
                    self._guard(sequence, self._give_due, events)
                continue
            for token, found in self._loaded.exports.keep(sequence, chunk, output, number):
                sequence.scores.append(self._loaded.intake.named(token, found))
            if chunk.end >= sequence.prompt:
                sequence.read = True
                if sequence.clocks.read is None:
                    sequence.clocks.read = time.perf_counter()
                self._guard(sequence, self._give_prompt, events)

    def _pick(self, chunks: Many[Chunk], output: Output | None, events: list[Event]) -> Iterator[tuple[Sequence, int]]:
        """One token for each chunk that is its track's last, for those who have not failed when their turn comes."""
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
            if sequence.track.request not in self._sequences:
                continue  # another answer to the same prompt has failed
            if token is None:
                problem = "the model gave logits that are not numbers; if its dtype is float16, try bfloat16 or float32"
                self._fail(sequence, StageFailed(problem), events)
                continue
            self._metrics.token(sequence.clocks, now)
            if chances is not None:
                sequence.logprobs.append(self._loaded.intake.named(token, chances))
            yield sequence, token

    # --- one sequence -------------------------------------------------------------------------------------------------

    def _answers(self, chunk: Chunk) -> bool:
        sequence = self._sequences.get(chunk.track.request)
        return sequence is not None and sequence.track is chunk.track

    def _give_prompt(self, sequence: Sequence, events: list[Event]) -> None:
        events += self._loaded.exports.prompt_read(sequence)
        events += self._resting.read(sequence)
        if sequence.prefill_only:
            sequence.finish_reason = "stop"
        elif sequence.family is not None:
            for choice in range(1, sequence.family.of):
                sibling = self._loaded.intake.sibling(sequence, choice)
                self._loaded.scheduler.add(sibling.track)
                self._enter(sibling)

    def _give_due(self, sequence: Sequence, events: list[Event]) -> None:
        events += self._loaded.exports.computed(sequence)

    def _say(self, token: int, sequence: Sequence, events: list[Event]) -> None:
        self._take(token, sequence, events)
        self._tell(token, sequence, events)

    def _take(self, token: int, sequence: Sequence, events: list[Event]) -> None:
        sequence.take(token)

    def _tell(self, token: int, sequence: Sequence, events: list[Event]) -> None:
        delta = sequence.tell(token)
        self._loaded.exports.said(sequence, token)
        if delta and "text" in sequence.job.emit:
            chances = tuple(sequence.logprobs[sequence.told :])
            sequence.told = len(sequence.logprobs)
            part = TextDelta(
                text=delta.text,
                logprobs=chances,
                choice=sequence.choice,
                reasoning=delta.reasoning,
                tool_calls=delta.tool_calls,
            )
            events.append(Emit(sequence.job.request, "text", part))

    def _guard(self, sequence: Sequence, work: Callable[[Sequence, list[Event]], None], events: list[Event]) -> None:
        """Do one sequence's share; what it raises is its own failure and nobody else's. End it if it is done."""
        try:
            work(sequence, events)
            if sequence.finish_reason is not None:
                self._settle()
                events += self._loaded.exports.ended(sequence)
        except Exception as error:  # noqa: BLE001  # the fault boundary of one request
            self._fail(sequence, error, events)
            return
        if sequence.finish_reason is not None:
            if sequence.turns is not None and not sequence.turns.closing:
                del self._sequences[sequence.track.request]
                events += self._resting.rest(sequence)
                return
            events += refused(sequence)
            answers = sequence.ended()
            if answers:
                events.append(finished(answers))
                self._metrics.finished += 1
            self._forget(sequence)

    def _fail(self, sequence: Sequence, error: Exception, events: list[Event]) -> None:
        """Its pages are wiped: whatever is not a number there must not reach the next who gets them."""
        stage = self._loaded.stage
        if isinstance(error, OmniError):
            info = error.at_stage(stage).info
        else:
            info = StageFailed(
                f"stage {stage} failed on this request: {type(error).__name__}: {error}", stage=stage
            ).info
        self._settle()
        pages = self._loaded.scheduler.condemn(sequence.track)
        if pages:
            self._loaded.runner.wipe(pages)
        self._metrics.failed += 1
        for one in self._with_siblings(sequence.job.request):
            self._forget(one)
        events.append(Failed(sequence.job.request, info))

    def _forget(self, sequence: Sequence) -> None:
        self._settle()
        self._loaded.scheduler.remove(sequence.track)
        self._loaded.runner.forget(sequence.track)
        del self._sequences[sequence.track.request]
