"""One session's requests inside a worker: from `Submit` to the engine, and from the engine's reports to messages.

Lives in the I/O loop. Invariant: each request that came by `Submit` is answered by exactly one `Result`, `Failed` or
`Aborted`, and its messages are numbered without a gap.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from proto.deploy import StageSpec
from proto.errors import ErrorCode, ErrorInfo, OmniError, ProtocolError
from proto.framing import tensor_at
from proto.ids import Epoch, RequestId, StageName
from proto.messages import (
    Aborted,
    Chunk,
    Failed,
    Payload,
    Published,
    Result,
    Submit,
    Update,
    Updated,
    UpdateState,
    Value,
)
from proto.tensors import WireTensor
from stages import engine
from stages.engine import Emit, Job, OutgoingPayload, Publish, PulledPayload
from stages.engine_thread import Alter, Command, Done, Drop, Run
from stages.payload.backend import PayloadBackend
from stages.payload.inline import inline_value, payload_of, tensor_index

log = logging.getLogger("omni.stage")

REMEMBERED_ABORTS: Final = 4096
"""An abort may overtake its request, since they travel on different lanes: so early ones are remembered, this many."""

SendData = Callable[[Chunk | Published | Result | Failed, Sequence[WireTensor]], Awaitable[None]]


@dataclass(slots=True)
class _Active:
    submit: Submit
    seq: int = 0
    pulling: asyncio.Task[None] | None = None
    published: set[str] = field(default_factory=set)
    updates: list[Alter] = field(default_factory=list)  # that came while it was pulling


class Requests:
    def __init__(
        self,
        stage: StageName,
        spec: StageSpec,
        epoch: Epoch,
        payloads: PayloadBackend,
        to_engine: Callable[[Command], bool],
        send: SendData,
        send_aborted: Callable[[Aborted], None],
    ) -> None:
        self._stage = stage
        self._spec = spec
        self._epoch = epoch
        self._payloads = payloads
        self._to_engine = to_engine
        self._send = send
        self._send_aborted = send_aborted
        self._active: dict[RequestId, _Active] = {}
        self._aborted_early: OrderedDict[RequestId, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._active)

    # --- in -----------------------------------------------------------------------------------------------------------

    def submit(self, message: Submit, tensors: Sequence[WireTensor]) -> None:
        received_at = time.monotonic()
        if message.request in self._aborted_early:
            del self._aborted_early[message.request]
            self._send_aborted(Aborted(epoch=self._epoch, request=message.request))
            return
        if message.request in self._active:
            return  # came twice
        active = self._active[message.request] = _Active(message)
        if any(isinstance(value, Payload) for value in message.inputs.values()):
            active.pulling = self._spawn(self._pull_and_run(active, tensors, received_at))
        else:
            self._run(
                Job(message.request, message.inputs, message.params, message.emit, message.publish, tensors),
                received_at,
                0.0,
            )

    def update(self, message: Update) -> None:
        """Hand it to the engine behind its request. One whose request is not here any more is late: the request has told
        its end, or is about to."""
        active = self._active.get(message.request)
        if active is None:
            return
        command = Alter(message.request, message.event, message.change)
        if active.pulling is not None and not active.pulling.done():
            active.updates.append(command)
        else:
            self._alter(command)

    def _alter(self, command: Alter) -> None:
        if not self._to_engine(command):
            reason = f"stage {self._stage} takes no more commands now; try again"
            refusal = Updated(event=command.event, state=UpdateState.REFUSED, reason=reason)
            self._spawn(self.emit(Emit(command.request, "", refusal)))

    def abort(self, request: RequestId) -> None:
        active = self._active.get(request)
        if active is None:
            self._aborted_early[request] = None
            if len(self._aborted_early) > REMEMBERED_ABORTS:
                self._aborted_early.popitem(last=False)
            self._send_aborted(Aborted(epoch=self._epoch, request=request))
        elif active.pulling is not None and not active.pulling.done():
            active.pulling.cancel()
            self._over(request)
            self._send_aborted(Aborted(epoch=self._epoch, request=request))
        elif not self._to_engine(Drop(request)):
            log.error("abort of %s: the engine does not take commands", request)

    def dropped(self, request: RequestId) -> None:
        """The engine has let go of an aborted request."""
        self._over(request)
        self._send_aborted(Aborted(epoch=self._epoch, request=request))

    async def _pull_and_run(self, active: _Active, tensors: Sequence[WireTensor], received_at: float) -> None:
        message = active.submit
        started = time.monotonic()
        try:
            job = await self._with_payloads(message, tensors)
        except Exception as error:  # noqa: BLE001 - a fault stays with its request, which would never end otherwise
            await self._fail(message.request, self._reason(error))
            return
        self._run(job, received_at, time.monotonic() - started)
        for command in active.updates:
            self._alter(command)
        active.updates.clear()

    async def _with_payloads(self, message: Submit, tensors: Sequence[WireTensor]) -> Job:
        """The job, once every payload among its inputs is here. Raises `OmniError`, alone or in a group."""
        names = [name for name, value in message.inputs.items() if isinstance(value, Payload)]
        async with asyncio.TaskGroup() as group:
            pulls = {name: group.create_task(self._pull(message, name)) for name in names}
        inputs: dict[str, Value] = {n: v for n, v in message.inputs.items() if n not in pulls}
        payloads: dict[str, PulledPayload] = {}
        all_tensors = list(tensors)
        for name, task in pulls.items():
            pulled = task.result()
            value = inline_value(pulled, all_tensors)
            if value is None:
                payloads[name] = pulled
            else:
                inputs[name] = value
        return Job(message.request, inputs, message.params, message.emit, message.publish, all_tensors, payloads)

    def _reason(self, error: Exception) -> ErrorInfo:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, OmniError):
            return error.info
        log.error("stage %s: a pull ended badly", self._stage, exc_info=error)
        return ErrorInfo(ErrorCode.STAGE_FAILED, f"{type(error).__name__}: {error}", self._stage)

    async def _pull(self, message: Submit, name: str) -> PulledPayload:
        payload = message.inputs[name]
        assert isinstance(payload, Payload)
        tensors = await self._payloads.pull(message.request, name, payload, self._spec.edge.deadline)
        return PulledPayload(payload, tensors)

    def _run(self, job: Job, received_at: float, pull_s: float) -> None:
        if not self._to_engine(Run(job, received_at, pull_s)):
            error = ErrorInfo(
                ErrorCode.QUEUE_FULL, f"stage {self._stage} takes no more requests now", self._stage, retry_after_s=1.0
            )
            self._spawn(self._fail(job.request, error))

    # --- out ----------------------------------------------------------------------------------------------------------

    async def emit(self, event: Emit) -> None:
        active = self._active.get(event.request)
        if active is not None:
            refs = tuple(tensor.ref for tensor in event.tensors)
            chunk = Chunk(
                request=event.request,
                epoch=self._epoch,
                seq=self._number(active),
                output=event.output,
                part=event.part,
                tensors=refs,
            )
            if not await self._sent(active, chunk, event.tensors):
                self._to_engine(Drop(event.request))

    async def publish(self, request: RequestId, output: str, payload: OutgoingPayload) -> None:
        active = self._active.get(request)
        if active is None:
            return
        descriptor = await self._payloads.publish(payload)
        active.published.add(output)
        message = Published(
            request=request, epoch=self._epoch, seq=self._number(active), output=output, value=descriptor
        )
        await self._send(message, ())

    async def publish_event(self, event: Publish) -> None:
        try:
            await self.publish(event.request, event.output, event.payload)
        except ProtocolError as error:
            await self._broken_output(event.request, error)
            self._to_engine(Drop(event.request))

    async def finish(self, done: Done) -> None:
        finished = done.finished
        active = self._active.get(finished.request)
        if active is None:
            return
        try:
            for output, payload in self._edge_payloads(active, finished).items():
                await self.publish(finished.request, output, payload)
            outputs, tensors = self._visible(active, finished)
        except ProtocolError as error:
            await self._broken_output(finished.request, error)
            return
        if await self._sent(active, self._result(active, done, outputs, tensors), tensors):
            self._over(finished.request)

    def _result(self, active: _Active, done: Done, outputs: dict[str, Value], tensors: Sequence[WireTensor]) -> Result:
        finished = done.finished
        return Result(
            request=finished.request,
            epoch=self._epoch,
            seq=self._number(active),
            outputs=outputs,
            finish_reason=finished.finish_reason,
            usage=finished.usage,
            timings=done.timings,
            tensors=tuple(tensor.ref for tensor in tensors),
        )

    async def _sent(self, active: _Active, message: Chunk | Result, tensors: Sequence[WireTensor]) -> bool:
        """Whether the message went out. One that cannot be sent fails its request, in the message's place."""
        try:
            await self._send(message, tensors)
        except ProtocolError as error:  # raised before anything was sent
            active.seq = message.seq
            await self._broken_output(message.request, error)
            return False
        return True

    async def _broken_output(self, request: RequestId, error: ProtocolError) -> None:
        """It does not fit its description, or is too large for the wire."""
        text = f"the engine gave a broken output: {error}"
        await self._fail(request, ErrorInfo(ErrorCode.STAGE_FAILED, text, self._stage))

    async def fail(self, failed: engine.Failed) -> None:
        await self._fail(failed.request, failed.error)

    async def _fail(self, request: RequestId, error: ErrorInfo) -> None:
        active = self._active.get(request)
        if active is None:
            return
        seq = self._number(active)
        self._over(request)
        await self._send(Failed(request=request, epoch=self._epoch, seq=seq, error=error), ())

    async def fail_all(self, error: ErrorInfo) -> None:
        """The engine is broken: nothing here will be finished."""
        for request in list(self._active):
            await self._fail(request, error)

    def _edge_payloads(self, active: _Active, finished: engine.Finished) -> Mapping[str, OutgoingPayload]:
        """Tensor outputs that go on an edge, whether the engine gave them as payloads or as values."""
        found = dict(finished.payloads)
        for name in active.submit.publish:
            value = finished.outputs.get(name)
            index = None if value is None else tensor_index(value)
            if value is not None and index is not None and name not in found:
                found[name] = payload_of(name, value, tensor_at(finished.tensors, index))
        return {name: payload for name, payload in found.items() if name not in active.published}

    def _visible(self, active: _Active, finished: engine.Finished) -> tuple[dict[str, Value], Sequence[WireTensor]]:
        """What goes into the result: the caller's outputs, and text for edges. Tensors that only an edge takes stay."""
        emit, publish = active.submit.emit, active.submit.publish
        outputs = {
            name: value
            for name, value in finished.outputs.items()
            if name in emit or (name in publish and tensor_index(value) is None)
        }
        return outputs, finished.tensors if any(tensor_index(v) is not None for v in outputs.values()) else ()

    # --- small things -------------------------------------------------------------------------------------------------

    @staticmethod
    def _number(active: _Active) -> int:
        active.seq += 1
        return active.seq - 1

    def _over(self, request: RequestId) -> None:
        self._active.pop(request, None)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("stage %s: a failure could not be told", self._stage, exc_info=error)

    def close(self) -> None:
        """The session is over: stop pulling and forget everything."""
        for task in self._tasks:
            task.cancel()
        self._active.clear()
