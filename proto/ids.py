"""Names for the identifiers that cross the wire, so that one is never passed where another belongs."""

from typing import NewType

StageName = NewType("StageName", str)
"""A key of `stages` in the deploy."""

RequestId = NewType("RequestId", str)
"""Made by the master, never by a caller. A companion's id is its group's id, a dot and its role."""

Epoch = NewType("Epoch", int)
"""New at every (re)join of a replica. Messages of an older epoch are dropped."""

Session = NewType("Session", str)
"""The secret that `Welcome` handed out: it ties a data connection to a control connection."""

LeaseId = NewType("LeaseId", str)
"""Names one payload that a source stage promised to keep."""

PullId = NewType("PullId", str)
"""Made by the consumer of a payload: one attempt to fetch one lease."""

CallId = NewType("CallId", int)
"""Correlates an RPC with its replies."""
