"""Which adapters a stage should have, so that a replica that joins later gets what the others were told. Pure.

What the deploy names, every replica loads by itself before it is ready. What was loaded or unloaded by a call to all
replicas is remembered here, by name, and said again to a replica that joins without it (or still with it).

Invariant: only the last successful call of a name is remembered, and calls made here answer to nobody.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from omni.events import CallAsked
from omni.membership import Replica
from proto.calls import Method
from proto.ids import CallId, Epoch, StageName
from proto.params import Json

RELOAD_S: Final = 600.0
"""How long a replica that joins may take for an adapter."""

OWN: Final = 1 << 62
"""Calls of the master itself have numbers from here on."""

MAX_REMEMBERED: Final = 4096
"""Names in one stage; the oldest is forgotten first."""


@dataclass(slots=True)
class Adapters:
    _last: dict[StageName, dict[str, tuple[str, Mapping[str, Json]]]] = field(default_factory=dict)
    _asked: dict[CallId, tuple[CallAsked, frozenset[Epoch]]] = field(default_factory=dict)
    _number: int = OWN

    def asked(self, call: CallAsked, replicas: Iterable[Replica]) -> None:
        """A caller has asked `replicas`; what comes of it is told by `done`."""
        to_remember = call.method in (Method.LOAD_LORA, Method.UNLOAD_LORA) and isinstance(call.args.get("name"), str)
        if to_remember and call.replicas is None and call.call < OWN:
            self._asked[call.call] = (call, frozenset(replica.epoch for replica in replicas))

    def done(self, call: CallId, *, succeeded: bool) -> tuple[StageName, frozenset[Epoch]] | None:
        """A call is over; `succeeded` on one replica at least. If it is to be remembered: its stage and whom it reached;
        others have become ready meanwhile, perhaps."""
        asked, reached = self._asked.pop(call, (None, frozenset[Epoch]()))
        if asked is None or not succeeded:
            return None
        names = self._last.setdefault(asked.stage, {})
        name = str(asked.args["name"])
        names.pop(name, None)
        names[name] = (asked.method, dict(asked.args))
        if len(names) > MAX_REMEMBERED:
            del names[next(iter(names))]
        return asked.stage, reached

    def wanted(self, stage: StageName, name: str) -> bool:
        """Whether replicas that lack the adapter will be told to load it."""
        return self._last.get(stage, {}).get(name, ("", {}))[0] == Method.LOAD_LORA

    def for_joiner(self, replica: Replica) -> list[CallAsked]:
        """What a replica that is ready now has missed. Nobody waits for the answers."""
        has = replica.info.loras if replica.info is not None else ()
        calls = []
        for name, (method, args) in self._last.get(replica.stage, {}).items():
            if (method == Method.LOAD_LORA) != (name in has):
                self._number += 1
                number = CallId(self._number)
                calls.append(CallAsked(number, replica.stage, method, args, [replica.index], RELOAD_S))
        return calls
