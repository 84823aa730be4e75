"""How a tensor is named in a header and carried in a frame. No torch and no numpy here.

A message that carries tensors lists them in `tensors`; tensor *i* is the *i*-th raw frame behind the header, C-contiguous
and little-endian. Values inside the message refer to a tensor by that index. Adapters: `proto.numpy_tensors` for the
master's side and `proto.torch_tensors` for the stages'.
"""

import enum
import math
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from proto.errors import ProtocolError

Buffer = bytes | bytearray | memoryview


class Dtype(enum.Enum):
    """Element types, named as torch and safetensors name them."""

    BOOL = "bool"
    U8 = "uint8"
    I8 = "int8"
    I16 = "int16"
    I32 = "int32"
    I64 = "int64"
    F8_E4M3 = "float8_e4m3fn"
    F8_E5M2 = "float8_e5m2"
    F16 = "float16"
    BF16 = "bfloat16"
    F32 = "float32"
    F64 = "float64"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    Dtype.BOOL: 1,
    Dtype.U8: 1,
    Dtype.I8: 1,
    Dtype.I16: 2,
    Dtype.I32: 4,
    Dtype.I64: 8,
    Dtype.F8_E4M3: 1,
    Dtype.F8_E5M2: 1,
    Dtype.F16: 2,
    Dtype.BF16: 2,
    Dtype.F32: 4,
    Dtype.F64: 8,
}

MAX_DIMS = 16
MAX_TENSOR_BYTES = 1 << 48
"""More than any machine holds, and small enough that no library's arithmetic on shapes overflows."""

Dim = Annotated[int, Meta(ge=0, le=MAX_TENSOR_BYTES)]


class TensorRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape and element type of one frame. Shape () is a scalar; a dimension of 0 gives an empty frame."""

    dtype: Dtype
    shape: Annotated[tuple[Dim, ...], Meta(max_length=MAX_DIMS)]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self, frame_bytes: int) -> None:
        """Raise `ProtocolError` unless a frame of `frame_bytes` bytes holds exactly this tensor."""
        if len(self.shape) > MAX_DIMS or any(d < 0 for d in self.shape):
            raise ProtocolError(
                f"tensor shape {list(self.shape[: MAX_DIMS + 1])} is not valid: at most {MAX_DIMS} dimensions, none negative"
            )
        if math.prod(d or 1 for d in self.shape) * self.dtype.itemsize > MAX_TENSOR_BYTES:
            raise ProtocolError(f"tensor shape {list(self.shape)} is larger than {MAX_TENSOR_BYTES} bytes")
        if self.nbytes != frame_bytes:
            raise ProtocolError(
                f"a {self.dtype.value} tensor of shape {list(self.shape)} needs {self.nbytes} bytes, its frame has {frame_bytes}"
            )


def check_frame(ref: TensorRef, max_frame_bytes: int) -> None:
    """Raise `ProtocolError` for a tensor that no socket would take: a frame beyond the limit ends the connection."""
    if ref.nbytes > max_frame_bytes:
        raise ProtocolError(
            f"a tensor {list(ref.shape)} of {ref.dtype.value} has {ref.nbytes} bytes;"
            f" limits.max_frame_bytes is {max_frame_bytes}"
        )


class WireTensor(NamedTuple):
    """A tensor that is about to be sent or has just been received: its description and its bytes, not copied."""

    ref: TensorRef
    data: Buffer
