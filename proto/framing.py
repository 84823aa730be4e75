"""Messages to ZeroMQ multipart frames and back: `[header][tensor 0][tensor 1]...`, the header in msgpack.

Invariant: whatever bytes come in, `decode` returns a whole, checked message or raises `ProtocolError`. It has no side
effects and never copies a tensor.
"""

from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import msgspec

from proto.errors import ProtocolError
from proto.messages import ControlDown, ControlUp, DataDown, DataUp
from proto.tensors import Buffer, WireTensor

MAX_HEADER_BYTES: Final = 16 << 20
MAX_CONTROL_BYTES: Final = 1 << 20
MAX_FRAMES: Final = 4096

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


class Lane(Generic[M]):
    """One direction of one lane: encodes and decodes the messages of its union. Stateless, usable from any thread."""

    def __init__(self, union: object, max_header_bytes: int, max_frames: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)
        self._max_header = max_header_bytes
        self._max_frames = max_frames

    def encode(self, message: M, tensors: Sequence[WireTensor] = ()) -> list[Buffer]:
        """The frames to send. `message.tensors` must describe `tensors`, in order. Raises `ProtocolError` if too big."""
        header = _encoder.encode(message)
        if len(header) > self._max_header:
            raise ProtocolError(
                f"{type(message).__name__} header has {len(header)} bytes; the limit is {self._max_header}"
            )
        if not tensors:
            return [header]
        if len(tensors) > self._max_frames:
            raise ProtocolError(f"{type(message).__name__} has {len(tensors)} tensors; the limit is {self._max_frames}")
        return [header, *(tensor.data for tensor in tensors)]

    def header(self, header: Buffer) -> M:
        """Decode a header alone, without looking at its frames."""
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
        message = self.header(parts[0])
        refs = getattr(message, "tensors", ())  # control messages have none
        if len(refs) != len(parts) - 1:
            raise ProtocolError(
                f"{type(message).__name__} describes {len(refs)} tensors and has {len(parts) - 1} frames"
            )
        if not refs:
            return message, []
        if len(refs) > self._max_frames:
            raise ProtocolError(f"{type(message).__name__} has {len(refs)} tensors; the limit is {self._max_frames}")
        tensors = []
        for ref, frame in zip(refs, parts[1:], strict=True):
            ref.check(frame.nbytes if isinstance(frame, memoryview) else len(frame))
            tensors.append(WireTensor(ref, frame))
        return message, tensors


CONTROL_UP: Final[Lane[ControlUp]] = Lane(ControlUp, MAX_CONTROL_BYTES, 0)
CONTROL_DOWN: Final[Lane[ControlDown]] = Lane(ControlDown, MAX_CONTROL_BYTES, 0)
DATA_UP: Final[Lane[DataUp]] = Lane(DataUp, MAX_HEADER_BYTES, MAX_FRAMES)
DATA_DOWN: Final[Lane[DataDown]] = Lane(DataDown, MAX_HEADER_BYTES, MAX_FRAMES)


def tensor_at(tensors: Sequence[WireTensor], index: int) -> WireTensor:
    """The tensor that a value names. Raises `ProtocolError` when the message has no such frame."""
    if index >= len(tensors):
        raise ProtocolError(f"a value names tensor {index}, the message has {len(tensors)}")
    return tensors[index]
