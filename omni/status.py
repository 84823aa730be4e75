"""A snapshot of the pipeline: what `omni-master status`, `/metrics` and readiness are made from. Plain data, JSON-ready."""

import msgspec

from proto.figures import Figures
from proto.ids import Epoch, StageName
from proto.messages import StageInfo


class ReplicaStatus(msgspec.Struct, frozen=True):
    replica: int
    state: str  # loading | ready | asleep | suspect | draining
    epoch: Epoch
    host: str
    pid: int
    devices: tuple[str, ...]  # as its process was told, else as its engine says
    note: str  # last line of load progress
    in_flight: int  # requests that the master has given it
    steps: int
    queued: int
    running: int
    step_s: float
    leases: int
    lease_bytes: int
    rss_bytes: int
    silent_s: float  # since its last message
    loras: tuple[str, ...] = ()  # adapters that it has
    figures: Figures = Figures()  # what its engine counts and times


class StageStatus(msgspec.Struct, frozen=True):
    stage: StageName
    kind: str
    model: str
    wanted: int  # `replicas` of the deploy
    slots: int
    ready: int
    waiting: int  # requests held back for a replica
    output: str | None
    info: StageInfo | None
    replicas: tuple[ReplicaStatus, ...]


class EdgeStatus(msgspec.Struct, frozen=True):
    source: str  # "thinker.kv"
    target: str  # "painter.kv"
    payloads: int
    bytes: int


class PipelineStatus(msgspec.Struct, frozen=True):
    """`running` requests are at work, `queued` wait to be; `failed` is by `ErrorCode` value."""

    name: str
    ready: bool
    uptime_s: float
    running: int
    queued: int
    done: int
    failed: dict[str, int]
    junk: int  # frames dropped because they broke the wire's rules
    leases: int
    lease_bytes: int
    stages: tuple[StageStatus, ...]
    edges: tuple[EdgeStatus, ...]
