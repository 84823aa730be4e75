"""Payloads on their way: who promised which tensors to whom, and whose pieces go through the master. Pure.

A lease is granted when a source stage publishes a payload that at least one task waits for. Each consumer pulls it and
acknowledges; after the last acknowledgement, or when the request is over, the source is told to release it.

Invariant: a stage can pull only what was granted to a task that runs on it, and each lease gets at most one `Release`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from omni.events import Action, SendData
from omni.membership import Membership, Replica
from omni.plan import TaskKey, split_wire_id
from proto.errors import ProtocolError
from proto.ids import Epoch, LeaseId, PullId, RequestId
from proto.messages import Ack, Nack, Payload, Piece, Pull, PullRefused, Release
from proto.tensors import WireTensor


class LeaseKey(NamedTuple):
    """Lease ids are made by their source and are unique within one of its epochs."""

    epoch: Epoch
    lease: LeaseId


class EdgeName(NamedTuple):
    source: str  # "thinker.kv"
    target: str  # "painter.kv"


@dataclass(slots=True)
class Lease:
    """`consumers` are the tasks that have not acknowledged yet, with the edges by which each of them takes it."""

    payload: Payload
    request: RequestId
    consumers: dict[TaskKey, list[EdgeName]]


@dataclass(frozen=True, slots=True)
class Pulling:
    lease: LeaseKey
    source: Replica
    consumer: Replica
    task: TaskKey


@dataclass(slots=True)
class Leases:
    members: Membership
    edge_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    edge_payloads: Counter[tuple[str, str]] = field(default_factory=Counter)
    _leases: dict[LeaseKey, Lease] = field(default_factory=dict)
    _of_request: dict[RequestId, set[LeaseKey]] = field(default_factory=dict)
    _pulls: dict[PullId, Pulling] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def nbytes(self) -> int:
        return sum(lease.payload.nbytes for lease in self._leases.values())

    # --- life of a lease ----------------------------------------------------------------------------------------------

    def check(self, source: Replica, payload: Payload) -> None:
        """Raise `ProtocolError` unless `source` may publish this: a new lease of its own."""
        if not _holds(source, payload):
            whose = f"{payload.source}/{payload.replica}, epoch {payload.epoch}"
            raise ProtocolError(f"stage {source.label} published a payload that is not its own but of {whose}")
        if LeaseKey(payload.epoch, payload.lease) in self._leases:
            raise ProtocolError(f"stage {source.label} published lease {payload.lease} twice")

    def grant(self, request: RequestId, payload: Payload, consumers: Iterable[tuple[TaskKey, EdgeName]]) -> None:
        """Let the tasks pull it. It passed `check`, and `consumers` are not none."""
        key = LeaseKey(payload.epoch, payload.lease)
        lease = self._leases[key] = Lease(payload, request, {})
        for task, edge in consumers:
            lease.consumers.setdefault(task, []).append(edge)
        self._of_request.setdefault(request, set()).add(key)

    def waits(self, payload: Payload, task: TaskKey) -> bool:
        """Whether the payload can still be pulled by `task`."""
        lease = self._leases.get(LeaseKey(payload.epoch, payload.lease))
        return lease is not None and task in lease.consumers

    def unwanted(self, source: Replica, payload: Payload) -> list[Action]:
        """Nobody waits for what `source` published; unless this is a second notice of a payload that is still wanted."""
        if not _holds(source, payload) or LeaseKey(payload.epoch, payload.lease) in self._leases:
            return []
        return self.release(payload)

    def release(self, payload: Payload) -> list[Action]:
        """Tell the source that nobody will pull this (any more)."""
        self._forget(LeaseKey(payload.epoch, payload.lease))
        source = self.members.find(payload.source, payload.replica, payload.epoch)
        if source is None or source.data is None:
            return []
        return [SendData(source.data, Release(epoch=source.epoch, lease=payload.lease))]

    def end_request(self, request: RequestId) -> list[Action]:
        actions: list[Action] = []
        for key in sorted(self._of_request.get(request, ())):
            actions += self.release(self._leases[key].payload)
        return actions

    def _forget(self, key: LeaseKey) -> None:
        lease = self._leases.pop(key, None)
        if lease is None:
            return
        owned = self._of_request[lease.request]
        owned.discard(key)
        if not owned:
            del self._of_request[lease.request]
        for pull in [pull for pull, p in self._pulls.items() if p.lease == key]:
            del self._pulls[pull]

    # --- relaying -----------------------------------------------------------------------------------------------------

    def pull(self, consumer: Replica, message: Pull) -> list[Action]:
        """A consumer asks for a payload, or for its next piece."""
        request, role = split_wire_id(message.request)
        task = TaskKey(consumer.stage, role)
        key = LeaseKey(message.source_epoch, message.lease)
        lease = self._leases.get(key)
        if lease is None or lease.request != request or task not in lease.consumers:
            return self.refuse(consumer, message.pull, "the master knows no such payload for this request")
        known = self._pulls.get(message.pull)
        if known is not None and (known.consumer is not consumer or known.lease != key):
            return self.refuse(consumer, message.pull, "another pull has this number")
        source = self.members.find(lease.payload.source, lease.payload.replica, key.epoch)
        if source is None or source.data is None:
            return self.refuse(consumer, message.pull, f"its source, stage {lease.payload.source}, has left")
        self._pulls[message.pull] = Pulling(key, source, consumer, task)
        return [SendData(source.data, msgspec.structs.replace(message, epoch=source.epoch))]

    def piece(self, source: Replica, message: Piece, tensors: Sequence[WireTensor]) -> list[Action]:
        pulling = self._pulls.get(message.pull)
        if pulling is None or pulling.source is not source or pulling.consumer.data is None:
            return []
        return [
            SendData(pulling.consumer.data, msgspec.structs.replace(message, epoch=pulling.consumer.epoch), tensors),
        ]

    def pull_refused(self, source: Replica, message: PullRefused) -> list[Action]:
        pulling = self._pulls.get(message.pull)
        if pulling is None or pulling.source is not source:
            return []
        del self._pulls[message.pull]
        return self.refuse(pulling.consumer, message.pull, message.reason)

    def ack(self, consumer: Replica, message: Ack) -> list[Action]:
        pulling = self._pulls.get(message.pull)
        if pulling is None or pulling.consumer is not consumer:
            return []
        del self._pulls[message.pull]
        lease = self._leases[pulling.lease]
        edges = lease.consumers.get(pulling.task)
        if edges is not None:
            edge = edges.pop(0)
            self.edge_bytes[edge] += lease.payload.nbytes
            self.edge_payloads[edge] += 1
            if not edges:
                del lease.consumers[pulling.task]
        return self.release(lease.payload) if not lease.consumers else []

    def nack(self, consumer: Replica, message: Nack) -> list[Action]:
        """The consumer gave this attempt up. It says what that means for the request in a message of its own."""
        pulling = self._pulls.get(message.pull)
        if pulling is not None and pulling.consumer is consumer:
            del self._pulls[message.pull]
        return []

    def replica_left(self, replica: Replica) -> list[Action]:
        """Its leases are gone with it; those who were pulling from it are told."""
        actions: list[Action] = []
        for pull, pulling in list(self._pulls.items()):
            if pulling.source is replica:
                del self._pulls[pull]
                actions += self.refuse(pulling.consumer, pull, f"its source, stage {replica.label}, has left")
            elif pulling.consumer is replica:
                del self._pulls[pull]
        for key in [key for key in self._leases if key.epoch == replica.epoch]:
            self._forget(key)
        return actions

    def refuse(self, consumer: Replica, pull: PullId, reason: str) -> list[Action]:
        if consumer.data is None:
            return []
        return [SendData(consumer.data, PullRefused(epoch=consumer.epoch, pull=pull, reason=reason))]


def _holds(source: Replica, payload: Payload) -> bool:
    return (payload.source, payload.replica, payload.epoch) == (source.stage, source.index, source.epoch)
