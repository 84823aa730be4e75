"""Which replica a request's tasks of one stage go to: room first, then affinity, then the stage's balancing policy.

Invariant: what is remembered of affinities is bounded; the one used longest ago is forgotten first.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Final

from omni.balancer import Balancer, Candidate
from omni.membership import Membership, Replica
from proto.ids import StageName

MAX_STICKY: Final = 4096


class Placement:
    def __init__(self, members: Membership, balancers: Mapping[StageName, Balancer]) -> None:
        self._members = members
        self._balancers = balancers
        self._sticky: OrderedDict[tuple[StageName, str], int] = OrderedDict()

    def choose(
        self,
        stage: StageName,
        count: int,
        affinity: str | None,
        lora: str | None = None,
        held: Collection[Replica] = (),
    ) -> Replica | None:
        """A ready replica with room for `count` tasks at once, with the adapter `lora` and none of `held`, or None.
        Requests of one affinity go where the last one went, as long as that replica will do."""
        room = self._members.deploy.stages[stage].max_in_flight - count
        able = [r for r in self._members.ready(stage) if has_lora(r, lora) and r not in held]
        ready = {r.index: r for r in able if r.in_flight <= room}
        if not ready:
            return None
        index = self._sticky.get((stage, affinity)) if affinity is not None else None
        if index not in ready:
            index = self._balancers[stage].choose([Candidate(i, r.in_flight) for i, r in ready.items()])
        if affinity is not None:
            self._remember((stage, affinity), index)
        return ready[index]

    def with_lora(self, stage: StageName, lora: str) -> list[Replica]:
        """The ready replicas that have the adapter, with room or without."""
        return [r for r in self._members.ready(stage) if has_lora(r, lora)]

    def _remember(self, key: tuple[StageName, str], index: int) -> None:
        self._sticky[key] = index
        self._sticky.move_to_end(key)
        if len(self._sticky) > MAX_STICKY:
            self._sticky.popitem(last=False)


def has_lora(replica: Replica, lora: str | None) -> bool:
    """Whether the replica has said that it has the adapter; None is any replica's."""
    return lora is None or (replica.info is not None and lora in replica.info.loras)
