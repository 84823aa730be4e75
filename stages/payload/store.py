"""The payloads that a source keeps, each under its lease. Pure: no sockets, and the clock is an argument.

Invariant: `nbytes` is the sum of what is kept; it returns to zero when every lease was released or has expired.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import xxhash

from proto.ids import Epoch, LeaseId, StageName
from proto.messages import Payload, PayloadTensor
from proto.tensors import WireTensor
from stages.engine import OutgoingPayload

PIECE_BYTES: Final = 32 << 20
"""Items are sent together up to this size. A larger item is a piece of its own."""


def checksum(tensor: WireTensor) -> int:
    """XXH3-64 of a tensor's bytes (https://xxhash.com)."""
    return xxhash.xxh3_64_intdigest(tensor.data)


@dataclass(frozen=True, slots=True)
class Kept:
    descriptor: Payload
    tensors: tuple[WireTensor, ...]
    expires_at: float


class PayloadStore:
    """`max_bytes` bounds one payload; `lease_s` is how long one is kept that nobody releases."""

    def __init__(self, source: StageName, replica: int, epoch: Epoch, lease_s: float) -> None:
        self._source = source
        self._replica = replica
        self._epoch = epoch
        self._lease_s = lease_s
        self._numbers = itertools.count(1)
        self._kept: dict[LeaseId, Kept] = {}
        self.nbytes = 0
        self.expired = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, payload: OutgoingPayload, checksums: Mapping[str, int], now: float) -> Payload:
        """Take a payload in under a new lease."""
        descriptor = Payload(
            lease=LeaseId(f"{self._epoch}.{next(self._numbers)}"),
            source=self._source,
            replica=self._replica,
            epoch=self._epoch,
            kind=payload.kind.value,
            items=tuple(PayloadTensor(name, t.ref, checksums[name]) for name, t in payload.tensors.items()),
            meta=dict(payload.meta),
        )
        self._kept[descriptor.lease] = Kept(descriptor, tuple(payload.tensors.values()), now + self._lease_s)
        self.nbytes += descriptor.nbytes
        return descriptor

    def describe(self, lease: LeaseId) -> Payload | None:
        kept = self._kept.get(lease)
        return kept.descriptor if kept is not None else None

    def piece(self, lease: LeaseId, first: int) -> tuple[WireTensor, ...]:
        """Items from `first` on, as many as one piece holds. Raises KeyError for a lease or an item that is not there."""
        tensors = self._kept[lease].tensors
        if first >= len(tensors):
            raise KeyError(first)
        end, size = first, 0
        while end < len(tensors) and (end == first or size + tensors[end].ref.nbytes <= PIECE_BYTES):
            size += tensors[end].ref.nbytes
            end += 1
        return tensors[first:end]

    def release(self, lease: LeaseId) -> None:
        kept = self._kept.pop(lease, None)
        if kept is not None:
            self.nbytes -= kept.descriptor.nbytes

    def expire(self, now: float) -> list[LeaseId]:
        """End the leases whose time is over."""
        over = [lease for lease, kept in self._kept.items() if kept.expires_at <= now]
        for lease in over:
            self.release(lease)
        self.expired += len(over)
        return over

    def deadline(self) -> float | None:
        """When `expire` has something to do."""
        return min((kept.expires_at for kept in self._kept.values()), default=None)
