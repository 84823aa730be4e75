"""Names for the identifiers that cross the wire, so that one is never passed where another belongs.

The bounds hold for whatever comes off the wire: no peer can make the master keep an endless name or index by a negative number.
"""

from typing import Annotated, NewType

from msgspec import Meta

_Name = Annotated[str, Meta(max_length=256)]
_Number = Annotated[int, Meta(ge=0)]

StageName = NewType("StageName", _Name)
"""A key of `stages` in the deploy."""

RequestId = NewType("RequestId", _Name)
"""Made by the master, never by a caller. A companion's id is its group's id, a dot and its role."""

Epoch = NewType("Epoch", _Number)
"""New at every (re)join of a replica. Messages of an older epoch are dropped."""

Session = NewType("Session", _Name)
"""The secret that `Welcome` handed out: it ties a data connection to a control connection."""

LeaseId = NewType("LeaseId", _Name)
"""Names one payload that a source stage promised to keep."""

PullId = NewType("PullId", _Name)
"""Made by the consumer of a payload: one attempt to fetch one lease."""

CallId = NewType("CallId", _Number)
"""Correlates an RPC with its replies."""

EventId = NewType("EventId", _Name)
"""Names one update of a running request, chosen by its caller or made for it: unique within that request."""
