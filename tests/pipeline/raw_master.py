"""A master made of two plain sockets and the wire's own messages, in the test's hands. It answers nothing by itself."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

import zmq

from proto.deploy import LimitsSpec, StageSpec
from proto.framing import CONTROL_DOWN, CONTROL_UP, DATA_DOWN, DATA_UP
from proto.ids import Epoch, RequestId, Session
from proto.messages import (
    Attach,
    Attached,
    ControlDown,
    ControlUp,
    DataDown,
    DataUp,
    Hello,
    Ready,
    Submit,
    Text,
    Value,
    Welcome,
)
from proto.params import Params, SamplingParams
from proto.sockets import endpoint_of, split_endpoint
from proto.tensors import WireTensor

PATIENCE_S: Final = 60.0
EPOCH: Final = Epoch(1)
REQUEST: Final = RequestId("r")

C = TypeVar("C", bound=ControlUp)
D = TypeVar("D", bound=DataUp)


class RawMaster:
    """One worker may join at a time; `heartbeat_s` is what it is told."""

    def __init__(self, heartbeat_s: float = 0.5) -> None:
        self._heartbeat_s = heartbeat_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control, self._data = self._bound(), self._bound()
        self.url = endpoint_of(self._control)

    def _bound(self) -> "zmq.Socket[bytes]":
        sock = self._context.socket(zmq.ROUTER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.bind("tcp://127.0.0.1:*")
        return sock

    def welcome(self, spec: StageSpec) -> None:
        """Take the next worker in, up to its Ready."""
        self.heard(Hello)
        _, port = split_endpoint(endpoint_of(self._data))
        self.tell(
            Welcome(
                session=Session("session"),
                epoch=EPOCH,
                replica=0,
                pipeline="test",
                spec=spec,
                limits=LimitsSpec(),
                publishes=(),
                data_port=port,
                heartbeat_s=self._heartbeat_s,
                config_hash="same",
            )
        )
        self.got(Attach)
        self.send(Attached(epoch=EPOCH))
        self.heard(Ready)

    def submit(
        self,
        prompt: str,
        request: RequestId = REQUEST,
        params: Params | None = None,
        emit: str = "text",
        **inputs: Value,
    ) -> None:
        """Language models' params, if none are given."""
        values: dict[str, Value] = {"prompt": Text(text=prompt), **inputs}
        self.send(Submit(request=request, epoch=EPOCH, inputs=values, params=params or SamplingParams(), emit=(emit,)))

    def tell(self, message: ControlDown) -> None:
        self._control.send_multipart([self._control_peer, *CONTROL_DOWN.encode(message)])

    def send(self, message: DataDown, tensors: Sequence[WireTensor] = ()) -> None:
        self._data.send_multipart([self._data_peer, *DATA_DOWN.encode(message, tensors)])

    def heard(self, kind: type[C]) -> C:
        """The next control message of that kind; others are passed over."""
        while True:
            self._control_peer, *frames = _receive(self._control)
            message, _ = CONTROL_UP.decode(frames)
            if isinstance(message, kind):
                return message

    def got(self, kind: type[D]) -> D:
        """The next data message of that kind; others are passed over. Its tensors are in `tensors`."""
        while True:
            self._data_peer, *frames = _receive(self._data)
            message, self.tensors = DATA_UP.decode(frames)
            if isinstance(message, kind):
                return message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)


def _receive(sock: "zmq.Socket[bytes]") -> list[bytes]:
    deadline = time.monotonic() + PATIENCE_S
    assert sock.poll(int(1000 * (deadline - time.monotonic()))), f"nothing came in {PATIENCE_S:g} s"
    return sock.recv_multipart()
