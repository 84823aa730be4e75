"""Moves requests along the graph of stages. A pure state machine: no sockets, no clock, no threads, no torch.

A request is a set of tasks (`omni.plan`). A task runs once its inputs are there and a replica has room for it and its
siblings; its outputs become inputs of other tasks, or news for the caller.

    request:  queued -> running -> gone            task:  WAITING -> READY -> SENT -> DONE

Invariants, checked by `check_integrity` in tests:
- a request is either queued or running, and leaves through `_finish` alone, which tells its caller one terminal news;
- `Replica.in_flight` counts the tasks that were sent to it and not yet answered (by a result, a failure, or an
  acknowledged abort), so it returns to zero;
- every lease is released: after its consumers' acknowledgements, or when its request is over.
"""

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Final

from omni import updates
from omni.adapters import Adapters
from omni.events import (
    Action,
    Completed,
    Errored,
    PartArrived,
    RequestNews,
    SendControl,
    SendData,
    StageFinished,
    Tell,
    UpdateAsked,
)
from omni.leases import EdgeName, Leases
from omni.membership import Membership, Replica
from omni.placement import Placement
from omni.plan import MAIN, RequestPlan, Source, TaskKey, split_wire_id, wire_id
from omni.task import Arrival, Request, Task, TaskState
from proto.deploy import LimitsSpec
from proto.errors import ErrorCode, ErrorInfo, ProtocolError
from proto.ids import Epoch, RequestId, StageName
from proto.messages import (
    Abort,
    Aborted,
    Chunk,
    Failed,
    Partial,
    Payload,
    Preview,
    Published,
    Result,
    Submit,
    Text,
    TextDelta,
    Tokens,
    Updated,
    Value,
)
from proto.suggest import hint
from proto.tensors import WireTensor

MAX_ATTEMPTS: Final = 2
RETRY_AFTER_S: Final = 2.0


