"""Messages to ZeroMQ multipart frames and back: `[header][tensor 0][tensor 1]...`, the header in msgpack.

Invariant: whatever bytes come in, `decode` returns a whole, checked message or raises `ProtocolError`. It has no side
effects and never copies a tensor. Values inside the message name only tensors that it has. How large one frame may be is
the socket's option (`proto.sockets.tune`): by the time a frame is here, its memory is spent.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from proto.errors import ProtocolError
from proto.messages import (
    MAX_FRAMES,
    Audio,
    Chunk,
    ControlDown,
    ControlUp,
    DataDown,
    DataMessage,
    DataUp,
    Images,
    Partial,
    Preview,
    Published,
    Result,
    Submit,
    Tensor,
    Text,
    Value,
    Video,
)
from proto.tensors import Buffer, WireTensor

MAX_HEADER_BYTES: Final = 16 << 20
MAX_CONTROL_BYTES: Final = 1 << 20

M = TypeVar("M")
D = TypeVar("D", bound=DataMessage)
_encoder = msgspec.msgpack.Encoder()


class Lane(Generic[M]):
    """One direction of the control lane: messages without tensors. Stateless, usable from any thread."""

    def __init__(self, union: object, max_header_bytes: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)
        self._max_header = max_header_bytes

    def encode(self, message: M) -> list[Buffer]:
        """The frames to send. Raises `ProtocolError` if the message is too big or holds what msgpack cannot say."""
        try:
            header = _encoder.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"{type(message).__name__} cannot be sent: {error}") from None
        if len(header) > self._max_header:
            raise ProtocolError(
                f"{type(message).__name__} header has {len(header)} bytes; the limit is {self._max_header}"
            )
        return [header]

    def decode(self, parts: Sequence[Buffer]) -> tuple[M, list[WireTensor]]:
        """A checked message; the list of tensors is empty. Raises `ProtocolError`."""
        if len(parts) != 1:
            raise ProtocolError(f"a control message has one frame, this one has {len(parts)}")
        return self.header(parts[0]), []

    def header(self, header: Buffer) -> M:
        """Decode a header alone, without looking at its frames. Raises `ProtocolError`."""
        if len(header) > self._max_header:
            raise ProtocolError(f"header has {len(header)} bytes; the limit is {self._max_header}")
        try:
            return self._decoder.decode(header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"header is not a message of this lane: {error}") from None


class DataLane(Lane[D]):
    """One direction of the data lane: messages that may have tensors, one frame each."""

    def encode(self, message: D, tensors: Sequence[WireTensor] = ()) -> list[Buffer]:
        """The frames to send. `message.tensors` must describe `tensors`, in order.

        Raises `ProtocolError` if they do not fit each other, are too big, or hold what msgpack cannot say.
        """
        frames = super().encode(message)
        if tensors or message.tensors:
            _check_count(message, len(tensors))
            if any(tensor.ref != ref for tensor, ref in zip(tensors, message.tensors, strict=True)):
                raise ProtocolError(f"{type(message).__name__} describes other tensors than the ones it is sent with")
            frames.extend(tensor.data for tensor in tensors)
        return frames

    def decode(self, parts: Sequence[Buffer]) -> tuple[D, list[WireTensor]]:
        """A checked message and its tensors, over the frames' own memory. Raises `ProtocolError`."""
        frames = len(parts) - 1
        if frames < 0:
            raise ProtocolError("a message has at least one frame, this one has none")
        if frames > MAX_FRAMES:
            raise ProtocolError(f"message has {frames} tensor frames; the limit is {MAX_FRAMES}")
        message = self.header(parts[0])
        if frames or message.tensors:
            _check_count(message, frames)
        highest = _highest_tensor(message)
        if highest >= frames:
            raise ProtocolError(f"{type(message).__name__} names tensor {highest} and has {frames}")
        if not frames:
            return message, []
        tensors = []
        for ref, frame in zip(message.tensors, parts[1:], strict=True):
            ref.check(frame.nbytes if isinstance(frame, memoryview) else len(frame))
            tensors.append(WireTensor(ref, frame))
        return message, tensors


def _check_count(message: DataMessage, frames: int) -> None:
    described = len(message.tensors)
    if described != frames:
        raise ProtocolError(f"{type(message).__name__} describes {described} tensors and has {frames} frames")
    if frames > MAX_FRAMES:
        raise ProtocolError(f"{type(message).__name__} has {frames} tensors; the limit is {MAX_FRAMES}")


_OF_TENSORS: Final = (Tensor, Images, Audio, Video)


def _highest_tensor(message: DataMessage) -> int:
    """The highest index of a tensor that the message's values name; -1 for none. On the path of every message."""
    values: Iterable[Value]
    if isinstance(message, Chunk):
        part = message.part
        if isinstance(part, Preview):
            return part.tensor
        if not isinstance(part, Partial):
            return -1
        values = (part.value,)
    elif isinstance(message, Submit):
        values = message.inputs.values()
    elif isinstance(message, Result):
        values = message.outputs.values()
    elif isinstance(message, Published):
        values = (message.value,)
    else:
        return -1
    highest = -1
    for value in values:
        if not isinstance(value, Text) and isinstance(value, _OF_TENSORS) and value.tensor > highest:
            highest = value.tensor
        if isinstance(value, Images) and value.more:
            highest = max(highest, *value.more)
    return highest


CONTROL_UP: Final[Lane[ControlUp]] = Lane(ControlUp, MAX_CONTROL_BYTES)
CONTROL_DOWN: Final[Lane[ControlDown]] = Lane(ControlDown, MAX_CONTROL_BYTES)
DATA_UP: Final[DataLane[DataUp]] = DataLane(DataUp, MAX_HEADER_BYTES)
DATA_DOWN: Final[DataLane[DataDown]] = DataLane(DataDown, MAX_HEADER_BYTES)


def tensor_at(tensors: Sequence[WireTensor], index: int) -> WireTensor:
    """The tensor that a value names. Raises `ProtocolError` when the message has no such frame."""
    if index >= len(tensors):
        raise ProtocolError(f"a value names tensor {index}, the message has {len(tensors)}")
    return tensors[index]
