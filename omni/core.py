"""The whole master as one pure state machine: `handle(event, now) -> actions`. No sockets, no clock, no threads, no torch.

It only connects its parts: membership says who is talking, the orchestrator moves requests, leases relay payloads, calls
correlate RPC. Whoever leaves is reported to all of them, in one place (`_left`).
"""

import random
from collections.abc import Callable

from omni.adapters import OWN, Adapters
from omni.balancer import make_balancer
from omni.calls import Calls
from omni.events import (
    Action,
    CallAsked,
    CallDone,
    Cancelled,
    ChildExited,
    ControlReceived,
    DataReceived,
    Event,
    JunkReceived,
    MembershipChanged,
    PeerGone,
    SendControl,
    StopAsked,
    Submitted,
    Tick,
    UpdateAsked,
)
from omni.graph import Graph
from omni.leases import Leases
from omni.membership import Membership, Replica, ReplicaLeft
from omni.orchestrator import Orchestrator
from omni.placement import Placement
from omni.task import Arrival
from proto.deploy import Deploy
from proto.ids import StageName
from proto.messages import (
    Aborted,
    Ack,
    Attach,
    CallReply,
    Chunk,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    InfoChanged,
    Leaving,
    LoadFailed,
    LoadProgress,
    Nack,
    Piece,
    Published,
    Pull,
    PullRefused,
    Ready,
    Result,
    Shutdown,
)


