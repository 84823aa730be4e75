"""The engine contract: what the worker shell asks of whatever computes, and what it gets back. No torch here.

An engine lives in one thread, the engine thread, and is called from nowhere else. It is always *between steps* when it is
called: so `abort` and `call` may change anything at once, and need no locks. `step` does one bounded unit of work (one
token for everybody, one denoising step) so that aborts, calls and new requests never wait long.

    engine.load(context) -> StageInfo      once
    engine.submit(job)                     a request arrives; raise an OmniError to refuse it
    engine.step() -> events                while engine.has_work
    engine.abort(request)                  forget it now
    engine.call(method, args) -> data      RPC
    engine.stats() -> EngineStats
    engine.close()

An engine whose requests can be changed while they run is also `Interactive`:

    engine.update(request, event, change)  raise an OmniError to refuse it; else `Updated` parts follow, from `step`

An engine that counts more than its queue is also `Measured`:

    engine.figures() -> Figures            for /metrics, a few times a second

Invariant: for each submitted job that was not aborted, the engine gives exactly one `Finished` or `Failed`.
A fault inside one request is that request's `Failed`; `step` raises only when the engine itself is broken.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from proto.deploy import Kind, LimitsSpec, StageSpec
from proto.errors import ErrorInfo
from proto.figures import Figures
from proto.ids import EventId, RequestId, StageName
from proto.messages import Change, Part, Payload, StageInfo, Usage, Value
from proto.params import Json, Params
from proto.tensors import WireTensor


def _broken(reason: str) -> None:
    """For engines that run outside a worker."""


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What an engine knows when it loads. `report(note, done)` must be called often: a load that is silent for
    `master.load_stall` seconds is taken for stuck. `publishes` are the outputs that some edge takes from this stage.
    `broken(reason)` says from any thread that the engine is of no more use, even while its own thread is stuck."""

    stage: StageName
    spec: StageSpec
    limits: LimitsSpec
    device: str  # as in the deploy: cpu, cuda:0, mps
    publishes: tuple[str, ...]
    report: Callable[[str, float | None], None]
    ranks: tuple[str, ...] = ()  # the devices of all ranks of this replica, this process's first, if there are several
    broken: Callable[[str], None] = _broken


@dataclass(frozen=True, slots=True)
class PulledPayload:
    """A payload that has arrived whole and verified."""

    descriptor: Payload
    tensors: Mapping[str, WireTensor]


@dataclass(frozen=True, slots=True)
class Job:
    """One request as the engine gets it. Values that name a tensor name one of `tensors`; payload inputs are in `payloads`
    under the same input name, and not in `inputs`. `emit` are outputs to stream and return, `publish` those for edges."""

    request: RequestId
    inputs: Mapping[str, Value]
    params: Params
    emit: tuple[str, ...] = ()
    publish: tuple[str, ...] = ()
    tensors: Sequence[WireTensor] = ()
    payloads: Mapping[str, PulledPayload] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutgoingPayload:
    """Tensors for an edge. The engine must not write into them again."""

    kind: Kind
    tensors: Mapping[str, WireTensor]
    meta: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Emit:
    """A partial output or progress. `part` of kind Started must come first, when the request leaves the engine's queue."""

    request: RequestId
    output: str
    part: Part
    tensors: Sequence[WireTensor] = ()


@dataclass(frozen=True, slots=True)
class Publish:
    """An output for an edge, ready before the request is done."""

    request: RequestId
    output: str
    payload: OutgoingPayload


@dataclass(frozen=True, slots=True)
class Finished:
    """`outputs` are values (their tensors in `tensors`), `payloads` the tensor outputs for edges. Together they hold every
    output that the job asked for in `emit` and `publish`, except those already sent as `Publish`."""

    request: RequestId
    outputs: Mapping[str, Value] = field(default_factory=dict)
    tensors: Sequence[WireTensor] = ()
    payloads: Mapping[str, OutgoingPayload] = field(default_factory=dict)
    finish_reason: str = "stop"
    usage: Usage = Usage()
    detail: Mapping[str, float] = field(default_factory=dict)  # seconds by part of the work, and counts


@dataclass(frozen=True, slots=True)
class Failed:
    request: RequestId
    error: ErrorInfo


Event = Emit | Publish | Finished | Failed


@dataclass(frozen=True, slots=True)
class EngineStats:
    queued: int = 0
    running: int = 0


class Engine(Protocol):
    """See the module's docstring."""

    def load(self, context: LoadContext) -> StageInfo: ...

    @property
    def has_work(self) -> bool: ...

    def submit(self, job: Job) -> None: ...

    def step(self) -> list[Event]: ...

    def abort(self, request: RequestId) -> None: ...

    def call(self, method: str, args: Mapping[str, Json]) -> Json: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


@runtime_checkable
class Measured(Engine, Protocol):
    """An engine that counts and times what `proto.figures` has names for, since it was loaded."""

    def figures(self) -> Figures: ...


@runtime_checkable
class Interactive(Engine, Protocol):
    """An engine that takes updates of requests at work.

    For each update that it did not refuse by raising it gives one `Updated` part of state COMPLETED or REFUSED, perhaps after
    one of state STARTED, by `Emit` with output ""; none after the request's terminal event. Updates of one request are
    carried out in the order in which they came.
    """

    def update(self, request: RequestId, event: EventId, change: Change) -> None: ...

    def wake_s(self) -> float | None:
        """Seconds until the engine will have work by itself, though it has none now; None if it never will."""
        ...
