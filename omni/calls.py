"""RPC to replicas, correlated by number, with a deadline. Pure.

The deadline travels with the call: a replica whose engine does not come to it in time does not run it, and says so. Only a
replica that says nothing, not even that, is given up here, a little later.

Invariant: each call ends in exactly one `CallDone`, in which every replica that was asked stands once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from omni.events import Action, CallAsked, CallDone, SendControl
from omni.membership import Replica
from proto.errors import ErrorInfo
from proto.ids import CallId, Epoch
from proto.messages import Call, CallReply
from proto.params import Json

GRACE_S: Final = 1.0
"""How long after a call's deadline the replicas' own words about it are waited for."""


@dataclass(slots=True)
class Pending:
    deadline: float
    waiting: dict[int, Epoch]
    values: dict[int, Json] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    infos: dict[int, ErrorInfo] = field(default_factory=dict)


@dataclass(slots=True)
class Calls:
    _pending: dict[CallId, Pending] = field(default_factory=dict)

    def ask(self, asked: CallAsked, replicas: Sequence[Replica], now: float) -> list[Action]:
        """Send the call to `replicas`, those of `asked.replicas` that are ready."""
        try:
            actions: list[Action] = [
                SendControl(
                    r.control,
                    Call(
                        epoch=r.epoch,
                        call=asked.call,
                        method=asked.method,
                        args=dict(asked.args),
                        within_s=asked.timeout_s,
                    ),
                )
                for r in replicas
            ]
        except ValueError as error:  # arguments that are not plain data
            return [CallDone(asked.call, {}, {-1: str(error)})]
        pending = Pending(now + asked.timeout_s + GRACE_S, {r.index: r.epoch for r in replicas})
        for index in asked.replicas or ():
            if index not in pending.waiting:
                pending.errors[index] = f"replica {asked.stage}/{index} is not ready"
        if not pending.waiting and not pending.errors:
            pending.errors[-1] = f"stage {asked.stage} has no ready replica"
        self._pending[asked.call] = pending
        return actions + self._finish_if_done(asked.call)

    def reply(self, replica: Replica, message: CallReply) -> list[Action]:
        pending = self._pending.get(message.call)
        if pending is None or pending.waiting.get(replica.index) != replica.epoch:
            return []
        del pending.waiting[replica.index]
        if message.ok:
            pending.values[replica.index] = message.value
        else:
            pending.errors[replica.index] = message.error
            if message.code is not None:
                info = ErrorInfo(message.code, message.error, replica.stage, message.field)
                pending.infos[replica.index] = info
        return self._finish_if_done(message.call)

    def replica_left(self, replica: Replica) -> list[Action]:
        actions: list[Action] = []
        for call, pending in list(self._pending.items()):
            if pending.waiting.get(replica.index) == replica.epoch:
                del pending.waiting[replica.index]
                pending.errors[replica.index] = f"replica {replica.label} went away"
                actions += self._finish_if_done(call)
        return actions

    def deadline(self) -> float | None:
        return min((pending.deadline for pending in self._pending.values()), default=None)

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for call, pending in list(self._pending.items()):
            if pending.deadline <= now:
                pending.errors |= dict.fromkeys(pending.waiting, "no answer before the deadline")
                pending.waiting.clear()
                actions += self._finish_if_done(call)
        return actions

    def _finish_if_done(self, call: CallId) -> list[Action]:
        pending = self._pending[call]
        if pending.waiting:
            return []
        del self._pending[call]
        return [CallDone(call, pending.values, pending.errors, pending.infos)]
