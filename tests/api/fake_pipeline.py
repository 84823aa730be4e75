"""A `Pipeline` without processes, and a real server for it: what the API's tests stand on.

The fake checks requests with the real planner, then answers by itself: text from a script, images in the colour that the
prompt names. While its gate is closed, admitted requests wait in their stage.
"""

import asyncio
import functools
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
import numpy as np
import uvloop

from omni.answers import Answers
from omni.api.server import serve
from omni.events import CallDone
from omni.graph import Graph
from omni.outputs import (
    ImageOutput,
    Output,
    RequestEvent,
    RequestOutput,
    StageDone,
    StagePartial,
    StagePreview,
    StageProgress,
    StageStarted,
    TextDelta,
    TextOutput,
)
from omni.planning import Planner
from omni.request import GenerateRequest, UpdateRequest
from omni.running import RunningRequest
from omni.status import EdgeStatus, PipelineStatus, ReplicaStatus, StageStatus
from omni.stream import CallFailed
from omni.update_planning import Refused, plan_update
from proto.deploy import ApiSpec, ArStage, Deploy, DiffusionStage, Kind, LimitsSpec, Link, ModelSpec, kind_of
from proto.errors import ErrorCode, ErrorInfo, OmniError, QueueFull
from proto.ids import CallId, Epoch, EventId, RequestId, StageName
from proto.messages import StageInfo, Timings, Updated, UpdateState, Usage
from proto.params import Json

T = TypeVar("T")

THINKER, PAINTER = StageName("thinker"), StageName("painter")
TEXT = "Stars 🌟 over 東京, and END of it"
CUT = "Stars 🌟 over 東京, and "
INFOS = {
    THINKER: StageInfo(model="FakeLM", inputs=("prompt",), outputs=("text",)),
    PAINTER: StageInfo(model="FakePipeline", inputs=("prompt", "image"), outputs=("image",), size_multiple=8),
}
WAIT_S = 20.0
HUGE = 32 << 20


def two_stages(**limits: int) -> Deploy:
    """Text goes from `thinker` to `painter`; both can be asked for."""
    return Deploy(
        name="demo",
        api=ApiSpec(port=0, max_body_bytes=256 << 10),
        limits=LimitsSpec(**limits),
        stages={
            "thinker": ArStage(model=ModelSpec(path="unused"), output=Kind.TEXT),
            "painter": DiffusionStage(
                model=ModelSpec(path="unused"), output=Kind.IMAGE, inputs={"prompt": Link(source="thinker.text")}
            ),
        },
    )


def only(stage: str, deploy: Deploy) -> Deploy:
    """The deploy with one stage, which takes the caller's prompt."""
    return msgspec.structs.replace(deploy, stages={stage: msgspec.structs.replace(deploy.stages[stage], inputs={})})


def colour_of(prompt: str) -> tuple[int, int, int]:
    """The colour in "... #rrggbb"."""
    _, mark, rest = prompt.rpartition("#")
    digits = rest[:6] if mark else ""
    return (int(digits[0:2], 16), int(digits[2:4], 16), int(digits[4:6], 16)) if len(digits) == 6 else (0, 0, 0)


