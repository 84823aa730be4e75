"""Engines that compute next to nothing, behind the real contract: for tests and benchmarks of everything around engines.

Use them as `engine: tests.fakes.engines:FakeAr`. What a request makes them do stands in its prompt:
"refuse", "raise", "hang" (never ends by itself), "leave" (the process ends at the first step). Updates of running requests
are taken between steps; one whose prompt is "refuse" is refused.
"""

import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from proto.deploy import Kind
from proto.errors import ErrorCode, ErrorInfo, InvalidRequest
from proto.ids import EventId, RequestId
from proto.messages import (
    Change,
    Chat,
    Images,
    MoreInput,
    Paused,
    Progress,
    PromptChange,
    StageInfo,
    Started,
    Text,
    TextDelta,
    Updated,
    UpdateState,
    Usage,
)
from proto.params import DiffusionParams, Json, SamplingParams
from proto.tensors import Dtype, TensorRef, WireTensor
from stages.engine import Emit, EngineStats, Event, Failed, Finished, Job, LoadContext, OutgoingPayload, Publish

SIZE = 8


@dataclass(slots=True)
class _Running:
    job: Job
    steps: int
    step: int = 0
    words: list[str] = field(default_factory=list)
    updates: deque[tuple[EventId, Change]] = field(default_factory=deque)  # not begun
    changing: tuple[EventId, int] | None = None  # begun, and the steps that it still takes
    prompt: str | None = None  # of the last update
    heard: bool = False  # of an update
    paused: bool = False
    closed: bool = False

    def updated(self, event: EventId, state: UpdateState, reason: str = "") -> Emit:
        return Emit(self.job.request, "", Updated(event=event, state=state, reason=reason, step=self.step))


