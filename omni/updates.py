"""The updates of one request, from the master's side: kept until they are answered, sent behind the task that they are for.
Pure.

    asked -> (kept while its task waits for a replica) -> sent -> started -> completed
                                 `------------- refused <------------'

Invariants: an event is sent once to each replica that runs its task, in the order in which its request was asked; it has
exactly one end, `COMPLETED` or `REFUSED`, which comes before the request's own; and one that has started is never sent again,
since its task is not run again either (`Task.seen`).
"""

from collections.abc import Iterable
from typing import Final

from omni.events import Action, PartArrived, SendData, Tell, UpdateAsked
from omni.plan import TaskKey, wire_id
from omni.task import Request, Task, TaskState
from proto.ids import EventId, RequestId, StageName
from proto.messages import Change, Update, Updated, UpdateState

MAX_WAITING: Final = 64
"""Updates of one task that may wait for their end."""

MAX_EVENTS: Final = 4096
"""Updates that one request may get in its life."""

OVER: Final = "the request is over, or was never here"


def refuse(request: RequestId, stage: StageName, event: EventId, reason: str) -> Tell:
    """The end of an update that changes nothing."""
    part = Updated(event=event, state=UpdateState.REFUSED, reason=reason[:4096])
    return Tell(request, PartArrived(stage, "", part))


def ask(request: Request, asked: UpdateAsked) -> list[Action]:
    """A caller's update. One whose event has come before is the same one, come twice."""
    if asked.event in request.events:
        return []
    task = request.tasks[asked.task]
    reason = _unwelcome(request, task)
    if reason is not None:
        return [refuse(request.id, asked.task.stage, asked.event, reason)]
    request.events.add(asked.event)
    task.updates[asked.event] = asked.change
    return [_sent(request, task, asked.event, asked.change)] if task.state is TaskState.SENT else []


def _unwelcome(request: Request, task: Task) -> str | None:
    stage = task.plan.key.stage
    if task.state is TaskState.DONE:
        return f"stage {stage} is done with the request"
    if len(task.updates) >= MAX_WAITING:
        return f"{MAX_WAITING} updates of this request wait for stage {stage}; wait until one of them has ended"
    if len(request.events) >= MAX_EVENTS:
        return f"a request takes at most {MAX_EVENTS} updates"
    return None


def resend(request: Request, task: Task) -> list[Action]:
    """For a task that has just been sent: what was asked before, behind it on the same lane."""
    return [_sent(request, task, event, change) for event, change in task.updates.items()]


def answered(request: Request, task: Task, part: Updated) -> list[Action]:
    """A stage's word about an update; nothing if that one has ended or was never asked."""
    if part.event not in task.updates:
        return []
    if part.state is UpdateState.STARTED:
        task.seen = True
    else:
        del task.updates[part.event]
    return [Tell(request.id, PartArrived(task.plan.key.stage, "", part))]


def give_up(request: Request, tasks: Iterable[Task], reason: str) -> list[Action]:
    """These tasks end: what they have not answered is refused."""
    actions: list[Action] = []
    for task in tasks:
        actions += [refuse(request.id, task.plan.key.stage, event, reason) for event in task.updates]
        task.updates.clear()
    return actions


def _sent(request: Request, task: Task, event: EventId, change: Change) -> Action:
    replica = task.replica
    assert replica is not None
    assert replica.data is not None  # a task is sent to attached replicas only
    key: TaskKey = task.plan.key
    message = Update(request=wire_id(request.id, key.role), epoch=replica.epoch, event=event, change=change)
    return SendData(replica.data, message)
