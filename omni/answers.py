"""What has been heard of each update of one request, for those who wait for it. Belongs to the caller's event loop.

Invariant: each event gets at most one STARTED and exactly one end (`StageUpdated.ends`), also when the request ends first.
"""

import asyncio
from dataclasses import dataclass

from omni.outputs import StageUpdated
from omni.request import UpdateRequest
from proto.errors import InvalidRequest
from proto.ids import EventId, RequestId, StageName
from proto.messages import Updated, UpdateState


@dataclass(slots=True)
class _Asked:
    request: UpdateRequest
    first: asyncio.Future[StageUpdated]  # STARTED, or its end if that came first
    last: asyncio.Future[StageUpdated]


class Answers:
    def __init__(self, request: RequestId) -> None:
        self._request = request
        self._asked: dict[EventId, _Asked] = {}
        self._numbers = 0

    def ask(self, asked: UpdateRequest) -> tuple[EventId, bool]:
        """The update's event, and whether it is new. The same update with the same event is one update.

        Raises `InvalidRequest` for an event that names another one.
        """
        event = asked.event
        if event is None:
            event = self._unused()
        elif event in self._asked:
            if self._asked[event].request != asked:
                text = f"event {event!r} names another update of this request; choose a new name"
                raise InvalidRequest(text, field="event")
            return event, False
        loop = asyncio.get_running_loop()
        self._asked[event] = _Asked(asked, loop.create_future(), loop.create_future())
        return event, True

    def _unused(self) -> EventId:
        while True:
            self._numbers += 1
            event = EventId(f"u{self._numbers}")
            if event not in self._asked:
                return event

    def hear(self, stage: StageName, part: Updated) -> bool:
        """Whether it is news."""
        asked = self._asked.get(part.event)
        if asked is None or asked.last.done():
            return False
        heard = StageUpdated(self._request, stage, part.event, part.state, part.reason, part.step)
        if not heard.ends and asked.first.done():
            return False
        if not asked.first.done():
            asked.first.set_result(heard)
        if heard.ends:
            asked.last.set_result(heard)
        return True

    def forget(self, event: EventId) -> None:
        """It was not asked after all."""
        del self._asked[event]

    async def wait(self, event: EventId, *, started: bool = False) -> StageUpdated:
        """How the update ended; with `started`, what was heard of it first. KeyError for an event that is not known."""
        asked = self._asked[event]
        return await asyncio.shield(asked.first if started else asked.last)

    def open(self) -> list[EventId]:
        """Those that have no end yet, in the order in which they were asked."""
        return [event for event, asked in self._asked.items() if not asked.last.done()]

    def close(self, reason: str) -> None:
        """Nothing more will be heard."""
        for event in self.open():
            self.hear(StageName(""), Updated(event=event, state=UpdateState.REFUSED, reason=reason))
