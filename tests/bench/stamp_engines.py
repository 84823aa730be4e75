"""Engines that do nothing but note when: `detail` holds readings of the machine's monotonic clock, in seconds.

The clock is one for all processes of a machine, so a bench can tell a request's way to the engine from its way back.
A request's `seed` is the microseconds of work that it pretends.
"""

import threading
import time
from collections.abc import Mapping

from proto.deploy import Kind
from proto.ids import RequestId
from proto.messages import Images, StageInfo, Started, Text, Usage
from proto.params import Json
from proto.tensors import Dtype, TensorRef, WireTensor
from stages.engine import Emit, EngineStats, Event, Finished, Job, LoadContext, OutgoingPayload, Publish

ANSWER = "A fox the colour of rust steps onto the ice. " * 4
PICTURE = WireTensor(TensorRef(Dtype.U8, (1, 8, 8, 3)), bytes(192))


class _Stamp:
    """Finishes everything that is there in one step."""

    inputs: tuple[str, ...] = ("prompt",)
    outputs: tuple[str, ...] = ()

    def load(self, context: LoadContext) -> StageInfo:
        self._jobs: dict[RequestId, tuple[Job, float]] = {}
        self._never = threading.Event()
        size = int(context.spec.engine.options.get("payload_bytes", 0))
        data = bytearray(b"\1") * size
        self._payload = OutgoingPayload(Kind.KV, {"kv": WireTensor(TensorRef(Dtype.U8, (size,)), data)})
        return StageInfo(model=type(self).__name__, device=context.device, inputs=self.inputs, outputs=self.outputs)

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def submit(self, job: Job) -> None:
        self._jobs[job.request] = (job, time.monotonic())

    def step(self) -> list[Event]:
        events: list[Event] = []
        for job, submitted in self._jobs.values():
            events.append(Emit(job.request, "", Started(queue_s=0.0)))
            if job.params.seed:
                self._never.wait(job.params.seed / 1e6)
            events += self.finish(job, {"submitted": submitted, "finished": time.monotonic()})
        self._jobs.clear()
        return events

    def finish(self, job: Job, detail: Mapping[str, float]) -> list[Event]:
        raise NotImplementedError

    def abort(self, request: RequestId) -> None:
        self._jobs.pop(request, None)

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        return None

    def stats(self) -> EngineStats:
        return EngineStats(queued=len(self._jobs))

    def close(self) -> None:
        pass


class StampAr(_Stamp):
    """Answers with the same 180 characters; publishes `kv` of `options.payload_bytes`."""

    outputs = ("text", "kv")

    def finish(self, job: Job, detail: Mapping[str, float]) -> list[Event]:
        events: list[Event] = []
        if "kv" in job.publish:
            events.append(Publish(job.request, "kv", self._payload))
        outputs = {"text": Text(text=ANSWER)}
        events.append(Finished(job.request, outputs, usage=Usage(24, 41), detail=detail))
        return events


class StampDiffusion(_Stamp):
    """Gives an 8x8 picture, whatever it takes."""

    inputs = ("prompt", "kv")
    outputs = ("image",)

    def finish(self, job: Job, detail: Mapping[str, float]) -> list[Event]:
        return [Finished(job.request, {"image": Images(tensor=0)}, [PICTURE], detail=detail)]
