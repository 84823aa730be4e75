"""Puts one stage's messages about one request back in order, and drops what came twice. Pure."""

from typing import Final, Generic, TypeVar

from proto.errors import ProtocolError

T = TypeVar("T")

MAX_HELD: Final = 64
"""Messages that may wait for a missing one. More means that it will never come."""


class Sequencer(Generic[T]):
    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, T] = {}

    def push(self, seq: int, item: T) -> list[T]:
        """The items that are now in order, perhaps none. Raises `ProtocolError` when too many wait for a missing one."""
        if seq < self._next or seq in self._held:
            return []
        if seq != self._next:
            if len(self._held) >= MAX_HELD:
                raise ProtocolError(f"message {self._next} is missing and {MAX_HELD} later ones have come")
            self._held[seq] = item
            return []
        ready = [item]
        self._next += 1
        while self._held and self._next in self._held:
            ready.append(self._held.pop(self._next))
            self._next += 1
        return ready

    def give_up(self) -> list[T]:
        """The items that still wait for a missing one, in order. They are forgotten here."""
        held, self._held = self._held, {}
        return [held[seq] for seq in sorted(held)]
