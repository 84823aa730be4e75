"""Engines that compute next to nothing, behind the real contract: for tests and benchmarks of everything around engines.

Use them as `engine: tests.fakes.engines:FakeAr`. What a request makes them do stands in its prompt:
"refuse", "raise", "hang" (never ends by itself), "leave" (the process ends at the first step).
"""

import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from proto.deploy import Kind
from proto.errors import ErrorCode, ErrorInfo, InvalidRequest
from proto.ids import RequestId
from proto.messages import Chat, Images, Progress, StageInfo, Started, Text, TextDelta, Usage
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


class _Fake:
    """One step a request a call; `options.step_s` makes a step last that long, `options.load` may be "fail" or "hang"."""

    outputs: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    def load(self, context: LoadContext) -> StageInfo:
        self._options = context.spec.engine.options
        self._stage = context.stage
        self._waiting: deque[Job] = deque()
        self._running: dict[RequestId, _Running] = {}
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
        return bool(self._waiting or self._running)

    def submit(self, job: Job) -> None:
        if self._prompt(job) == "refuse":
            raise InvalidRequest("this prompt is refused, as the test asked", stage=self._stage, field="prompt")
        self._waiting.append(job)

    def step(self) -> list[Event]:
        events: list[Event] = []
        limit = int(self._options.get("max_num_seqs", 1000))
        while self._waiting and len(self._running) < limit:
            job = self._waiting.popleft()
            self._running[job.request] = self.begin(job)
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
            elif prompt != "hang":
                events += self.one(running)
                if running.step >= running.steps:
                    del self._running[running.job.request]
        return events

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
    """Says "echo: <prompt>" word by word; publishes `kv`: one uint8 tensor, the prompt's bytes `options.kv_repeat` times."""

    outputs = ("text", "kv")
    inputs = ("prompt",)

    def begin(self, job: Job) -> _Running:
        assert isinstance(job.params, SamplingParams)
        words = f"echo: {self._prompt(job)}".split(" ")
        words = words[: job.params.max_tokens] if job.params.max_tokens else words
        words = [word if i == 0 else f" {word}" for i, word in enumerate(words)]
        return _Running(job, len(words), words=words)

    def one(self, running: _Running) -> list[Event]:
        job, word = running.job, running.words[running.step]
        events: list[Event] = []
        if running.step == 0 and "kv" in job.publish:
            data = self._prompt(job).encode() * int(self._options.get("kv_repeat", 1))
            tensor = WireTensor(TensorRef(Dtype.U8, (len(data),)), data)
            events.append(Publish(job.request, "kv", OutgoingPayload(Kind.KV, {"kv": tensor}, {"layers": [0]})))
        running.step += 1
        if "text" in job.emit:
            events.append(Emit(job.request, "text", TextDelta(text=word)))
        if running.step == running.steps:
            usage = Usage(prompt_tokens=len(self._prompt(job).split()), completion_tokens=running.steps)
            events.append(Finished(job.request, {"text": Text(text="".join(running.words))}, usage=usage))
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
        if running.step == running.steps:
            data, seeds = picture(job)
            tensor = WireTensor(TensorRef(Dtype.U8, (len(seeds), SIZE, SIZE, 3)), data)
            events.append(Finished(job.request, {"image": Images(tensor=0, seeds=seeds)}, [tensor]))
        return events


def picture(job: Job) -> tuple[bytes, tuple[int, ...]]:
    """Bytes of the pictures and their seeds."""
    assert isinstance(job.params, DiffusionParams)
    words = _Fake._prompt(job).encode()
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
