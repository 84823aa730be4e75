"""Who takes part: replicas, their slots, sessions, epochs and health. A pure state machine.

    slot:  free --Hello--> LOADING --Ready--> READY <--silence/noise--> SUSPECT
           any state --Goodbye, silence, exit, stalled load--> free again;  READY --Leaving--> DRAINING

Invariants: only slots that the deploy declares exist; an epoch is used once; a message is attributed to a replica by the
connection on which its session was handed out, and counts only if it names that replica's present epoch.
"""

import enum
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from omni.events import Action, MembershipChanged, Peer, SendControl, SendData
from proto.deploy import Deploy
from proto.ids import Epoch, Session, StageName
from proto.messages import (
    PROTOCOL,
    Attach,
    Attached,
    BeatAck,
    Goodbye,
    Heartbeat,
    Hello,
    InfoChanged,
    Leaving,
    LoadFailed,
    LoadProgress,
    Ready,
    Refuse,
    StageInfo,
    Welcome,
)

LOADING_SILENCE_S: Final = 30.0
"""A process that imports and reads weights may not answer for long stretches; only beyond this is it taken for dead."""


class ReplicaState(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Replica:
    """One occupied slot. `in_flight` is kept by the orchestrator."""

    stage: StageName
    index: int
    epoch: Epoch
    session: Session
    nonce: str
    control: Peer
    host: str
    pid: int
    devices: tuple[str, ...]
    last_seen: float
    last_progress: float
    state: ReplicaState = ReplicaState.LOADING
    data: Peer | None = None
    note: str = "connected"
    info: StageInfo | None = None
    beat: Heartbeat | None = None
    in_flight: int = 0

    @property
    def asleep(self) -> bool:
        """It answers calls, and takes no requests until it is woken."""
        return self.info is not None and self.info.asleep

    @property
    def label(self) -> str:
        """For people: "painter/1"."""
        return f"{self.stage}/{self.index}"


@dataclass(frozen=True, slots=True)
class ReplicaLeft:
    """Told to the rest of the core when a slot is freed: nothing of this epoch will ever be heard again."""

    replica: Replica
    reason: str


@dataclass(slots=True)
class Membership:
    """`publishes` are, per stage, the outputs that edges take. `new_session` must give unguessable text."""

    deploy: Deploy
    publishes: Mapping[StageName, tuple[str, ...]]
    config_hash: Callable[[StageName], str]
    new_session: Callable[[], str]
    data_port: int = 0
    slots: dict[StageName, dict[int, Replica]] = field(default_factory=dict)
    stopping: bool = False
    refused: int = 0
    _by_control: dict[Peer, Replica] = field(default_factory=dict)
    _by_data: dict[Peer, Replica] = field(default_factory=dict)
    _by_session: dict[Session, Replica] = field(default_factory=dict)
    _epoch: int = 0

    def __post_init__(self) -> None:
        self.slots = {StageName(name): {} for name in self.deploy.stages}

    # --- looking ------------------------------------------------------------------------------------------------------

    def replicas(self) -> Iterator[Replica]:
        for slots in self.slots.values():
            yield from slots.values()

    def of_control(self, peer: Peer, epoch: Epoch) -> Replica | None:
        """The replica behind a control connection, if `epoch` is its present one."""
        replica = self._by_control.get(peer)
        return replica if replica is not None and replica.epoch == epoch else None

    def of_data(self, peer: Peer, epoch: Epoch) -> Replica | None:
        replica = self._by_data.get(peer)
        return replica if replica is not None and replica.epoch == epoch else None

    def find(self, stage: StageName, index: int, epoch: Epoch) -> Replica | None:
        replica = self.slots.get(stage, {}).get(index)
        return replica if replica is not None and replica.epoch == epoch else None

    def ready(self, stage: StageName) -> list[Replica]:
        """Replicas that get new work, in ascending order of number."""
        return [r for r in self.answering(stage) if not r.asleep]

    def answering(self, stage: StageName) -> list[Replica]:
        """Replicas that answer calls, asleep or not, in ascending order of number."""
        return [r for _, r in sorted(self.slots[stage].items()) if r.state is ReplicaState.READY and r.data is not None]

    def hopeful(self, stage: StageName) -> bool:
        """Whether work that waits for this stage may still be served: some replica is ready, or silent but not given up."""
        return bool(self._alive(stage))

    def asleep(self, stage: StageName) -> bool:
        """Whether the stage serves nothing because what it has of replicas sleeps."""
        return not self.hopeful(stage) and any(r.asleep for r in self.slots[stage].values())

    def loras(self, stage: StageName) -> set[str]:
        """Adapters of which some replica that may serve work has the weights."""
        return {name for r in self._alive(stage) if r.info is not None for name in r.info.loras}

    def _alive(self, stage: StageName) -> list[Replica]:
        states = (ReplicaState.READY, ReplicaState.SUSPECT)
        return [r for r in self.slots[stage].values() if r.state in states and not r.asleep]

    def info(self, stage: StageName) -> StageInfo | None:
        return next((r.info for _, r in sorted(self.slots[stage].items()) if r.info is not None), None)

    def waiting_for(self) -> list[str]:
        """One line for each stage that has fewer ready replicas than the deploy wants."""
        lines = []
        for name, spec in self.deploy.stages.items():
            ready = len(self.ready(StageName(name)))
            if ready < spec.replicas:
                notes = [f"{r.label}: {r.note}" for r in self.slots[StageName(name)].values() if r.info is None]
                detail = f" [{'; '.join(notes)}]" if notes else ""
                lines.append(f"waiting for stage {name} ({ready} of {spec.replicas} replicas){detail}")
        return lines

    def superseded(self, hello: Hello) -> Replica | None:
        """The replica that the sender of a Hello was until its connection broke. Only it knows its session."""
        return self._by_session.get(hello.previous) if hello.previous is not None else None

    # --- joining ------------------------------------------------------------------------------------------------------

    def hello(self, peer: Peer, hello: Hello, now: float) -> list[Action]:
        """Give the sender a slot, or say why not. A repeated Hello of the same nonce gets the same answer."""
        known = self._by_control.get(peer)
        if known is not None and known.nonce == hello.nonce:
            known.last_seen = now
            return [SendControl(peer, self._welcome(known))]
        refusal = self._refusal(peer, hello)
        if refusal is not None:
            self.refused += 1
            return [SendControl(peer, refusal)]
        stage = hello.stage
        slots = self.slots[stage]
        index = hello.replica
        if index is None:
            index = next(i for i in range(self.deploy.stages[stage].slots) if i not in slots)
        self._epoch += 1
        replica = Replica(
            stage=stage,
            index=index,
            epoch=Epoch(self._epoch),
            session=Session(self.new_session()),
            nonce=hello.nonce,
            control=peer,
            host=hello.host,
            pid=hello.pid,
            devices=hello.devices,
            last_seen=now,
            last_progress=now,
        )
        slots[index] = replica
        self._by_control[peer] = replica
        self._by_session[replica.session] = replica
        line = f"stage {replica.label} connected from {hello.host} (pid {hello.pid})"
        return [SendControl(peer, self._welcome(replica)), MembershipChanged(line)]

    def _refusal(self, peer: Peer, hello: Hello) -> Refuse | None:
        known = self._by_control.get(peer)
        if known is not None:
            return Refuse(code="slot", reason=f"this connection holds the slot {known.label} already; use one for each")
        if hello.protocol != PROTOCOL:
            return Refuse(
                code="protocol",
                reason=f"this master speaks protocol {PROTOCOL}, you speak {hello.protocol}; install the same omni-pipeline",
            )
        if self.stopping:
            return Refuse(code="stopping", reason="this master is shutting down", retry=True)
        spec = self.deploy.stages.get(hello.stage)
        if spec is None:
            names = ", ".join(self.deploy.stages)
            return Refuse(code="stage", reason=f"the deploy has no stage {hello.stage!r}; it has: {names}")
        taken = self.slots[hello.stage]
        if hello.replica is not None and not 0 <= hello.replica < spec.slots:
            return Refuse(
                code="slot",
                reason=f"stage {hello.stage} has replica slots 0..{spec.slots - 1}, not {hello.replica}; raise max_replicas",
            )
        if hello.replica in taken or len(taken) >= spec.slots:
            which = f"replica {hello.replica}" if hello.replica is not None else f"all {spec.slots} replica slots"
            return Refuse(
                code="slot",
                reason=f"{which} of stage {hello.stage} taken; raise stages.{hello.stage}.max_replicas, or wait",
                retry=True,
            )
        return None

    def _welcome(self, replica: Replica) -> Welcome:
        return Welcome(
            session=replica.session,
            epoch=replica.epoch,
            replica=replica.index,
            pipeline=self.deploy.name,
            spec=self.deploy.stages[replica.stage],
            limits=self.deploy.limits,
            publishes=self.publishes[replica.stage],
            data_port=self.data_port,
            heartbeat_s=self.deploy.master.heartbeat,
            config_hash=self.config_hash(replica.stage),
        )

    def attach(self, peer: Peer, attach: Attach, now: float) -> list[Action]:
        """Tie a data connection to the replica that holds its session, and to no second one. A wrong session gets no answer."""
        replica = self._by_session.get(attach.session)
        if replica is None or replica.epoch != attach.epoch or self._by_data.get(peer, replica) is not replica:
            self.refused += 1
            return []
        replica.data = peer
        replica.last_seen = now
        self._by_data[peer] = replica
        return [SendData(peer, Attached(epoch=replica.epoch))]

    def attached_elsewhere(self, peer: Peer, attach: Attach) -> Replica | None:
        """The replica that attaches although it is attached by another connection: that one has broken."""
        replica = self._by_session.get(attach.session)
        if replica is None or replica.epoch != attach.epoch or peer in self._by_data:
            return None
        return replica if replica.data is not None else None

    # --- living -------------------------------------------------------------------------------------------------------

    def loading(self, replica: Replica, message: LoadProgress, now: float) -> list[Action]:
        replica.last_seen = replica.last_progress = now
        replica.note = message.note if message.done is None else f"{message.note} ({message.done:.0%})"
        return [MembershipChanged(f"stage {replica.label}: {replica.note}", detail=True)]

    def is_ready(self, replica: Replica, message: Ready, now: float) -> list[Action]:
        replica.last_seen = now
        if replica.state is not ReplicaState.LOADING:
            return []
        replica.state = ReplicaState.READY
        replica.info = message.info
        replica.note = f"ready after {message.load_s:.1f} s"
        info = message.info
        size = f", {info.parameters / 1e6:,.1f} M parameters" if info.parameters else ""
        model = f" ({info.model}, {info.dtype} on {info.device}{size})" if info.model else ""
        return [MembershipChanged(f"stage {replica.label} {replica.note}{model}")]

    def info_changed(self, replica: Replica, message: InfoChanged) -> list[Action]:
        """After a call: what it offers now."""
        before, replica.info = replica.info, message.info
        changes = []
        if before is None or before.asleep != message.info.asleep:
            changes.append("is asleep" if message.info.asleep else "is awake")
        had, has = set(before.loras if before is not None else ()), set(message.info.loras)
        changes += [f"has adapter {name}" for name in sorted(has - had)]
        changes += [f"has no adapter {name} any more" for name in sorted(had - has)]
        return [MembershipChanged(f"stage {replica.label} {', '.join(changes) or 'offers what it did'}")]

    def heartbeat(self, replica: Replica, beat: Heartbeat, now: float) -> list[Action]:
        replica.last_seen = now
        replica.beat = beat
        actions: list[Action] = [SendControl(replica.control, BeatAck(epoch=replica.epoch))]
        if replica.state is ReplicaState.SUSPECT:
            replica.state = ReplicaState.READY
            actions.append(MembershipChanged(f"stage {replica.label} answers again"))
        return actions

    def leaving(self, replica: Replica, _message: Leaving, now: float) -> list[Action]:
        replica.last_seen = now
        replica.state = ReplicaState.DRAINING
        replica.note = "finishing its requests before it leaves"
        return [MembershipChanged(f"stage {replica.label} leaves after finishing {replica.in_flight} requests")]

    def unknown_session(self, peer: Peer) -> list[Action]:
        """Somebody who believes to be a member is not: a worker of a master that was here before. It must say Hello."""
        return [SendControl(peer, Refuse(code="session", reason="this master does not know your session", retry=True))]

    # --- leaving ------------------------------------------------------------------------------------------------------

    def goodbye(self, replica: Replica, message: Goodbye) -> ReplicaLeft:
        return self.drop(replica, message.reason or "left")

    def load_failed(self, replica: Replica, message: LoadFailed) -> ReplicaLeft:
        return self.drop(replica, f"could not load: {message.error}")

    def gone(self, peer: Peer) -> Replica | None:
        """The replica that one of its connections was found gone of."""
        return self._by_control.get(peer) or self._by_data.get(peer)

    def exited(self, stage: StageName, pid: int, host: str | None = None) -> Replica | None:
        """The replica that a process of this machine was, if it had joined."""
        here = host or socket.gethostname()
        return next((r for r in self.slots[stage].values() if r.pid == pid and r.host == here), None)

    def drop(self, replica: Replica, reason: str) -> ReplicaLeft:
        """Free the slot. From here on nothing that names this epoch is heard."""
        self.slots[replica.stage].pop(replica.index, None)
        self._by_control.pop(replica.control, None)
        self._by_session.pop(replica.session, None)
        if replica.data is not None:
            self._by_data.pop(replica.data, None)
        return ReplicaLeft(replica, reason)

    # --- time ---------------------------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """When `tick` should next be called, if nothing else happens."""
        return min((self._next_limit(r) for r in self.replicas()), default=None)

    def _next_limit(self, replica: Replica) -> float:
        times = self.deploy.master
        if replica.state is ReplicaState.LOADING:
            return min(
                replica.last_progress + times.load_stall, replica.last_seen + max(times.dead_after, LOADING_SILENCE_S)
            )
        if replica.state in (ReplicaState.SUSPECT, ReplicaState.DRAINING):
            return replica.last_seen + times.dead_after  # one that drains gets no new work anyway
        return replica.last_seen + min(times.suspect_after, times.dead_after)

    def tick(self, now: float) -> tuple[list[Action], list[ReplicaLeft]]:
        """Apply the limits on silence. A replica that loads is judged by its progress, not by its total time."""
        actions: list[Action] = []
        left: list[ReplicaLeft] = []
        for replica in list(self.replicas()):
            silent = now - replica.last_seen
            if now < self._next_limit(replica):
                continue
            if replica.state is ReplicaState.LOADING:
                stalled = now - replica.last_progress
                left.append(self.drop(replica, f"load stalled: no progress for {stalled:.0f} s after: {replica.note}"))
            elif now >= replica.last_seen + self.deploy.master.dead_after:
                left.append(self.drop(replica, f"silent for {silent:.1f} s"))
            else:
                replica.state = ReplicaState.SUSPECT
                actions.append(
                    MembershipChanged(f"stage {replica.label} is silent for {silent:.1f} s: no new work for it")
                )
        return actions, left