class FakePipeline:
    """All members belong to the server's loop; tests reach them through `Server.call`."""

    def __init__(self, deploy: Deploy) -> None:
        self._deploy = deploy
        self._planner = Planner(deploy, Graph.build(deploy))
        self.infos: Mapping[StageName, StageInfo] = {
            name: info for name, info in INFOS.items() if name in deploy.stages
        }
        self.gate = asyncio.Event()
        self.gate.set()
        self.changed = asyncio.Event()  # set whenever a count below changes
        self.slots = asyncio.Semaphore(deploy.limits.max_requests)
        self.seen: list[GenerateRequest] = []
        self.running = self.queued = self.done = self.aborted = 0
        self.fail_at_start: OmniError | None = None
        self.fail_after: tuple[int, Exception] | None = None  # after so many pieces of text
        self.says: TextOutput | None = None  # in one piece, in place of its text
        self.hold_after: int | None = None  # stand still after so many pieces of text
        self.endless = False  # never stop talking, and in pieces that no socket buffer holds
        self.ready = True
        self.output: Output | None = None  # of the painter, whatever it is asked for
        self.parts: list[Output] = []  # that the painter gives before it

    @property
    def deploy(self) -> Deploy:
        return self._deploy

    def generate(self, request: GenerateRequest) -> RunningRequest:
        answers = Answers(RequestId("r"))
        return RunningRequest(self._generate(request), answers, functools.partial(self._update, request, answers))

    def _update(self, request: GenerateRequest, answers: Answers, asked: UpdateRequest) -> EventId:
        """Answered at once: refused if its prompt says so, else started, and completed unless it has a transition."""
        stage, reason = StageName(""), "as the test asked" if asked.prompt == "refuse" else ""
        try:
            stage = plan_update(self._deploy, self._planner.plan(request, self.infos), asked)[0].stage
        except Refused as error:
            reason = error.reason
        event, new = answers.ask(asked)
        states = [UpdateState.REFUSED] if reason else [UpdateState.STARTED, UpdateState.COMPLETED]
        for state in states[: 1 if asked.transition_steps else 2] if new else ():
            answers.hear(stage, Updated(event=event, state=state, reason=reason, step=3))
        return event

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[RequestEvent, None]:
        plan = self._planner.plan(request, self.infos)
        if self.fail_at_start is not None:
            raise self.fail_at_start
        if self.queued >= self._deploy.limits.max_queued and self.slots.locked():
            raise QueueFull(f"{self.queued} requests are waiting", retry_after_s=2.5)
        self.seen.append(request)
        self.queued += 1
        self.changed.set()
        finished, waiting = False, True
        try:
            async with self.slots:
                self.queued -= 1
                waiting = False
                self.running += 1
                self.changed.set()
                stages = {}
                for stage in plan.stages:
                    async for event in self._run(stage, request):
                        yield event
                        if isinstance(event, StageDone):
                            stages[stage] = event
                finished = True
                self.done += 1
                yield RequestOutput(RequestId("r"), stages)
        finally:
            self.queued -= waiting
            self.running -= not waiting
            self.aborted += not finished
            self.changed.set()

    async def _run(self, stage: StageName, request: GenerateRequest) -> AsyncGenerator[RequestEvent, None]:
        own, wanted = request.params.get(stage, {}), stage in (request.outputs or (stage,))
        yield StageStarted(RequestId("r"), stage, 0.0)
        output: Output
        usage, finish = Usage(), "stop"
        if isinstance(self._deploy.stages[stage], ArStage):
            text, finish = self._text(own)
            text = "" if self.says else text
            for index, piece in enumerate(itertools.cycle(text) if self.endless else text):
                if index == self.hold_after:
                    self.gate.clear()
                await self.gate.wait()
                if self.fail_after is not None and index == self.fail_after[0]:
                    raise self.fail_after[1]
                yield TextDelta(RequestId("r"), stage, "x" * HUGE if self.endless else piece)
            output, usage = TextOutput(text), Usage(7, len(text))
            if self.says is not None:
                output = self.says
                whole = (output.text, output.logprobs, 0, output.reasoning, output.tool_calls)
                yield TextDelta(RequestId("r"), stage, *whole)
        else:
            yield StageProgress(RequestId("r"), stage, 1, 2)
            for step in range(own.get("previews") or 0):
                yield StagePreview(RequestId("r"), stage, step + 1, np.full((1, 4, 6, 3), step, np.uint8))
            for index, part in enumerate(self.parts):
                yield StagePartial(RequestId("r"), stage, index, part, append=True)
            await self.gate.wait()
            if self.fail_after is not None:
                raise self.fail_after[1]
            output = self.output or self._image(request, own)
        yield StageDone(RequestId("r"), stage, output if wanted else None, finish, usage, Timings())

    def _text(self, params: Mapping[str, Json]) -> tuple[str, str]:
        text = TEXT
        for stop in params.get("stop") or ():
            text = text.partition(stop)[0]
        limit = params.get("max_tokens") or len(text)
        return text[:limit], "length" if limit < len(text) else "stop"

    def _image(self, request: GenerateRequest, params: Mapping[str, Json]) -> ImageOutput:
        count, seed = params.get("num_images", 1), params.get("seed", 100)
        if request.images is not None:
            return ImageOutput(255 - np.stack([image[:, :, :3] for image in request.images]), (seed,))
        array = np.empty((count, params.get("height", 16), params.get("width", 16), 3), np.uint8)
        array[:] = colour_of(request.prompt or "")
        return ImageOutput(array, tuple(seed + k for k in range(count)))

    async def status(self) -> PipelineStatus:
        ready = {name: int(self.ready or name == THINKER) for name in self._deploy.stages}
        stages = tuple(
            StageStatus(
                stage=StageName(name),
                kind=kind_of(spec),
                model="fake",
                wanted=1,
                slots=1,
                ready=ready[name],
                waiting=0,
                output=spec.output.value if spec.output else None,
                info=self.infos[StageName(name)],
                replicas=(self._replica(ready[name]),),
            )
            for name, spec in self._deploy.stages.items()
        )
        return PipelineStatus(
            name=self._deploy.name,
            ready=self.ready,
            uptime_s=1.0,
            running=self.running,
            queued=self.queued,
            done=self.done,
            failed={"stage_failed": 3},
            junk=2,
            leases=0,
            lease_bytes=0,
            stages=stages,
            edges=(EdgeStatus("thinker.text", "painter.prompt", 4, 512),),
        )

    def _replica(self, ready: int) -> ReplicaStatus:
        return ReplicaStatus(
            replica=0,
            state="ready" if ready else "loading",
            epoch=Epoch(1),
            host="here",
            pid=1,
            devices=("cpu",),
            note="" if ready else "reading weights",
            in_flight=self.running,
            steps=1,
            queued=0,
            running=self.running,
            step_s=0.25,
            leases=0,
            lease_bytes=0,
            rss_bytes=0,
            silent_s=0.0,
        )

    async def call(
        self,
        stage: StageName,
        method: str,
        args: Mapping[str, Json] | None = None,
        *,
        replicas: Sequence[int] | None = None,
        timeout_s: float = 30.0,
    ) -> Mapping[int, Json]:
        """Says what it was asked; what "fail" asks fails on the second of two replicas."""
        if method == "fail":
            fault = {1: ErrorInfo(ErrorCode.INVALID_REQUEST, "no folder", stage, "path")}
            raise CallFailed(CallDone(CallId(1), {0: None}, {1: "no folder"}, fault), stage, method)
        if method == "unload_lora":
            fault = {0: ErrorInfo(ErrorCode.UNKNOWN_MODEL, "no adapter", stage, "name")}
            raise CallFailed(CallDone(CallId(1), {}, {0: "no adapter"}, fault), stage, method)
        asked = {"args": dict(args or {}), "replicas": None if replicas is None else list(replicas)}
        return {0: asked | {"timeout_s": timeout_s}}


