"""numpy arrays to and from wire tensors, without copies where the layout allows it."""

import numpy as np
from numpy.typing import NDArray

from proto.errors import ProtocolError
from proto.tensors import Dtype, TensorRef, WireTensor


def to_wire(array: NDArray[np.generic]) -> WireTensor:
    """Describe a numpy array of any shape. A non-contiguous array is copied once, a contiguous one not at all."""
    try:
        dtype = Dtype(array.dtype.name)
    except ValueError:
        raise ProtocolError(f"numpy dtype {array.dtype.name!r} has no wire type") from None
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)  # the name says nothing of the byte order
    shape = array.shape  # before ascontiguousarray, which turns a scalar into one dimension
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return WireTensor(TensorRef(dtype, shape), flat.data)


def from_wire(tensor: WireTensor) -> NDArray[np.generic]:
    """A read-only view of the frame. bfloat16 becomes float32 in new memory (numpy has no bfloat16); float8 is refused."""
    ref, data = tensor
    ref.check(memoryview(data).nbytes)
    if ref.dtype is Dtype.BF16:
        halves = np.frombuffer(data, dtype="<u2").astype(np.uint32)
        return (halves << 16).view(np.float32).reshape(ref.shape)
    if ref.dtype in (Dtype.F8_E4M3, Dtype.F8_E5M2):
        raise ProtocolError(f"numpy cannot hold {ref.dtype.value}; receive it with proto.torch_tensors")
    if ref.dtype is Dtype.BOOL and np.frombuffer(data, dtype=np.uint8).max(initial=0) > 1:
        raise ProtocolError("a bool tensor holds bytes other than 0 and 1")
    array = np.frombuffer(data, dtype=np.dtype(ref.dtype.value).newbyteorder("<")).reshape(ref.shape)
    array.flags.writeable = False
    return array
