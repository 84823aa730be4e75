"""The orchestrator's tables: requests and their tasks. Data with a few questions that it can answer about itself."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from omni.membership import Replica
from omni.plan import RequestPlan, Source, TaskKey, TaskPlan
from omni.sequencer import Sequencer
from proto.ids import EventId, RequestId, StageName
from proto.messages import Change, Chunk, Failed, Payload, Published, Result, Value
from proto.tensors import WireTensor


class TaskState(enum.Enum):
    WAITING = "waiting"  # for linked inputs
    READY = "ready"  # for a replica with room
    SENT = "sent"
    DONE = "done"


class Arrival(NamedTuple):
    """A numbered message of a stage, with its tensors."""

    message: Chunk | Published | Result | Failed
    tensors: Sequence[WireTensor]


@dataclass(slots=True, eq=False)
class Task:
    plan: TaskPlan
    inputs: dict[str, Value]
    state: TaskState = TaskState.WAITING
    replica: Replica | None = None
    attempts: int = 0
    seen: bool = False  # somebody has had a part of its output, so it can't be run again unnoticed
    order: Sequencer[Arrival] = field(default_factory=Sequencer)
    updates: dict[EventId, Change] = field(default_factory=dict)  # not ended yet, in the order in which they were asked

    @property
    def complete(self) -> bool:
        """Whether every linked input is there."""
        return all(name in self.inputs for name in self.plan.links)

    def payloads(self) -> list[Payload]:
        return [value for value in self.inputs.values() if isinstance(value, Payload)]


@dataclass(slots=True, eq=False)
class Request:
    id: RequestId
    plan: RequestPlan
    accepted_at: float
    tasks: dict[TaskKey, Task]
    events: set[EventId] = field(default_factory=set)  # of all updates that a stage was to have

    @classmethod
    def of(cls, request: RequestId, plan: RequestPlan, now: float) -> "Request":
        return cls(request, plan, now, {task.key: Task(task, dict(task.inputs)) for task in plan.tasks})

    def siblings(self, stage: StageName) -> list[Task]:
        """The tasks that go to one replica together: the prompt's and its companions'."""
        return [task for key, task in self.tasks.items() if key.stage == stage]

    def lora(self, stage: StageName) -> str | None:
        """The adapter that the request is to be run with there."""
        return next((task.plan.params.lora or None for task in self.siblings(stage)), None)

    def consumers(self, source: Source) -> list[tuple[TaskKey, str]]:
        """The tasks that take an output, and as which input. One task may take it as several."""
        return [
            (task.plan.key, name)
            for task in self.tasks.values()
            for name, link in task.plan.links.items()
            if link == source
        ]

    @property
    def done(self) -> bool:
        return all(task.state is TaskState.DONE for task in self.tasks.values())
