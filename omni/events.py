"""What goes into the master's state machine and what comes out. Plain data; a test writes these by hand.

core.handle(event, now) -> list[Action]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from omni.plan import RequestPlan, TaskKey
from proto.errors import ErrorInfo
from proto.ids import CallId, EventId, RequestId, StageName
from proto.messages import Change, ControlDown, ControlUp, DataDown, DataUp, Part, Timings, Usage, Value
from proto.params import Json
from proto.tensors import WireTensor

Peer = bytes
"""ZeroMQ's routing identity of one connection. It says where to answer, never who somebody is."""


# --- in ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ControlReceived:
    peer: Peer
    message: ControlUp


@dataclass(frozen=True, slots=True)
class DataReceived:
    peer: Peer
    message: DataUp
    tensors: Sequence[WireTensor] = ()


@dataclass(frozen=True, slots=True)
class JunkReceived:
    """A frame that is no message. Counted."""

    peer: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A send found no such connection, or its outbox is full."""

    peer: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class ChildExited:
    """A process that the launcher started here has ended."""

    stage: StageName
    replica: int
    pid: int
    code: int
    will_restart: bool = False


@dataclass(frozen=True, slots=True)
class Submitted:
    request: RequestId
    plan: RequestPlan


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller wants no more of it."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class UpdateAsked:
    """Change a running request, in the task `task` of its plan. Answered by `Updated` parts with its `event`."""

    request: RequestId
    event: EventId
    task: TaskKey
    change: Change


@dataclass(frozen=True, slots=True)
class CallAsked:
    call: CallId
    stage: StageName
    method: str
    args: Mapping[str, Json]
    replicas: Sequence[int] | None  # None: all that are ready
    timeout_s: float


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Fail what runs, tell every stage to shut down, accept nothing more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has reached `core.deadline()`."""


Event = (
    ControlReceived
    | DataReceived
    | JunkReceived
    | PeerGone
    | ChildExited
    | Submitted
    | Cancelled
    | UpdateAsked
    | CallAsked
    | StopAsked
    | Tick
)


# --- out --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendControl:
    peer: Peer
    message: ControlDown


@dataclass(frozen=True, slots=True)
class SendData:
    peer: Peer
    message: DataDown
    tensors: Sequence[WireTensor] = ()


@dataclass(frozen=True, slots=True)
class PartArrived:
    """A partial output or progress of one stage."""

    stage: StageName
    output: str
    part: Part
    tensors: Sequence[WireTensor] = ()


@dataclass(frozen=True, slots=True)
class StageFinished:
    stage: StageName
    outputs: Mapping[str, Value]
    tensors: Sequence[WireTensor]
    finish_reason: str
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Completed:
    """Terminal: the request succeeded, `total_s` after it was accepted."""

    total_s: float


@dataclass(frozen=True, slots=True)
class Errored:
    """Terminal: the request failed or was refused."""

    error: ErrorInfo


RequestNews = PartArrived | StageFinished | Completed | Errored


@dataclass(frozen=True, slots=True)
class Tell:
    """Something for the caller of `request`. The last one is Completed or Errored, and there is exactly one of those."""

    request: RequestId
    news: RequestNews


@dataclass(frozen=True, slots=True)
class CallDone:
    """`values` by replica; `errors` by replica for those that failed, stayed silent or went away."""

    call: CallId
    values: Mapping[int, Json] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    infos: Mapping[int, ErrorInfo] = field(default_factory=dict)  # of those errors that have a code


@dataclass(frozen=True, slots=True)
class MembershipChanged:
    """A replica joined, loaded further (`detail`), became ready, or left. `line` is what an operator should read, `fatal`
    marks a stage that will not come up by itself."""

    line: str
    fatal: bool = False
    detail: bool = False


Action = SendControl | SendData | Tell | CallDone | MembershipChanged
