"""torch tensors to and from wire tensors. The only module of `proto` that imports torch: stages import it, the master never."""

import warnings

import torch

from proto.errors import ProtocolError
from proto.tensors import Dtype, TensorRef, WireTensor


def to_wire(tensor: torch.Tensor) -> WireTensor:
    """Describe a tensor of any shape, stride and device.

    A contiguous CPU tensor is not copied: the caller must not write into it until it has been sent.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        dtype = Dtype(name)
    except ValueError:
        raise ProtocolError(f"torch dtype {name!r} has no wire type") from None
    if tensor.layout is not torch.strided:
        raise ProtocolError(f"a tensor of layout {tensor.layout} cannot be sent; make it dense first")
    ref = TensorRef(dtype, tuple(tensor.shape))
    if tensor.numel() == 0:
        return WireTensor(ref, b"")
    dense = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    flat = dense.as_strided(
        (dense.numel(),), (1,)
    )  # a dimension of 1 is contiguous with any stride, but not for `view`
    return WireTensor(ref, memoryview(flat.view(torch.uint8).numpy()))


def from_wire(tensor: WireTensor) -> torch.Tensor:
    """A CPU tensor over the frame's own memory, not copied where it is aligned. Treat it as read-only."""
    ref, data = tensor
    ref.check(memoryview(data).nbytes)
    dtype = getattr(torch, ref.dtype.value)  # the enum is closed: this never looks up text from the wire
    if ref.nbytes == 0:
        return torch.empty(ref.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the buffer is not writable; that is what we want
        flat = torch.frombuffer(memoryview(data), dtype=torch.uint8)  # the view pins a bytearray's memory
    if ref.dtype is Dtype.BOOL and int(flat.max()) > 1:
        raise ProtocolError("a bool tensor holds bytes other than 0 and 1")
    if flat.data_ptr() % ref.dtype.itemsize:
        flat = flat.clone()  # ZeroMQ hands small frames out of a shared buffer, at any address; kernels want alignment
    return flat.view(dtype).reshape(ref.shape)
