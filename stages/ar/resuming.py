"""Requests that are kept when their answer has ended: they rest with their KV, and go on when there is more to read.

    runs -> (its answer has ended) rests -> (an update) waits, runs ... -> (an update closes it, or nobody comes) ends

A turn is answered just as if all that was said so far were the prompt of a request of its own, token for token; only what has
been computed is not computed again. Updates that come while an answer is under way wait for its end.

Invariant: a request that rests is here and not among the engine's sequences; each update gets one `Updated` that ends it
before the request's own end.
"""

import time
from typing import Final

from proto.errors import InvalidRequest, OmniError
from proto.ids import EventId, RequestId
from proto.messages import Change, MoreInput, Paused, Updated, UpdateState
from stages.ar.answers import finished
from stages.ar.sequence import Sequence
from stages.ar.startup import Parts
from stages.engine import Emit, Event

IDLE: Final = "idle"
"""Why a request ended that nobody came back to."""


class Resting:
    """`patience_s`: how long a request rests before it is closed."""

    def __init__(self, parts: Parts, patience_s: float) -> None:
        self._parts = parts
        self._patience_s = patience_s
        self._resting: dict[RequestId, Sequence] = {}

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._resting.values())

    @property
    def has_work(self) -> bool:
        return any(one.turns is not None and one.turns.inbox for one in self._resting.values())

    def wake_s(self) -> float | None:
        """Seconds until one has rested too long."""
        until = min((one.turns.rests_until for one in self._resting.values() if one.turns is not None), default=None)
        return None if until is None else max(0.0, until - time.monotonic())

    def find(self, request: RequestId) -> Sequence | None:
        return self._resting.get(request)

    def ask(self, sequence: Sequence | None, event: EventId, change: Change) -> None:
        """Raises `InvalidRequest` if the request cannot take it."""
        if sequence is None:
            raise InvalidRequest("the request is over")
        if not isinstance(change, MoreInput):
            raise InvalidRequest("this stage generates text; there is no picture to change")
        if sequence.turns is None:
            raise InvalidRequest("the request is not resumable; ask with resumable=true", field="resumable")
        if sequence.turns.closing or any(one.close for _, one in sequence.turns.inbox):
            raise InvalidRequest("the request has been closed: it ends with its present answer")
        sequence.turns.inbox.append((event, change))

    def rest(self, sequence: Sequence) -> list[Event]:
        """A resumable request has ended an answer."""
        assert sequence.turns is not None
        sequence.turns.rests_until = time.monotonic() + self._patience_s
        self._parts.scheduler.rest(sequence.track)
        self._resting[sequence.job.request] = sequence
        part = Paused(finish_reason=sequence.finish_reason or "stop", usage=sequence.usage)
        return [Emit(sequence.job.request, "", part)]

    def wake(self) -> tuple[list[Sequence], list[Event]]:
        """Those that go on from now on, and what is to be told: of them, and of those that end."""
        going: list[Sequence] = []
        events: list[Event] = []
        for sequence in self.sequences:
            assert sequence.turns is not None
            if sequence.turns.inbox:
                if self._goes_on(sequence, events):
                    going.append(sequence)
            elif time.monotonic() >= sequence.turns.rests_until:
                self._end(sequence, IDLE, events)
        return going, events

    def _goes_on(self, sequence: Sequence, events: list[Event]) -> bool:
        turns, request = sequence.turns, sequence.job.request
        assert turns is not None
        event, change = turns.inbox.popleft()
        if change.input is None:
            events.append(_updated(request, event, UpdateState.COMPLETED))
            self._end(sequence, sequence.finish_reason or "stop", events)
            return False
        try:
            following = self._parts.intake.following(sequence, change.input)
            self._resume(sequence, list(following.prompt.ids), following.max_tokens)
        except OmniError as error:
            reason = f"stage {self._parts.stage}: {error.info.message}"
            events.append(_updated(request, event, UpdateState.REFUSED, reason))
            return False
        self._parts.intake.go_on(sequence, following)
        turns.reading, turns.closing = event, change.close
        del self._resting[request]
        events.append(_updated(request, event, UpdateState.STARTED))
        return True

    def _resume(self, sequence: Sequence, ids: list[int], answer: int) -> None:
        track, turns, prompt = sequence.track, sequence.turns, sequence.prompt
        assert turns is not None
        answered = (*turns.answered, *track.tokens[prompt:])
        computed = track.computed
        kept = self._parts.scheduler.resume(track, ids, len(ids) + answer)
        turns.answered = answered
        sequence.prompt = len(ids)
        if kept < computed and not self._parts.runner.paged:
            self._parts.scheduler.start_over(track)  # its cache knows no way back

    def read(self, sequence: Sequence) -> list[Event]:
        """A sequence has read all that it was given."""
        if sequence.turns is None or sequence.turns.reading is None:
            return []
        event, sequence.turns.reading = sequence.turns.reading, None
        return [_updated(sequence.job.request, event, UpdateState.COMPLETED)]

    def forget(self, sequence: Sequence) -> None:
        """It is not wanted any more."""
        self._resting.pop(sequence.job.request, None)
        self._parts.scheduler.remove(sequence.track)
        self._parts.runner.forget(sequence.track)

    def _end(self, sequence: Sequence, reason: str, events: list[Event]) -> None:
        sequence.finish_reason = reason
        events += refused(sequence)
        events.append(finished([sequence]))
        self.forget(sequence)


def refused(sequence: Sequence) -> list[Event]:
    """A resumable request ends: what it has not read will not be read."""
    turns = sequence.turns
    if turns is None:
        return []
    waiting, turns.inbox = turns.inbox, type(turns.inbox)()
    reason = "the request was closed before"
    return [_updated(sequence.job.request, event, UpdateState.REFUSED, reason) for event, _ in waiting]


def _updated(request: RequestId, event: EventId, state: UpdateState, reason: str = "") -> Emit:
    return Emit(request, "", Updated(event=event, state=state, reason=reason[:4096]))