class Orchestrator:
    def __init__(
        self, members: Membership, leases: Leases, limits: LimitsSpec, placement: Placement, adapters: Adapters
    ) -> None:
        self._members = members
        self._leases = leases
        self._limits = limits
        self._placement = placement
        self._adapters = adapters
        self.queued: OrderedDict[RequestId, Request] = OrderedDict()
        self.running: dict[RequestId, Request] = {}
        self.waiting: dict[StageName, deque[Request]] = {stage: deque() for stage in members.slots}
        self.done = 0
        self.failed: Counter[ErrorCode] = Counter()
        self._unanswered: dict[tuple[Epoch, RequestId], Replica] = {}  # aborted tasks whose slot is still taken
        self._deadlines: list[tuple[float, RequestId]] = []
        self._starting = False

    # --- callers ------------------------------------------------------------------------------------------------------

    def submit(self, request_id: RequestId, plan: RequestPlan, now: float) -> list[Action]:
        """Accept a request, or tell its caller at once why not."""
        refusal = self._refusal(plan)
        if refusal is not None:
            self.failed[refusal.code] += 1
            return [Tell(request_id, Errored(refusal))]
        request = Request.of(request_id, plan, now)
        timeout = plan.timeout_s or self._limits.request_timeout
        if timeout is not None:
            heapq.heappush(self._deadlines, (now + timeout, request_id))
        if len(self.running) < self._limits.max_requests:
            return self._start(request, now)
        self.queued[request_id] = request
        return []

    def _refusal(self, plan: RequestPlan) -> ErrorInfo | None:
        if self._members.stopping:
            return ErrorInfo(ErrorCode.SHUTTING_DOWN, "the master is shutting down")
        for task in plan.tasks:
            problem = self._unservable(task.key.stage, task.params.lora or None)
            if problem is not None:
                return problem
        if len(self.running) >= self._limits.max_requests and len(self.queued) >= self._limits.max_queued:
            return ErrorInfo(
                ErrorCode.QUEUE_FULL,
                f"{len(self.running)} requests are running and {len(self.queued)} are waiting; try again later"
                " (limits.max_requests, limits.max_queued)",
                retry_after_s=RETRY_AFTER_S,
            )
        return None

    def _unservable(self, stage: StageName, lora: str | None) -> ErrorInfo | None:
        """Why no replica of the stage will ever take such a request, as things are; None if one may."""
        if not self._members.hopeful(stage):
            if self._members.asleep(stage):
                text = f"stage {stage} is asleep; wake it with the call `wake`"
                return ErrorInfo(ErrorCode.STAGE_UNAVAILABLE, text, stage, retry_after_s=RETRY_AFTER_S)
            return _unavailable(stage)
        if lora is None or lora in (known := self._members.loras(stage)):
            return None
        if self._adapters.wanted(stage, lora):
            text = f"stage {stage} is loading the adapter {lora!r} again; try again later"
            return ErrorInfo(ErrorCode.STAGE_UNAVAILABLE, text, stage, "lora", RETRY_AFTER_S)
        text = f"stage {stage} has no adapter {lora!r}; {hint(lora, sorted(known), 'loaded adapters')}"
        return ErrorInfo(ErrorCode.UNKNOWN_MODEL, text, stage, "lora")

    def cancel(self, request_id: RequestId, now: float) -> list[Action]:
        request = self._find(request_id)
        return (
            [] if request is None else self._fail(request, ErrorInfo(ErrorCode.ABORTED, "aborted by its caller"), now)
        )

    def update(self, asked: UpdateAsked) -> list[Action]:
        """Change a request that has not ended: at once, or when its task has been sent."""
        request = self._find(asked.request)
        if request is None:
            return [updates.refuse(asked.request, asked.task.stage, asked.event, updates.OVER)]
        return updates.ask(request, asked)

    def stop(self, reason: str, now: float) -> list[Action]:
        """Fail everything that is here."""
        actions: list[Action] = []
        for request in [*self.queued.values(), *self.running.values()]:
            actions += self._finish(request, Errored(ErrorInfo(ErrorCode.SHUTTING_DOWN, reason)), now)
        return actions

    # --- the graph ----------------------------------------------------------------------------------------------------

    def _start(self, request: Request, now: float) -> list[Action]:
        self.running[request.id] = request
        actions: list[Action] = []
        for stage in request.plan.stages:
            actions += self._offer(request, stage, now)
            if request.id not in self.running:
                break
        return actions

    def _offer(self, request: Request, stage: StageName, now: float) -> list[Action]:
        """Queue a request's tasks of one stage for a replica, once all of them have their inputs."""
        siblings = request.siblings(stage)
        if not all(task.state is TaskState.WAITING and task.complete for task in siblings):
            return []
        problem = self._unservable(stage, request.lora(stage))
        if problem is not None:
            return self._fail(request, problem, now)
        for task in siblings:
            task.state = TaskState.READY
        self.waiting[stage].append(request)
        return self.dispatch(stage)

    def dispatch(self, stage: StageName) -> list[Action]:
        """Send waiting work to replicas with room, oldest first. A request's siblings go together or not at all. One that
        waits for a replica with its adapter lets others pass, but not to those replicas."""
        actions: list[Action] = []
        queue = self.waiting[stage]
        at, held = 0, list[Replica]()
        while at < len(queue):
            request = queue[at]
            siblings = request.siblings(stage)
            lora = request.lora(stage)
            replica = self._placement.choose(stage, len(siblings), request.plan.affinity, lora, held)
            if replica is not None:
                del queue[at]
                for task in siblings:
                    actions += [self._send(request, task, replica), *updates.resend(request, task)]
            elif lora is None:
                break
            else:
                held += self._placement.with_lora(stage, lora)
                at += 1
        return actions

    def offering_changed(self, stage: StageName, now: float) -> list[Action]:
        """A replica fell asleep or woke, or has other adapters: what waits can be served, or never will be."""
        actions: list[Action] = []
        for request in list(self.waiting[stage]):
            problem = self._unservable(stage, request.lora(stage))
            if problem is not None and request in self.waiting[stage]:
                actions += self._fail(request, problem, now)
        return [*actions, *self.dispatch(stage)]

    def _send(self, request: Request, task: Task, replica: Replica) -> Action:
        task.state = TaskState.SENT
        task.replica = replica
        task.attempts += 1
        replica.in_flight += 1
        plan = task.plan
        message = Submit(
            request=wire_id(request.id, plan.key.role),
            epoch=replica.epoch,
            inputs=task.inputs,
            params=plan.params,
            emit=plan.emit,
            publish=plan.publish,
            tensors=tuple(tensor.ref for tensor in plan.tensors),
        )
        assert replica.data is not None  # `Membership.ready` gives attached replicas only
        return SendData(replica.data, message, plan.tensors)

    # --- stages -------------------------------------------------------------------------------------------------------

    def arrived(self, replica: Replica, arrival: Arrival, now: float) -> list[Action]:
        """A stage's message about one of its tasks. What is late, doubled or not its own changes nothing."""
        message = arrival.message
        found = self._at_work(replica, message.request)
        if found is None:
            return self._late(replica, message)
        request, task = found
        actions: list[Action] = []
        try:
            for one in task.order.push(message.seq, arrival):
                over = request.id not in self.running
                actions += self._late(replica, one.message) if over else self._apply(request, task, one, now)
        except ProtocolError as error:
            actions += self._fail(request, ErrorInfo(ErrorCode.PROTOCOL, str(error), stage=replica.stage), now)
        return actions

    def _apply(self, request: Request, task: Task, arrival: Arrival, now: float) -> list[Action]:
        message, tensors = arrival
        stage, role = task.plan.key
        if isinstance(message, Chunk):
            if isinstance(message.part, TextDelta | Preview | Partial):
                task.seen = True
            if role != MAIN:
                return []
            if isinstance(message.part, Updated):
                return updates.answered(request, task, message.part)
            return [Tell(request.id, PartArrived(stage, message.output, message.part, tensors))]
        if isinstance(message, Published):
            return self._deliver(request, task, message.output, message.value, now)
        assert task.replica is not None
        replica, task.state = task.replica, TaskState.DONE
        replica.in_flight -= 1
        if isinstance(message, Failed):
            error = message.error
            return [
                *self._fail(
                    request, ErrorInfo(error.code, error.message, stage, error.field, error.retry_after_s), now
                ),
                *self.dispatch(stage),
            ]
        return [*self._finished(request, task, message, tensors, now), *self.dispatch(stage)]

    def _finished(
        self, request: Request, task: Task, message: Result, tensors: Sequence[WireTensor], now: float
    ) -> list[Action]:
        plan = task.plan
        actions = updates.give_up(request, [task], f"stage {plan.key.stage} has finished the request without it")
        if plan.key.role == MAIN:
            seen = {name: value for name, value in message.outputs.items() if name in plan.emit}
            news = StageFinished(plan.key.stage, seen, tensors, message.finish_reason, message.usage, message.timings)
            actions.append(Tell(request.id, news))
        for name in plan.publish:
            # Tensors for an edge come as payloads, before; a picture in a result is the caller's copy.
            if request.id in self.running and isinstance(message.outputs.get(name), Text | Tokens):
                actions += self._deliver(request, task, name, message.outputs[name], now)
        if request.id not in self.running:
            return actions
        missing = self._undelivered(request, task)
        if missing is not None:
            return [*actions, *self._fail(request, missing, now)]
        if request.done:
            self.done += 1
            actions += self._finish(request, Completed(now - request.accepted_at), now)
        return actions

    def _deliver(self, request: Request, task: Task, output: str, value: Value, now: float) -> list[Action]:
        """Hand an output to the tasks that take it. Raises `ProtocolError` for a value that can't cross an edge."""
        task.seen = True
        source = Source(task.plan.key, output)
        consumers = request.consumers(source)
        edges = [EdgeName(f"{task.plan.key.stage}.{output}", f"{key.stage}.{name}") for key, name in consumers]
        if isinstance(value, Payload):
            assert task.replica is not None
            self._leases.check(task.replica, value)
            if not consumers:
                return self._leases.release(value)
            if value.nbytes > self._limits.max_payload_bytes:
                text = f"the payload {source.task.stage}.{output} has {value.nbytes} bytes; limits.max_payload_bytes is {self._limits.max_payload_bytes}"
                return [
                    *self._leases.release(value),
                    *self._fail(request, ErrorInfo(ErrorCode.PAYLOAD_LOST, text, stage=source.task.stage), now),
                ]
            self._leases.grant(request.id, value, zip((key for key, _ in consumers), edges, strict=True))
        elif isinstance(value, Text):
            for edge in edges:
                self._leases.edge_bytes[edge] += len(value.text.encode())
                self._leases.edge_payloads[edge] += 1
        elif not isinstance(value, Tokens):
            kind = type(value).__name__
            raise ProtocolError(
                f"stage {source.task.stage} published {output} as {kind}; tensors go on an edge as payloads"
            )
        actions: list[Action] = []
        for key, name in consumers:
            request.tasks[key].inputs[name] = value
        for stage in dict.fromkeys(key.stage for key, _ in consumers):
            actions += self._offer(request, stage, now)
            if request.id not in self.running:
                break
        return actions

    def _undelivered(self, request: Request, task: Task) -> ErrorInfo | None:
        """A finished task must have given everything that others wait for."""
        for other in request.tasks.values():
            for name, link in other.plan.links.items():
                if link.task == task.plan.key and name not in other.inputs:
                    stage = task.plan.key.stage
                    text = f"stage {stage} finished without its output {link.output!r}, which {other.plan.key.stage}.{name} needs"
                    return ErrorInfo(ErrorCode.STAGE_FAILED, text, stage=stage)
        return None

    def aborted(self, replica: Replica, message: Aborted) -> list[Action]:
        """A replica acknowledges an abort: its slot is free."""
        return self._answered(replica, message.request)

    def _late(self, replica: Replica, message: Chunk | Published | Result | Failed) -> list[Action]:
        """Nobody waits for it: keep nothing of it, and see whether it frees a slot."""
        values: list[Value] = []
        if isinstance(message, Published):
            values = [message.value]
        elif isinstance(message, Result):
            values = list(message.outputs.values())
        actions = [action for v in values if isinstance(v, Payload) for action in self._leases.unwanted(replica, v)]
        if isinstance(message, Result | Failed):
            actions += self._answered(replica, message.request)
        return actions

    def _answered(self, replica: Replica, wire: RequestId) -> list[Action]:
        if self._unanswered.pop((replica.epoch, wire), None) is None:
            return []
        replica.in_flight -= 1
        return self.dispatch(replica.stage)

    def runs(self, replica: Replica, wire: RequestId) -> bool:
        """Whether the task that a stage knows as `wire` is at work on this replica."""
        return self._at_work(replica, wire) is not None

    def _at_work(self, replica: Replica, wire: RequestId) -> tuple[Request, Task] | None:
        request_id, role = split_wire_id(wire)
        request = self.running.get(request_id)
        task = request.tasks.get(TaskKey(replica.stage, role)) if request is not None else None
        if request is None or task is None or task.replica is not replica or task.state is not TaskState.SENT:
            return None
        return request, task

    # --- replicas that leave ------------------------------------------------------------------------------------------

    def replica_left(self, replica: Replica, reason: str, now: float) -> list[Action]:
        """Run its tasks elsewhere where nobody can notice; fail the requests of the others."""
        for key in [key for key in self._unanswered if key[0] == replica.epoch]:
            del self._unanswered[key]
        actions: list[Action] = []
        for request in reversed(list(self.running.values())):  # so that the oldest retry is first in its queue
            lost = [task for task in request.tasks.values() if task.replica is replica and task.state is TaskState.SENT]
            if not lost:
                continue
            if self._can_retry(request, replica.stage, lost):
                for task in lost:
                    task.state, task.replica, task.order = TaskState.READY, None, type(task.order)()
                self.waiting[replica.stage].appendleft(request)
            else:
                text = f"stage {replica.label} went away while it ran this request: {reason}"
                error = ErrorInfo(ErrorCode.REPLICA_LOST, text, replica.stage, retry_after_s=RETRY_AFTER_S)
                actions += self._fail(request, error, now)
        replica.in_flight = 0
        return [*actions, *self.offering_changed(replica.stage, now)]

    def _can_retry(self, request: Request, stage: StageName, lost: Sequence[Task]) -> bool:
        return (
            len(lost) == len(request.siblings(stage))
            and bool(self._members.ready(stage))
            and self._unservable(stage, request.lora(stage)) is None
            and all(
                not task.seen
                and task.attempts < MAX_ATTEMPTS
                and all(self._leases.waits(payload, task.plan.key) for payload in task.payloads())
                for task in lost
            )
        )

    # --- time ---------------------------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        while self._deadlines and self._find(self._deadlines[0][1]) is None:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while (at := self.deadline()) is not None and at <= now:
            _, request_id = heapq.heappop(self._deadlines)
            request = self._find(request_id)
            if request is not None:
                where = ", ".join(k.stage for k, t in request.tasks.items() if t.state is not TaskState.DONE)
                text = f"not done after {now - request.accepted_at:.1f} s (limits.request_timeout); unfinished: {where}"
                actions += self._fail(request, ErrorInfo(ErrorCode.DEADLINE, text), now)
        return actions

    # --- the end ------------------------------------------------------------------------------------------------------

    def _find(self, request_id: RequestId) -> Request | None:
        return self.running.get(request_id) or self.queued.get(request_id)

    def _fail(self, request: Request, error: ErrorInfo, now: float) -> list[Action]:
        return self._finish(request, Errored(error), now)

    def _finish(self, request: Request, news: RequestNews, now: float) -> list[Action]:
        """The only way out: whatever the request still holds is given back, its caller is told, the next one starts."""
        was_running = self.running.pop(request.id, None) is not None
        self.queued.pop(request.id, None)
        actions = updates.give_up(request, request.tasks.values(), "the request has ended without it")
        actions.append(Tell(request.id, news))
        if isinstance(news, Errored):
            self.failed[news.error.code] += 1
            actions += self._abort_tasks(request)
        actions += self._leases.end_request(request.id)
        if was_running:
            actions += self._start_queued(now)
        return actions

    def _abort_tasks(self, request: Request) -> list[Action]:
        actions: list[Action] = []
        for key, task in request.tasks.items():
            if task.state is TaskState.READY and request in self.waiting[key.stage]:
                self.waiting[key.stage].remove(request)
            replica = task.replica
            if task.state is TaskState.SENT and replica is not None:
                wire = wire_id(request.id, key.role)
                if self._members.find(replica.stage, replica.index, replica.epoch) is replica:
                    self._unanswered[(replica.epoch, wire)] = replica
                    actions.append(SendControl(replica.control, Abort(epoch=replica.epoch, request=wire)))
                    for held in task.order.give_up():
                        actions += self._late(replica, held.message)
        return actions

    def _start_queued(self, now: float) -> list[Action]:
        """Fill the free places. Not re-entrant: one that fails at its start frees its place for the same loop."""
        actions: list[Action] = []
        if self._starting:
            return actions
        self._starting = True
        try:
            while self.queued and len(self.running) < self._limits.max_requests and not self._members.stopping:
                _, request = self.queued.popitem(last=False)
                actions += self._start(request, now)
        finally:
            self._starting = False
        return actions

    def check_integrity(self) -> None:
        """For tests: raise AssertionError where an invariant is broken."""
        assert not set(self.queued) & set(self.running)
        sent: Counter[Epoch] = Counter(epoch for epoch, _ in self._unanswered)
        for request in self.running.values():
            assert not request.done
            assert all(not task.updates for task in request.tasks.values() if task.state is TaskState.DONE)
            for task in request.tasks.values():
                if task.state is TaskState.SENT:
                    assert task.replica is not None
                    sent[task.replica.epoch] += 1
                if task.state is TaskState.READY:
                    assert request in self.waiting[task.plan.key.stage]
        for replica in self._members.replicas():
            assert replica.in_flight == sent.pop(replica.epoch, 0), replica
        assert not sent, "tasks are bound to replicas that have left"
        for stage, queue in self.waiting.items():
            assert all(request.id in self.running for request in queue), stage
        if not self.running:
            assert not len(self._leases)


def _unavailable(stage: StageName) -> ErrorInfo:
    return ErrorInfo(
        ErrorCode.STAGE_UNAVAILABLE,
        f"stage {stage} has no ready replica; try again later",
        stage,
        retry_after_s=RETRY_AFTER_S,
    )