class MasterCore:
    """`new_session` must give unguessable text; `seed` makes balancing reproducible; `now` is the time of the start."""

    def __init__(
        self,
        deploy: Deploy,
        *,
        new_session: Callable[[], str],
        config_hash: Callable[[StageName], str] = lambda _: "",
        data_port: int = 0,
        seed: int | None = None,
        now: float = 0.0,
    ) -> None:
        self.started_at = now
        rng = random.Random(seed)
        self.deploy = deploy
        self.graph = Graph.build(deploy)
        self.members = Membership(
            deploy, {name: self.graph.publishes(name) for name in self.graph.order}, config_hash, new_session, data_port
        )
        self.leases = Leases(self.members)
        balancers = {StageName(n): make_balancer(s.balance, rng) for n, s in deploy.stages.items()}
        self.calls = Calls()
        self.adapters = Adapters()
        placement = Placement(self.members, balancers)
        self.orchestrator = Orchestrator(self.members, self.leases, deploy.limits, placement, self.adapters)
        self.junk = 0

    def handle(self, event: Event, now: float) -> list[Action]:
        """Everything that happens to the master comes through here. `now` is monotonic, in seconds."""
        return self._close_calls(self._handle(event, now), now)

    def _handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, DataReceived):
            return self._data(event, now)
        if isinstance(event, ControlReceived):
            return self._control(event, now)
        if isinstance(event, Submitted):
            return self.orchestrator.submit(event.request, event.plan, now)
        if isinstance(event, Cancelled):
            return self.orchestrator.cancel(event.request, now)
        if isinstance(event, UpdateAsked):
            return self.orchestrator.update(event)
        if isinstance(event, Tick):
            return self._tick(now)
        if isinstance(event, JunkReceived):
            self.junk += 1
            return []
        if isinstance(event, PeerGone):
            return self._left_if(self.members.gone(event.peer), event.reason, now)
        if isinstance(event, ChildExited):
            return self._child_exited(event, now)
        if isinstance(event, CallAsked):
            return self._ask(event, now)
        return self._stop(event, now)

    def _ask(self, event: CallAsked, now: float) -> list[Action]:
        ready = self.members.answering(event.stage) if event.stage in self.deploy.stages else []
        asked = [r for r in ready if event.replicas is None or r.index in event.replicas]
        self.adapters.asked(event, asked)
        return self.calls.ask(event, asked, now)

    def _catch_up(self, replica: Replica, now: float) -> list[Action]:
        return [a for call in self.adapters.for_joiner(replica) for a in self.calls.ask(call, [replica], now)]

    def _close_calls(self, actions: list[Action], now: float) -> list[Action]:
        """Calls that are over are remembered where that matters; the answers to the master's own calls end here."""
        left: list[Action] = []
        for action in actions:
            if isinstance(action, CallDone):
                remembered = self.adapters.done(action.call, succeeded=bool(action.values))
                if remembered is not None:
                    stage, reached = remembered
                    for replica in self.members.answering(stage):
                        left += [] if replica.epoch in reached else self._catch_up(replica, now)
                if action.call >= OWN:
                    left += [
                        MembershipChanged(f"an adapter could not be given to it: {error}")
                        for error in action.errors.values()
                    ]
                    continue
            left.append(action)
        return left

    def deadline(self) -> float | None:
        """When a `Tick` is due, if nothing happens before."""
        times = (self.members.deadline(), self.orchestrator.deadline(), self.calls.deadline())
        return min((t for t in times if t is not None), default=None)

    # --- control lane -------------------------------------------------------------------------------------------------

    def _control(self, event: ControlReceived, now: float) -> list[Action]:
        peer, message = event.peer, event.message
        if isinstance(message, Hello):
            actions = self._left_if(self.members.superseded(message), "its connection broke, and it joins again", now)
            return actions + self.members.hello(peer, message, now)
        replica = self.members.of_control(peer, message.epoch)
        if replica is None:
            return self.members.unknown_session(peer) if isinstance(message, Heartbeat) else []
        replica.last_seen = now
        if isinstance(message, Heartbeat):
            return [*self.members.heartbeat(replica, message, now), *self.orchestrator.dispatch(replica.stage)]
        if isinstance(message, Aborted):
            return self.orchestrator.aborted(replica, message)
        if isinstance(message, CallReply):
            return self.calls.reply(replica, message)
        if isinstance(message, LoadProgress):
            return self.members.loading(replica, message, now)
        if isinstance(message, Ready):
            actions = self.members.is_ready(replica, message, now)
            actions += self._catch_up(replica, now)
            return [*actions, *self.orchestrator.dispatch(replica.stage)]
        if isinstance(message, InfoChanged):
            return [
                *self.members.info_changed(replica, message),
                *self.orchestrator.offering_changed(replica.stage, now),
            ]
        if isinstance(message, LoadFailed):
            # The worker waits for this answer before it exits, so its reason is known before its exit is seen.
            answer = SendControl(peer, Shutdown(reason="the stage could not load"))
            return [answer, *self._left(self.members.load_failed(replica, message), now)]
        if isinstance(message, Leaving):
            return self.members.leaving(replica, message, now)
        assert isinstance(message, Goodbye)
        return self._left(self.members.goodbye(replica, message), now)

    # --- data lane ----------------------------------------------------------------------------------------------------

    def _data(self, event: DataReceived, now: float) -> list[Action]:
        peer, message = event.peer, event.message
        if isinstance(message, Attach):
            broken = self.members.attached_elsewhere(peer, message)
            if (
                broken is not None
            ):  # what was under way is lost; at its next heartbeat it learns that it must join again
                return self._left(self.members.drop(broken, "its data connection broke"), now)
            actions = self.members.attach(peer, message, now)
            replica = self.members.of_data(peer, message.epoch)
            return actions + (self.orchestrator.dispatch(replica.stage) if replica is not None else [])
        replica = self.members.of_data(peer, message.epoch)
        if replica is None:
            return []
        replica.last_seen = now
        if isinstance(message, Chunk | Published | Result | Failed):
            return self.orchestrator.arrived(replica, Arrival(message, event.tensors), now)
        if isinstance(message, Pull):
            if not self.orchestrator.runs(replica, message.request):
                return self.leases.refuse(replica, message.pull, "the request does not run on this replica")
            return self.leases.pull(replica, message)
        if isinstance(message, Piece):
            return self.leases.piece(replica, message, event.tensors)
        if isinstance(message, PullRefused):
            return self.leases.pull_refused(replica, message)
        if isinstance(message, Ack):
            return self.leases.ack(replica, message)
        assert isinstance(message, Nack)
        return self.leases.nack(replica, message)

    # --- leaving ------------------------------------------------------------------------------------------------------

    def _left(self, left: ReplicaLeft, now: float, *, fatal: bool = False) -> list[Action]:
        """A slot was freed: everybody who knows the replica forgets it."""
        replica = left.replica
        fatal = fatal and replica.info is None and not self.members.stopping
        return [
            MembershipChanged(f"stage {replica.label} left: {left.reason}", fatal=fatal),
            *self.leases.replica_left(replica),
            *self.calls.replica_left(replica),
            *self.orchestrator.replica_left(replica, left.reason, now),
        ]

    def _left_if(self, replica: Replica | None, reason: str, now: float) -> list[Action]:
        return self._left(self.members.drop(replica, reason), now) if replica is not None else []

    def _child_exited(self, event: ChildExited, now: float) -> list[Action]:
        how = f"killed by signal {-event.code}" if event.code < 0 else f"exit status {event.code}"
        reason = f"process {event.pid} ended ({how})"
        replica = self.members.exited(event.stage, event.pid)
        actions = self._left_if(replica, reason, now)
        if not event.will_restart and not self.members.stopping:
            line = f"stage {event.stage}/{event.replica}: {reason}"
            actions.append(MembershipChanged(line, fatal=True))
        return actions

    def _tick(self, now: float) -> list[Action]:
        actions, left = self.members.tick(now)
        for one in left:
            actions += self._left(one, now, fatal=True)
        return [*actions, *self.orchestrator.tick(now), *self.calls.tick(now)]

    def _stop(self, event: StopAsked, now: float) -> list[Action]:
        self.members.stopping = True
        actions = self.orchestrator.stop(event.reason, now)
        actions += [SendControl(r.control, Shutdown(reason=event.reason)) for r in self.members.replicas()]
        return actions
