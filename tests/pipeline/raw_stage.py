"""A stage made of two plain sockets and the wire's own messages, in the test's hands: it does right or wrong as told.

Every receive waits with a timeout; nothing here answers by itself. It sends heartbeats only when told to, so the deploy's
`suspect_after` must be longer than the test.
"""

import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

import xxhash
import zmq

from proto.framing import CONTROL_DOWN, CONTROL_UP, DATA_DOWN, DATA_UP
from proto.ids import Epoch, LeaseId, PullId, RequestId, StageName
from proto.messages import (
    PROTOCOL,
    Ack,
    Attach,
    Attached,
    ControlDown,
    ControlUp,
    DataDown,
    DataUp,
    Heartbeat,
    Hello,
    Images,
    Payload,
    PayloadTensor,
    Piece,
    Pull,
    PullRefused,
    Ready,
    Result,
    StageInfo,
    Submit,
    Welcome,
)
from proto.sockets import split_endpoint
from proto.tensors import Dtype, TensorRef, WireTensor

C = TypeVar("C", bound=ControlDown)
D = TypeVar("D", bound=DataDown)

PATIENCE_S: Final = 30.0


def tensor(data: bytes) -> WireTensor:
    return WireTensor(TensorRef(Dtype.U8, (len(data),)), data)


BLACK: Final = WireTensor(TensorRef(Dtype.U8, (1, 8, 8, 3)), bytes(192))


class RawPeer:
    """A DEALER socket that sends what it is told and hands over what comes."""

    def __init__(self, url: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control = self.connect(url)

    def connect(self, url: str) -> "zmq.Socket[bytes]":
        sock = self._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 1000)
        sock.connect(url)
        return sock

    def tell(self, message: ControlUp) -> None:
        self.control.send_multipart(CONTROL_UP.encode(message))

    def heard(self, kind: type[C]) -> C:
        """The next control message of that kind; others are passed over."""
        while True:
            message, _ = CONTROL_DOWN.decode(receive(self.control))
            if isinstance(message, kind):
                return message

    def hello(self, stage: str, **more: object) -> Hello:
        fields: dict[str, object] = {
            "protocol": PROTOCOL,
            "build": "test",
            "stage": stage,
            "nonce": os.urandom(8).hex(),
            "host": "test",
            "pid": 0,
        }
        return Hello(**{**fields, **more})  # type: ignore[arg-type]

    def close(self) -> None:
        self._context.destroy(linger=1000)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RawStage(RawPeer):
    """A member: joined, attached, ready."""

    def __init__(self, url: str, stage: str, info: StageInfo) -> None:
        super().__init__(url)
        self.stage = StageName(stage)
        self.tell(self.hello(stage))
        self.welcome = self.heard(Welcome)
        self.epoch: Epoch = self.welcome.epoch
        host, _ = split_endpoint(url)
        self.data = self.connect(f"tcp://{host}:{self.welcome.data_port}")
        self.send(Attach(session=self.welcome.session, epoch=self.epoch))
        self.got(Attached)
        self.tell(Ready(epoch=self.epoch, info=info, load_s=0.0))
        self._seq: dict[RequestId, int] = {}
        self._kept: dict[LeaseId, tuple[WireTensor, ...]] = {}

    def send(self, message: DataUp, tensors: Sequence[WireTensor] = ()) -> None:
        self.data.send_multipart(DATA_UP.encode(message, tensors))

    def got(self, kind: type[D], that: Callable[[D], bool] = lambda _: True) -> D:
        return self.got_with_tensors(kind, that)[0]

    def got_with_tensors(
        self, kind: type[D], that: Callable[[D], bool] = lambda _: True
    ) -> tuple[D, Sequence[WireTensor]]:
        """The next data message of that kind; others are passed over."""
        while True:
            message, tensors = DATA_DOWN.decode(receive(self.data))
            if isinstance(message, kind) and that(message):
                return message, tensors

    def number(self, request: RequestId) -> int:
        self._seq[request] = self._seq.get(request, -1) + 1
        return self._seq[request]

    # --- as a source --------------------------------------------------------------------------------------------------

    def keep(self, kind: str, *tensors: WireTensor, checksums: Sequence[int] = ()) -> Payload:
        """A payload of this stage, with true checksums unless others are given."""
        lease = LeaseId(f"{self.epoch}.{len(self._kept) + 1}")
        sums = checksums or [xxhash.xxh3_64_intdigest(one.data) for one in tensors]
        self._kept[lease] = tensors
        items = tuple(PayloadTensor(f"t{i}", t.ref, s) for i, (t, s) in enumerate(zip(tensors, sums, strict=True)))
        return Payload(
            lease=lease, source=self.stage, replica=self.welcome.replica, epoch=self.epoch, kind=kind, items=items
        )

    def answer(self, pull: Pull, *tensors: WireTensor) -> None:
        """Everything that is kept, or `tensors` instead, as one piece."""
        sent = tensors or self._kept[pull.lease]
        refs = tuple(one.ref for one in sent)
        self.send(Piece(epoch=self.epoch, pull=pull.pull, first=pull.first, tensors=refs), sent)

    def refuse(self, pull: Pull, reason: str) -> None:
        self.send(PullRefused(epoch=self.epoch, pull=pull.pull, reason=reason))

    # --- as a consumer ------------------------------------------------------------------------------------------------

    def pull(self, submit: Submit, payload: Payload) -> dict[str, WireTensor]:
        """All of a payload's tensors, with their checksums verified, acknowledged."""
        got: list[WireTensor] = []
        pull = PullId(f"{self.epoch}.{submit.request}.{payload.lease}")
        while len(got) < len(payload.items):
            self.send(
                Pull(
                    epoch=self.epoch,
                    pull=pull,
                    request=submit.request,
                    lease=payload.lease,
                    source=payload.source,
                    replica=payload.replica,
                    source_epoch=payload.epoch,
                    first=len(got),
                )
            )
            got += self.got_with_tensors(Piece)[1]
        assert [xxhash.xxh3_64_intdigest(one.data) for one in got] == [item.checksum for item in payload.items]
        self.send(Ack(epoch=self.epoch, pull=pull))
        return {item.name: one for item, one in zip(payload.items, got, strict=True)}

    def finish(self, submit: Submit) -> None:
        """An empty picture."""
        self.send(
            Result(
                request=submit.request,
                epoch=self.epoch,
                seq=self.number(submit.request),
                outputs={"image": Images(tensor=0)},
                tensors=(BLACK.ref,),
            ),
            (BLACK,),
        )

    # --- as either ----------------------------------------------------------------------------------------------------

    def beat(self, leases: int = 0, lease_bytes: int = 0) -> None:
        self.tell(Heartbeat(epoch=self.epoch, steps=1, queued=0, running=0, leases=leases, lease_bytes=lease_bytes))

    def submitted(self) -> Submit:
        return self.got(Submit)


def receive(sock: "zmq.Socket[bytes]") -> list[bytes]:
    deadline = time.monotonic() + PATIENCE_S
    assert sock.poll(int(1000 * (deadline - time.monotonic()))), f"nothing came in {PATIENCE_S:g} s"
    return sock.recv_multipart()