class _Fake:
    """One step a request a call; `options.step_s` makes a step last that long, `options.load` may be "fail" or "hang". After
    `options.hold_at` steps a request waits until it has had an update."""

    outputs: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    def load(self, context: LoadContext) -> StageInfo:
        self._options = context.spec.engine.options
        self._stage = context.stage
        self._waiting: deque[Job] = deque()
        self._running: dict[RequestId, _Running] = {}
        self._early: dict[RequestId, _Running] = {}  # have the updates of requests that wait
        self._calls = 0
        self._idle = threading.Event()
        context.report("pretending to load", 0.5)
        if self._options.get("load") == "fail":
            raise InvalidRequest("this engine cannot load, as the test asked")
        if self._options.get("load") == "hang":
            threading.Event().wait()
        return StageInfo(
            model=type(self).__name__,
            dtype="none",
            device=context.device,
            inputs=self.inputs,
            outputs=self.outputs,
            size_multiple=8,
            accepts=("trick",),
        )

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or any(not one.paused or one.updates for one in self._running.values())

    def wake_s(self) -> float | None:
        return None

    def update(self, request: RequestId, event: EventId, change: Change) -> None:
        running = self._running.get(request)
        if running is None:  # it waits for its first step
            running = self._early.setdefault(
                request, _Running(next(j for j in self._waiting if j.request == request), 0)
            )
        running.heard = True
        text = change.prompt if isinstance(change, PromptChange) else change.input
        if text == "refuse" or (isinstance(text, Text) and text.text == "refuse"):
            raise InvalidRequest("this update is refused, as the test asked", stage=self._stage, field="prompt")
        running.updates.append((event, change))

    def submit(self, job: Job) -> None:
        if self._prompt(job) == "refuse":
            raise InvalidRequest("this prompt is refused, as the test asked", stage=self._stage, field="prompt")
        self._waiting.append(job)

    def step(self) -> list[Event]:
        events: list[Event] = []
        limit = int(self._options.get("max_num_seqs", 1000))
        while self._waiting and len(self._running) < limit:
            job = self._waiting.popleft()
            running = self._running[job.request] = self.begin(job)
            if job.request in self._early:
                running.updates, running.heard = self._early.pop(job.request).updates, True
            events.append(Emit(job.request, "", Started(queue_s=0.0)))
        step_s = float(self._options.get("step_s", 0.0))
        if step_s:
            self._idle.wait(step_s)
        for running in list(self._running.values()):
            prompt = self._prompt(running.job)
            if prompt == "leave":
                os._exit(7)
            if prompt == "raise":
                events.append(self._fail(running))
            elif prompt != "hang" and (running.heard or running.step != self._options.get("hold_at")):
                events += self.take(running)
                events += [] if running.paused else self.one(running)
                if running.step >= running.steps and not running.paused:
                    del self._running[running.job.request]
        return events

    def take(self, running: _Running) -> list[Event]:
        """Begin the next update, if there is one and it can begin now."""
        raise NotImplementedError

    def _fail(self, running: _Running) -> Failed:
        del self._running[running.job.request]
        error = ErrorInfo(ErrorCode.STAGE_FAILED, "RuntimeError: raised, as the test asked", self._stage)
        return Failed(running.job.request, error)

    def begin(self, job: Job) -> _Running:
        raise NotImplementedError

    def one(self, running: _Running) -> list[Event]:
        raise NotImplementedError

    @staticmethod
    def _prompt(job: Job) -> str:
        value = job.inputs.get("prompt")
        if isinstance(value, Text):
            return value.text
        return value.messages[-1].content if isinstance(value, Chat) else ""

    def abort(self, request: RequestId) -> None:
        self._running.pop(request, None)
        self._early.pop(request, None)
        self._waiting = deque(job for job in self._waiting if job.request != request)

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        if method == "hang":
            threading.Event().wait(float(args["seconds"]))
        if method != "echo":
            raise InvalidRequest(f"no method {method!r}; methods: echo")
        self._calls += 1
        return {"args": dict(args), "calls": self._calls, "pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]}

    def stats(self) -> EngineStats:
        return EngineStats(queued=len(self._waiting), running=len(self._running))

    def close(self) -> None:
        pass


class FakeAr(_Fake):
    """Says "echo: <prompt>" word by word; publishes `kv`: one uint8 tensor, the prompt's bytes `options.kv_repeat` times.
    A resumable one then waits for more, and echoes that."""

    outputs = ("text", "kv")
    inputs = ("prompt",)

    def begin(self, job: Job) -> _Running:
        assert isinstance(job.params, SamplingParams)
        words = f"echo: {self._prompt(job)}".split(" ")
        words = words[: job.params.max_tokens] if job.params.max_tokens else words
        words = [word if i == 0 else f" {word}" for i, word in enumerate(words)]
        return _Running(job, len(words), words=words)

    def one(self, running: _Running) -> list[Event]:
        job = running.job
        if running.step == running.steps:
            return [self._said(running)]
        word = running.words[running.step]
        events: list[Event] = []
        if running.step == 0 and "kv" in job.publish:
            data = self._prompt(job).encode() * int(self._options.get("kv_repeat", 1))
            tensor = WireTensor(TensorRef(Dtype.U8, (len(data),)), data)
            events.append(Publish(job.request, "kv", OutgoingPayload(Kind.KV, {"kv": tensor}, {"layers": [0]})))
        running.step += 1
        if "text" in job.emit:
            events.append(Emit(job.request, "text", TextDelta(text=word)))
        if running.step == running.steps:
            if job.params.resumable and not running.closed:  # type: ignore[union-attr] # `begin` has checked them
                running.paused = True
                events.append(Emit(job.request, "", Paused(finish_reason="stop", usage=self._usage(running))))
            else:
                events.append(self._said(running))
        return events

    def _usage(self, running: _Running) -> Usage:
        return Usage(prompt_tokens=len(self._prompt(running.job).split()), completion_tokens=running.steps)

    def _said(self, running: _Running) -> Finished:
        text = Text(text="".join(running.words))
        return Finished(running.job.request, {"text": text}, usage=self._usage(running))

    def take(self, running: _Running) -> list[Event]:
        if not running.paused or not running.updates:
            return []
        event, change = running.updates.popleft()
        assert isinstance(change, MoreInput)
        events: list[Event] = [
            running.updated(event, UpdateState.STARTED),
            running.updated(event, UpdateState.COMPLETED),
        ]
        running.closed, running.paused = change.close, False
        if isinstance(change.input, Text):
            running.words += [f" {word}" for word in change.input.text.split(" ")]
            running.steps = len(running.words)
        return events


class FakeDiffusion(_Fake):
    """Draws an 8x8 picture whose bytes depend on prompt, kv, image and seed alone; says which step it is at."""

    outputs = ("image", "latents")
    inputs = ("prompt", "kv", "image")

    def begin(self, job: Job) -> _Running:
        assert isinstance(job.params, DiffusionParams)
        return _Running(job, job.params.num_inference_steps or 1)

    def one(self, running: _Running) -> list[Event]:
        job = running.job
        running.step += 1
        events: list[Event] = [Emit(job.request, "", Progress(step=running.step, total=running.steps))]
        if running.changing is not None:
            event, left = running.changing
            running.changing = (event, left - 1) if left > 1 else None
            events += [] if left > 1 else [running.updated(event, UpdateState.COMPLETED)]
        if running.step == running.steps:
            data, seeds = picture(job, running.prompt)
            tensor = WireTensor(TensorRef(Dtype.U8, (len(seeds), SIZE, SIZE, 3)), data)
            events.append(Finished(job.request, {"image": Images(tensor=0, seeds=seeds)}, [tensor]))
        return events

    def take(self, running: _Running) -> list[Event]:
        if running.changing is not None or not running.updates:
            return []
        event, change = running.updates.popleft()
        assert isinstance(change, PromptChange)
        running.prompt = change.prompt or running.prompt
        running.changing = (event, max(1, change.transition_steps))
        return [running.updated(event, UpdateState.STARTED)]


class DeafDiffusion(FakeDiffusion):
    """Takes no updates."""

    update = None  # type: ignore[assignment]


def picture(job: Job, prompt: str | None = None) -> tuple[bytes, tuple[int, ...]]:
    """Bytes of the pictures and their seeds; with another prompt than the job's, if one is given."""
    assert isinstance(job.params, DiffusionParams)
    words = (prompt or _Fake._prompt(job)).encode()
    for name in sorted(job.payloads):
        words += b"|" + name.encode() + b"=" + bytes(job.payloads[name].tensors["kv"].data)[:1000]
    image = job.inputs.get("image")
    if isinstance(image, Images):
        words += b"|image=" + bytes(job.tensors[image.tensor].data)[:64]
    seed = job.params.seed or 0
    seeds = tuple(range(seed, seed + (job.params.num_images or 1)))
    return b"".join(drawing(words, one) for one in seeds), seeds


def drawing(words: bytes, seed: int) -> bytes:
    """What the picture of `words` with `seed` looks like: SIZE * SIZE * 3 bytes."""
    import hashlib

    size = SIZE * SIZE * 3
    block = hashlib.sha256(words + b"#" + str(seed).encode()).digest()
    return (block * (size // len(block) + 1))[:size]
