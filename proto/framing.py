"""Messages to ZeroMQ multipart frames and back: `[header][tensor 0][tensor 1]...`, the header in msgpack.

Invariant: whatever bytes come in, `decode` returns a whole, checked message or raises `ProtocolError`. It has no side
effects and never copies a tensor. Values inside the message name only tensors that it has. How large one frame may be is
the socket's option (`proto.sockets.tune`): by the time a frame is here, its memory is spent.
"""

from collections.abc import Iterator, Sequence
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
    Preview,
    Published,
    Result,
    Submit,
    Tensor,
    Video,
)
from proto.tensors import Buffer, TensorRef, WireTensor

MAX_HEADER_BYTES: Final = 16 << 20
MAX_CONTROL_BYTES: Final = 1 << 20

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


class Lane(Generic[M]):
    """One direction of one lane: encodes and decodes the messages of its union. Stateless, usable from any thread."""

    def __init__(self, union: object, max_header_bytes: int, max_frames: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)
        self._max_header = max_header_bytes
        self._max_frames = max_frames

    def encode(self, message: M, tensors: Sequence[WireTensor] = ()) -> list[Buffer]:
        """The frames to send. `message.tensors` must describe `tensors`, in order.

        Raises `ProtocolError` if they do not fit each other, are too big, or hold what msgpack cannot say.
        """
        try:
            header = _encoder.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"{type(message).__name__} cannot be sent: {error}") from None
        if len(header) > self._max_header:
            raise ProtocolError(
                f"{type(message).__name__} header has {len(header)} bytes; the limit is {self._max_header}"
            )
        refs = _refs(message)
        if not tensors and not refs:
            return [header]
        self._check_count(message, refs, len(tensors))
        if any(tensor.ref != ref for tensor, ref in zip(tensors, refs, strict=True)):
            raise ProtocolError(f"{type(message).__name__} describes other tensors than the ones it is sent with")
        return [header, *(tensor.data for tensor in tensors)]

    def header(self, header: Buffer) -> M:
        """Decode a header alone, without looking at its frames. Raises `ProtocolError`."""
        if len(header) > self._max_header:
            raise ProtocolError(f"header has {len(header)} bytes; the limit is {self._max_header}")
        try:
            return self._decoder.decode(header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"header is not a message of this lane: {error}") from None

    def decode(self, parts: Sequence[Buffer]) -> tuple[M, list[WireTensor]]:
        """A checked message and its tensors, over the frames' own memory. Raises `ProtocolError`."""
        if not parts:
            raise ProtocolError("message has no frames")
        frames = len(parts) - 1
        if frames > self._max_frames:
            raise ProtocolError(f"message has {frames} tensor frames; the limit of this lane is {self._max_frames}")
        message = self.header(parts[0])
        refs = _refs(message)
        self._check_count(message, refs, frames)
        for index in _named_tensors(message):
            if index >= frames:
                raise ProtocolError(f"{type(message).__name__} names tensor {index} and has {frames}")
        tensors = []
        for ref, frame in zip(refs, parts[1:], strict=True):
            ref.check(frame.nbytes if isinstance(frame, memoryview) else len(frame))
            tensors.append(WireTensor(ref, frame))
        return message, tensors

    def _check_count(self, message: M, refs: Sequence[TensorRef], frames: int) -> None:
        if len(refs) != frames:
            raise ProtocolError(f"{type(message).__name__} describes {len(refs)} tensors and has {frames} frames")
        if frames > self._max_frames:
            raise ProtocolError(f"{type(message).__name__} has {frames} tensors; the limit is {self._max_frames}")


def _refs(message: object) -> Sequence[TensorRef]:
    """What a message says of its frames; the control lane's messages have none."""
    return message.tensors if isinstance(message, DataMessage) else ()


def _named_tensors(message: object) -> Iterator[int]:
    """The indexes of tensors that a message's values name."""
    match message:
        case Chunk(part=Preview(tensor=index)):
            yield index
        case Submit(inputs=values) | Result(outputs=values):
            for value in values.values():
                if isinstance(value, _TENSOR_VALUES):
                    yield value.tensor
        case Published(value=value) if isinstance(value, _TENSOR_VALUES):
            yield value.tensor


_TENSOR_VALUES = (Tensor, Images, Audio, Video)

CONTROL_UP: Final[Lane[ControlUp]] = Lane(ControlUp, MAX_CONTROL_BYTES, 0)
CONTROL_DOWN: Final[Lane[ControlDown]] = Lane(ControlDown, MAX_CONTROL_BYTES, 0)
DATA_UP: Final[Lane[DataUp]] = Lane(DataUp, MAX_HEADER_BYTES, MAX_FRAMES)
DATA_DOWN: Final[Lane[DataDown]] = Lane(DataDown, MAX_HEADER_BYTES, MAX_FRAMES)


def tensor_at(tensors: Sequence[WireTensor], index: int) -> WireTensor:
    """The tensor that a value names. Raises `ProtocolError` when the message has no such frame."""
    if index >= len(tensors):
        raise ProtocolError(f"a value names tensor {index}, the message has {len(tensors)}")
    return tensors[index]
