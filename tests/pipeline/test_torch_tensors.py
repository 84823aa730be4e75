"""torch tensors and wire tensors: what is sent arrives, without a copy where the layout allows it."""

import pytest

torch = pytest.importorskip("torch")

from proto.errors import ProtocolError  # noqa: E402 - after the check that torch is there
from proto.tensors import Dtype, TensorRef, WireTensor  # noqa: E402
from proto.torch_tensors import from_wire, to_wire  # noqa: E402

SHAPES = [(), (1,), (3,), (2, 3), (0,), (0, 3), (3, 0, 2), (1, 1, 1, 1), (2, 3, 4, 5)]


def filled(shape: tuple[int, ...], dtype: Dtype) -> "torch.Tensor":
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 50).to(torch.float32).to(getattr(torch, dtype.value)).reshape(shape)


def raw(tensor: "torch.Tensor") -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def there_and_back(tensor: "torch.Tensor") -> "torch.Tensor":
    ref, data = to_wire(tensor)
    return from_wire(WireTensor(ref, bytes(data)))


@pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.value)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_and_dtype_survives_bit_for_bit(shape: tuple[int, ...], dtype: Dtype) -> None:
    tensor = filled(shape, dtype)
    sent = to_wire(tensor)
    assert sent.ref == TensorRef(dtype, shape)
    assert bytes(sent.data) == raw(tensor)
    back = from_wire(WireTensor(sent.ref, bytes(sent.data)))
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert raw(back) == raw(tensor)


def test_item_sizes_are_those_of_torch() -> None:
    assert {d: d.itemsize for d in Dtype} == {d: getattr(torch, d.value).itemsize for d in Dtype}


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.F16, Dtype.F8_E4M3, Dtype.F8_E5M2, Dtype.BOOL, Dtype.I64])
def test_layouts_other_than_the_wires_are_put_in_order(dtype: Dtype) -> None:
    tensor = filled((4, 6), dtype)
    for view in (tensor.T, tensor[::2, 1::3], tensor[:, :0], tensor[:1].expand(3, 6), tensor.unsqueeze(0).mT):
        back = there_and_back(view)
        assert back.shape == view.shape
        assert raw(back) == raw(view)


@pytest.mark.parametrize(
    "view", [torch.arange(6.0)[3:4], torch.arange(6.0)[1::5], torch.arange(12.0).view(6, 2)[5:, 1]]
)
def test_one_element_of_a_larger_tensor_survives(view: "torch.Tensor") -> None:
    assert there_and_back(view).equal(view)


def test_lazy_negation_and_gradients_are_resolved() -> None:
    negated = torch.tensor([1 + 2j]).conj().imag
    assert negated.is_neg()
    assert there_and_back(negated).tolist() == [-2.0]
    assert there_and_back(torch.ones(2, requires_grad=True)).tolist() == [1.0, 1.0]


def test_a_contiguous_tensor_is_sent_from_where_it_lies() -> None:
    tensor = torch.zeros(4, 4)
    sent = to_wire(tensor)
    tensor[0, 0] = 1.0
    assert from_wire(sent)[0, 0] == 1.0


def test_a_received_tensor_lies_on_the_frame_and_keeps_it_alive() -> None:
    frame = bytearray(16)
    back = from_wire(WireTensor(TensorRef(Dtype.I32, (4,)), frame))
    frame[0] = 7
    assert back.tolist() == [7, 0, 0, 0]
    with pytest.raises(BufferError):
        frame.clear()


def test_a_frame_at_an_odd_address_is_moved_to_an_even_one() -> None:
    tensor = torch.arange(5, dtype=torch.float64)
    for offset in range(1, 8):
        moved = memoryview(bytes(offset) + raw(tensor))[offset:]
        back = from_wire(WireTensor(TensorRef(Dtype.F64, (5,)), moved))
        assert back.data_ptr() % 8 == 0
        assert back.equal(tensor)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.uint64], ids=str)
def test_a_dtype_without_a_wire_type_is_refused(dtype: "torch.dtype") -> None:
    with pytest.raises(ProtocolError, match="has no wire type"):
        to_wire(torch.zeros(2, dtype=dtype))


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(ProtocolError, match="sparse"):
        to_wire(torch.eye(3).to_sparse())


def test_a_bool_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(ProtocolError, match="bool"):
        from_wire(WireTensor(TensorRef(Dtype.BOOL, (2,)), b"\x01\x02"))


@pytest.mark.parametrize("shape", [(-1,), (1,) * 17, (2**48 + 1,), (0, 2**48, 2)])
def test_an_impossible_shape_is_refused(shape: tuple[int, ...]) -> None:
    for frame in (b"", b"x"):
        with pytest.raises(ProtocolError):
            from_wire(WireTensor(TensorRef(Dtype.U8, shape), frame))


@pytest.mark.parametrize("size", [0, 3, 5])
def test_a_frame_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"needs 4 bytes, its frame has {size}"):
        from_wire(WireTensor(TensorRef(Dtype.BF16, (2,)), bytes(size)))
