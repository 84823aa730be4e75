"""The payload backend that every pair of stages has: pieces relayed by the master (`via: master`).

The consumer asks for one piece at a time, so what is under way for one pull never exceeds one piece, wherever it waits.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from proto.errors import PayloadLost, ProtocolError
from proto.ids import Epoch, LeaseId, PullId, RequestId, StageName
from proto.messages import MAX_FRAMES, Ack, Nack, Payload, Piece, Pull, PullRefused, Release
from proto.tensors import WireTensor, check_frame
from stages.engine import OutgoingPayload
from stages.payload.store import PayloadStore, checksum

OFF_LOOP_BYTES: Final = 1 << 20
"""Larger payloads are summed in a thread (the library lets go of the GIL), smaller ones at once."""

Send = Callable[[Pull | Piece | PullRefused | Ack | Nack, Sequence[WireTensor]], Awaitable[None]]


@dataclass(slots=True)
class _Pulling:
    request: RequestId
    payload: Payload
    done: asyncio.Future[None]
    got: list[WireTensor] = field(default_factory=list)

    def progress(self) -> str:
        size = sum(tensor.ref.nbytes for tensor in self.got)
        return (
            f"{len(self.got)} of {len(self.payload.items)} tensors, {size} of {self.payload.nbytes} bytes, had arrived"
        )


class MasterRelay:
    """Implements `PayloadBackend`. Messages of the data lane come in through `handle`; `send` puts them out."""

    def __init__(self, stage: StageName, epoch: Epoch, store: PayloadStore, send: Send, max_frame_bytes: int) -> None:
        self._stage = stage
        self._max_frame_bytes = max_frame_bytes
        self._epoch = epoch
        self._store = store
        self._send = send
        self._pulls: dict[PullId, _Pulling] = {}
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None

    # --- source -------------------------------------------------------------------------------------------------------

    async def publish(self, payload: OutgoingPayload) -> Payload:
        """Keep a payload under a lease. Raises `ProtocolError` for one that could never be pulled."""
        if not 1 <= len(payload.tensors) <= MAX_FRAMES:
            raise ProtocolError(f"a payload has 1 to {MAX_FRAMES} tensors, this one {len(payload.tensors)}")
        for tensor in payload.tensors.values():
            check_frame(tensor.ref, self._max_frame_bytes)
        sums = await self._checksums(payload.tensors)
        descriptor = self._store.keep(payload, sums, time.monotonic())
        self._arm()
        return descriptor

    def describe(self, lease: LeaseId) -> Payload | None:
        return self._store.describe(lease)

    def release(self, lease: LeaseId) -> None:
        self._store.release(lease)

    async def handle(self, message: Pull | Piece | PullRefused | Release, tensors: Sequence[WireTensor]) -> None:
        """One message of the data lane that is about payloads."""
        if isinstance(message, Release):
            self.release(message.lease)
        elif isinstance(message, Pull):
            await self._serve(message)
        else:
            pulling = self._pulls.get(message.pull)
            if pulling is None or pulling.done.done():
                return
            if isinstance(message, PullRefused):
                pulling.done.set_exception(PayloadLost(message.reason))
            elif message.first == len(pulling.got):
                await self._took(message.pull, pulling, tensors)

    async def _serve(self, message: Pull) -> None:
        try:
            tensors = self._store.piece(message.lease, message.first)
        except KeyError:
            reason = "its lease has ended (edge.lease), or it never was there"
            await self._send(PullRefused(epoch=self._epoch, pull=message.pull, reason=reason), ())
            return
        refs = tuple(tensor.ref for tensor in tensors)
        piece = Piece(epoch=self._epoch, pull=message.pull, first=message.first, tensors=refs)
        await self._send(piece, tensors)

    def _arm(self) -> None:
        """Expire leases in time, with one timer however many there are."""
        if self._timer is not None:
            return
        at = self._store.deadline()
        if at is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, at - time.monotonic()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._store.expire(time.monotonic())
        self._arm()

    # --- consumer -----------------------------------------------------------------------------------------------------

    async def pull(
        self, request: RequestId, name: str, payload: Payload, deadline_s: float
    ) -> Mapping[str, WireTensor]:
        pull = PullId(f"{self._epoch}.{next(self._numbers)}")
        pulling = _Pulling(request, payload, asyncio.get_running_loop().create_future())
        self._pulls[pull] = pulling
        edge = f"payload {payload.source}.{payload.kind} -> {self._stage}.{name} ({payload.nbytes} bytes)"
        try:
            async with asyncio.timeout(deadline_s):
                await self._ask(pull, pulling)
                await pulling.done
                await self._verify(pulling)
        except TimeoutError:
            reason = f"not there after {deadline_s:g} s (edge.deadline): {pulling.progress()}"
            raise await self._lost(pull, edge, reason) from None
        except PayloadLost as error:
            raise await self._lost(pull, edge, str(error)) from None
        finally:
            del self._pulls[pull]
        await self._send(Ack(epoch=self._epoch, pull=pull), ())
        return {item.name: tensor for item, tensor in zip(payload.items, pulling.got, strict=True)}

    async def _ask(self, pull: PullId, pulling: _Pulling) -> None:
        payload = pulling.payload
        message = Pull(
            epoch=self._epoch,
            pull=pull,
            request=pulling.request,
            lease=payload.lease,
            source=payload.source,
            replica=payload.replica,
            source_epoch=payload.epoch,
            first=len(pulling.got),
        )
        await self._send(message, ())

    async def _took(self, pull: PullId, pulling: _Pulling, tensors: Sequence[WireTensor]) -> None:
        expected = pulling.payload.items[len(pulling.got) : len(pulling.got) + len(tensors)]
        if not tensors or [item.ref for item in expected] != [tensor.ref for tensor in tensors]:
            pulling.done.set_exception(PayloadLost(f"a piece does not match its description: {pulling.progress()}"))
            return
        pulling.got += tensors
        if len(pulling.got) == len(pulling.payload.items):
            pulling.done.set_result(None)
        else:
            await self._ask(pull, pulling)

    async def _verify(self, pulling: _Pulling) -> None:
        items = pulling.payload.items
        sums = await self._checksums({item.name: t for item, t in zip(items, pulling.got, strict=True)})
        damaged = [item.name for item in items if sums[item.name] != item.checksum]
        if damaged:
            raise PayloadLost(f"damaged on the way: wrong checksum of {', '.join(damaged)}")

    async def _lost(self, pull: PullId, edge: str, reason: str) -> PayloadLost:
        await self._send(Nack(epoch=self._epoch, pull=pull, reason=reason), ())
        return PayloadLost(f"{edge}: {reason}", stage=self._stage)

    @staticmethod
    async def _checksums(tensors: Mapping[str, WireTensor]) -> dict[str, int]:
        def work() -> dict[str, int]:
            return {name: checksum(tensor) for name, tensor in tensors.items()}

        if sum(tensor.ref.nbytes for tensor in tensors.values()) > OFF_LOOP_BYTES:
            return await asyncio.to_thread(work)
        return work()
