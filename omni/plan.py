"""A checked request as the orchestrator runs it: tasks, one per stage and role, joined by links. Pure data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from proto.ids import RequestId, StageName
from proto.messages import Value
from proto.params import Params
from proto.tensors import WireTensor

MAIN = ""
"""The role of the caller's own prompt. A companion's role is its link's: "negative"."""


class TaskKey(NamedTuple):
    """One run of one stage for one request."""

    stage: StageName
    role: str = MAIN


class Source(NamedTuple):
    """Where a linked input comes from."""

    task: TaskKey
    output: str


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """`inputs` are known already, `links` come from other tasks. Values of `inputs` may name one of `tensors`."""

    key: TaskKey
    inputs: Mapping[str, Value]
    links: Mapping[str, Source]
    params: Params
    emit: tuple[str, ...] = ()
    publish: tuple[str, ...] = ()
    tensors: Sequence[WireTensor] = ()


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """`tasks` are in topological order. Tasks of one stage are siblings: they go to one replica, together or not at all."""

    tasks: tuple[TaskPlan, ...]
    affinity: str | None = None
    timeout_s: float | None = None
    stages: tuple[StageName, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(dict.fromkeys(task.key.stage for task in self.tasks)))


def wire_id(request: RequestId, role: str) -> RequestId:
    """The id under which a stage knows a task: the request's own, or with a dot and the companion's role."""
    return RequestId(f"{request}.{role}") if role else request


def split_wire_id(wire: RequestId) -> tuple[RequestId, str]:
    """The inverse of `wire_id`. Ids that the master makes have no dot."""
    request, _, role = wire.partition(".")
    return RequestId(request), role