class Server:
    """A served `FakePipeline`, in a thread with a uvloop loop of its own."""

    def __init__(self, deploy: Deploy) -> None:
        self._bound: Future[tuple[str, int]] = Future()
        self._thread = threading.Thread(target=uvloop.run, args=(self._main(deploy),), name="api-under-test")
        self._thread.start()
        self.address = self._bound.result(WAIT_S)
        self.url = "http://{}:{}".format(*self.address)

    async def _main(self, deploy: Deploy) -> None:
        self._loop = asyncio.get_running_loop()
        self.pipeline = FakePipeline(deploy)
        self._serving = asyncio.create_task(
            serve(self.pipeline, "127.0.0.1", 0, on_bound=lambda host, port: self._bound.set_result((host, port)))
        )
        with suppress(asyncio.CancelledError):
            try:
                await self._serving
            except OmniError as error:
                self._bound.set_exception(error)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def call(self, what: Callable[[FakePipeline], T]) -> T:
        """Read or change the pipeline, on its own loop."""

        async def work() -> T:
            return what(self.pipeline)

        return self.run(work())

    def until(self, condition: Callable[[FakePipeline], bool]) -> None:
        """Wait until the pipeline is as wanted."""

        async def work() -> None:
            async with asyncio.timeout(WAIT_S):
                while not condition(self.pipeline):
                    self.pipeline.changed.clear()
                    await self.pipeline.changed.wait()

        self.run(work())

    def open(self) -> None:
        self.call(lambda pipeline: pipeline.gate.set())

    def close_gate(self) -> None:
        self.call(lambda pipeline: pipeline.gate.clear())

    def stop(self) -> None:
        """Cancel the server and wait for its end."""
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@contextmanager
def serving(deploy: Deploy) -> Iterator[Server]:
    server = Server(deploy)
    try:
        yield server
    finally:
        if server._thread.is_alive():
            server.stop()
