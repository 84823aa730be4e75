"""The payload plane's seam: five calls between a stage and however tensors travel.

    source:    publish -> (describe) -> release            consumer:    pull -> ack | nack

A payload is a transaction under a lease: the source keeps the tensors until it is told that nobody needs them, or until
the lease expires; the consumer gives up at its deadline. What a stage does is the same for every backend, so shared memory
and direct TCP can come behind these calls without any stage noticing.
"""

from collections.abc import Mapping
from typing import Protocol

from proto.ids import LeaseId, RequestId
from proto.messages import Payload
from proto.tensors import WireTensor
from stages.engine import OutgoingPayload


class PayloadBackend(Protocol):
    async def publish(self, payload: OutgoingPayload) -> Payload:
        """Keep the tensors under a new lease. The descriptor says what they are, and where."""
        ...

    def describe(self, lease: LeaseId) -> Payload | None:
        """The descriptor of a lease that still stands."""
        ...

    async def pull(
        self, request: RequestId, name: str, payload: Payload, deadline_s: float
    ) -> Mapping[str, WireTensor]:
        """Fetch and verify a payload for input `name` of a request, and acknowledge it (or not).

        Raises `PayloadLost`, which names the edge, the bytes, and what was missing, at the latest after `deadline_s`.
        """
        ...

    def release(self, lease: LeaseId) -> None:
        """End a lease. Ending one twice, or one that expired, does no harm."""
        ...
