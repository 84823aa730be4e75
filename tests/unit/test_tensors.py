"""numpy arrays and wire tensors: what is sent arrives, without a copy where the layout allows it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from proto.errors import ProtocolError
from proto.numpy_tensors import from_wire, to_wire
from proto.tensors import MAX_DIMS, MAX_TENSOR_BYTES, Dtype, TensorRef, WireTensor
from tests.unit.strategies import tensor_refs

NUMPY_DTYPES = [d for d in Dtype if d not in (Dtype.BF16, Dtype.F8_E4M3, Dtype.F8_E5M2)]
SHAPES = [(), (1,), (3,), (2, 3), (0,), (0, 3), (3, 0, 2), (1, 1, 1, 1), (2,) * MAX_DIMS]


def filled(shape: tuple[int, ...], dtype: Dtype) -> NDArray[np.generic]:
    count = int(np.prod(shape, dtype=np.int64))
    return (np.arange(count) % 100).astype(dtype.value).reshape(shape)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=lambda d: d.value)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_and_dtype_survives(shape: tuple[int, ...], dtype: Dtype) -> None:
    array = filled(shape, dtype)
    sent = to_wire(array)
    assert sent.ref == TensorRef(dtype, shape)
    back = from_wire(WireTensor(sent.ref, bytes(sent.data)))
    assert back.dtype == array.dtype
    assert back.shape == shape
    assert np.array_equal(back, array)


@pytest.mark.parametrize(
    "view",
    [
        filled((4, 6), Dtype.F32).T,
        filled((4, 6), Dtype.I16)[::2, 1::3],
        filled((6,), Dtype.I64)[::-1],
        np.broadcast_to(filled((1, 3), Dtype.U8), (4, 3)),
        np.asfortranarray(filled((3, 4), Dtype.F64)),
        filled((4, 6), Dtype.F32)[:, :0],
        filled((4,), Dtype.I32).astype(">i4"),
        filled((4, 2), Dtype.F64).astype(">f8").T,
    ],
    ids=[
        "transposed",
        "strided",
        "reversed",
        "broadcast",
        "fortran",
        "empty slice",
        "big endian",
        "big endian transposed",
    ],
)
def test_layouts_other_than_the_wires_are_put_in_order(view: NDArray[np.generic]) -> None:
    sent = to_wire(view)
    back = from_wire(WireTensor(sent.ref, bytes(sent.data)))
    assert back.shape == view.shape
    assert np.array_equal(back, view)


def test_a_contiguous_array_is_sent_from_where_it_lies() -> None:
    array = filled((8, 8), Dtype.F32)
    assert np.shares_memory(np.frombuffer(to_wire(array).data, dtype=np.uint8), array)


def test_a_received_array_lies_on_the_frame_and_cannot_be_written() -> None:
    frame = bytearray(range(16))
    back = from_wire(WireTensor(TensorRef(Dtype.I32, (4,)), frame))
    assert np.shares_memory(back, np.frombuffer(frame, dtype=np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 1


def test_a_frame_at_an_odd_address_is_read_right() -> None:
    array = filled((5,), Dtype.F64)
    moved = memoryview(b"\0" + array.tobytes())[1:]
    assert np.array_equal(from_wire(WireTensor(TensorRef(Dtype.F64, (5,)), moved)), array)


def test_bfloat16_is_read_as_float32_of_the_same_value() -> None:
    values = np.array([0.0, -1.5, 3.0e38, np.inf, 2.0**-130], dtype=np.float32)
    halves = (values.view(np.uint32) >> 16).astype("<u2")
    back = from_wire(WireTensor(TensorRef(Dtype.BF16, (5,)), halves.tobytes()))
    assert back.dtype == np.float32
    assert np.array_equal(back, (halves.astype(np.uint32) << 16).view(np.float32))
    assert back[1] == -1.5
    assert from_wire(WireTensor(TensorRef(Dtype.BF16, ()), halves[1:2].tobytes())).item() == -1.5
    assert from_wire(WireTensor(TensorRef(Dtype.BF16, (0, 2)), b"")).shape == (0, 2)


@pytest.mark.parametrize("dtype", [Dtype.F8_E4M3, Dtype.F8_E5M2])
def test_float8_is_refused_by_name(dtype: Dtype) -> None:
    with pytest.raises(ProtocolError, match=dtype.value):
        from_wire(WireTensor(TensorRef(dtype, (2,)), b"ab"))


@pytest.mark.parametrize(
    "array",
    [
        np.array(["text"]),
        np.array([None]),
        np.array([1j]),
        np.array([1], dtype=np.uint64),
        np.zeros(2, dtype="datetime64[s]"),
        np.zeros(2, dtype=[("a", "i4")]),
    ],
    ids=lambda a: a.dtype.name,
)
def test_a_dtype_without_a_wire_type_is_refused(array: NDArray[np.generic]) -> None:
    with pytest.raises(ProtocolError, match="has no wire type"):
        to_wire(array)


def test_a_bool_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(ProtocolError, match="bool"):
        from_wire(WireTensor(TensorRef(Dtype.BOOL, (2,)), b"\x01\x02"))


@pytest.mark.parametrize(
    "shape", [(-1,), (2, -2), (1,) * (MAX_DIMS + 1), (MAX_TENSOR_BYTES + 1,), (0, MAX_TENSOR_BYTES, 2), (1,) * 100_000]
)
def test_an_impossible_shape_is_refused(shape: tuple[int, ...]) -> None:
    ref = TensorRef(Dtype.U8, shape)
    for frame in (b"", b"x"):
        with pytest.raises(ProtocolError) as caught:
            from_wire(WireTensor(ref, frame))
        assert len(str(caught.value)) < 500


@given(ref=tensor_refs(), data=st.data())
def test_any_bytes_of_the_right_length_make_an_array_or_are_refused(ref: TensorRef, data: st.DataObject) -> None:
    frame = data.draw(st.binary(min_size=ref.nbytes, max_size=ref.nbytes))
    try:
        back = from_wire(WireTensor(ref, frame))
    except ProtocolError:
        assert ref.dtype in (Dtype.BOOL, Dtype.F8_E4M3, Dtype.F8_E5M2)
    else:
        assert back.shape == ref.shape


@given(ref=tensor_refs(), frame=st.binary(max_size=40))
def test_a_frame_of_another_length_is_refused(ref: TensorRef, frame: bytes) -> None:
    if len(frame) != ref.nbytes:
        with pytest.raises(ProtocolError, match=f"its frame has {len(frame)}"):
            from_wire(WireTensor(ref, frame))


def test_item_sizes_are_those_of_numpy() -> None:
    assert {d: d.itemsize for d in NUMPY_DTYPES} == {d: np.dtype(d.value).itemsize for d in NUMPY_DTYPES}
    assert (Dtype.BF16.itemsize, Dtype.F8_E4M3.itemsize, Dtype.F8_E5M2.itemsize) == (2, 1, 1)
