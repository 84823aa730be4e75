"""Two small engines behind the contract of `stages.engine`: one that repeats its prompt, one that draws it as stripes.

`Simple` is what most engines need: a queue, one job a step, and faults that stay with their job.
"""

from collections.abc import Mapping

from proto.errors import ErrorCode, ErrorInfo, InvalidRequest, StartError
from proto.ids import RequestId
from proto.messages import Chat, Images, StageInfo, Started, Text
from proto.params import DiffusionParams, Json
from proto.tensors import Dtype, TensorRef, WireTensor
from stages.engine import Emit, EngineStats, Event, Failed, Finished, Job, LoadContext


class Simple:
    """Implements `stages.engine.Engine`, one job at a time. `options` are the deploy's `engine.options`."""

    inputs: tuple[str, ...] = ("prompt",)
    outputs: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    def load(self, context: LoadContext) -> StageInfo:
        self.options = dict(context.spec.engine.options)
        unknown = set(self.options) - set(self.known)
        if unknown:
            raise StartError(
                f"stage {context.stage}: engine.options: no option {sorted(unknown)[0]!r}; there is: {', '.join(self.known)}",
                stage=context.stage,
                field="engine.options",
            )
        self._waiting: dict[RequestId, Job] = {}
        context.report("ready", 1.0)
        return StageInfo(
            model=type(self).__name__,
            device=context.device,
            inputs=self.inputs,
            outputs=self.outputs,
            params=self.params(),
        )

    def params(self) -> tuple[str, ...]:
        """Fields of the request's params that mean something here; others are refused before any work."""
        return ()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def submit(self, job: Job) -> None:
        self._waiting[job.request] = job

    def step(self) -> list[Event]:
        job = self._waiting.pop(next(iter(self._waiting)))
        started = Emit(job.request, "", Started(queue_s=0.0))
        try:
            return [started, self.run(job)]
        except Exception as error:  # noqa: BLE001 - a fault stays with its request
            text = f"{type(error).__name__}: {error}"
            return [started, Failed(job.request, ErrorInfo(ErrorCode.STAGE_FAILED, text))]

    def run(self, job: Job) -> Finished:
        raise NotImplementedError

    def abort(self, request: RequestId) -> None:
        self._waiting.pop(request, None)

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        if method == "options":
            return dict(self.options)
        raise InvalidRequest(f"no method {method!r}; there is: options", field="method")

    def stats(self) -> EngineStats:
        return EngineStats(queued=len(self._waiting))

    def close(self) -> None:
        self._waiting.clear()

    @staticmethod
    def prompt(job: Job) -> str:
        value = job.inputs["prompt"]
        if isinstance(value, Chat):
            return value.messages[-1].content
        assert isinstance(value, Text)
        return value.text


class Parrot(Simple):
    """kind: ar. Says its prompt again, with `options.suffix`."""

    outputs = ("text",)
    known = ("suffix",)

    def run(self, job: Job) -> Finished:
        return Finished(job.request, {"text": Text(text=self.prompt(job) + str(self.options.get("suffix", "")))})


class Stripes(Simple):
    """kind: diffusion. A stripe `options.width` pixels wide for each byte of the prompt, `height` pixels high."""

    outputs = ("image",)
    known = ("width",)

    def params(self) -> tuple[str, ...]:
        return ("height",)

    def run(self, job: Job) -> Finished:
        assert isinstance(job.params, DiffusionParams)
        height, each = job.params.height or 16, int(self.options.get("width", 4))
        row = b"".join(bytes([byte, byte, byte]) * each for byte in self.prompt(job).encode())
        picture = WireTensor(TensorRef(Dtype.U8, (1, height, len(row) // 3, 3)), row * height)
        return Finished(job.request, {"image": Images(tensor=0)}, [picture])
