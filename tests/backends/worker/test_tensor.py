"""`Tensor`, DLPack and the conversions of triton_python_backend_utils."""

from __future__ import annotations

import gc
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from npuserve.backends.worker import dlpack, pb_tensor
from npuserve.backends.worker.pb_tensor import Tensor, TritonModelException
from npuserve.backends.worker.wire import CODE_OF

_DTYPES = [t for t in pb_tensor.NUMPY_BY_CODE if t.kind != "O"]
_arrays = hnp.arrays(st.sampled_from(_DTYPES), hnp.array_shapes(min_dims=0, min_side=0))


class _Holder:
    """An object with the DLPack protocol, as a framework's tensor is."""

    def __init__(self, capsule: Any, device: tuple[int, int] = (1, 0)) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, stream: object = None) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


@given(_arrays)
def test_dlpack_keeps_type_shape_and_values(array: np.ndarray[Any, Any]) -> None:
    """Out and in again, as capsule and as object; NumPy can read it too."""
    tensor = Tensor("A", array)
    for source in (tensor.to_dlpack(), tensor, array, _Holder(tensor.to_dlpack())):
        back = Tensor.from_dlpack("B", source)
        assert (back.name(), back.shape(), back.as_numpy().dtype) == (
            "B", list(array.shape), array.dtype,
        )  # fmt: skip
        np.testing.assert_array_equal(back.as_numpy(), array)
    np.testing.assert_array_equal(np.from_dlpack(_Holder(tensor.to_dlpack())), array)


def test_dlpack_shares_memory_and_keeps_it() -> None:
    """No copy is made, and the memory lives as long as the last view of it."""
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    back = Tensor.from_dlpack("B", Tensor("A", array).to_dlpack()).as_numpy()
    assert np.shares_memory(back, array)
    exported = len(dlpack._exported)
    row = back[1]
    del back, array
    gc.collect()
    assert row.tolist() == [3, 4, 5]
    del row
    gc.collect()
    assert len(dlpack._exported) == exported - 1


def test_unused_capsule_is_freed() -> None:
    """A capsule that nobody consumes leaves nothing."""
    exported = len(dlpack._exported)
    capsule = Tensor("A", np.zeros(3)).to_dlpack()
    assert dlpack.is_capsule(capsule)
    del capsule
    assert len(dlpack._exported) == exported


def test_bf16_goes_by_dlpack_only() -> None:
    """BF16 bits cross by capsule; NumPy has no type for them."""
    bits = np.array([0x3F80, 0x4000], np.uint16)
    tensor = Tensor.from_dlpack("A", dlpack.export(bits, "BF16"))
    assert tensor.triton_dtype() == CODE_OF["BF16"]
    with pytest.raises(TritonModelException, match="BF16 and cannot be converted to NumPy"):
        tensor.as_numpy()
    again = Tensor.from_dlpack("B", tensor.to_dlpack())
    assert bytes(again._to_wire()) == bits.tobytes()


class _CardTensor(_Holder):
    """A tensor on a card, as torch_npu has them."""

    dtype = "torch.float32"
    shape = (2,)

    def cpu(self) -> _Holder:
        return _Holder(Tensor("C", np.array([1, 2], np.float32)).to_dlpack())


def test_tensor_on_a_card_is_copied_when_it_leaves() -> None:
    """Tensors of kDLExtDev are kept, are not CPU, and reach the client through the framework."""
    tensor = Tensor.from_dlpack("A", _CardTensor(None, (dlpack.EXT_DEV, 1)))
    assert (tensor.is_cpu(), tensor.shape(), tensor.__dlpack_device__()) == (False, [2], (12, 1))
    with pytest.raises(TritonModelException, match="stored in GPU"):
        tensor.as_numpy()
    assert np.frombuffer(tensor._to_wire(), np.float32).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (object(), "Provided tensor is not supported."),
        (np.zeros((2, 3)).T, "DLPack tensor is not contiguous."),
        (np.arange(4)[::2], "DLPack tensor is not contiguous."),
        (np.array([b"x"], object), "DLPack does not have support for string tensors."),
        (np.array([b"x"]), "DLPack does not have support for string tensors."),
        (np.array(["x"]), "DLPack does not have support for string tensors."),
        (_Holder(None, (4, 0)), "DLDevice type 4 is not support by Python backend."),
    ],
)
def test_what_dlpack_refuses(source: Any, text: str) -> None:
    """Texts are Triton's."""
    with pytest.raises(TritonModelException, match=text):
        Tensor.from_dlpack("A", source)


def test_capsule_is_consumed_once() -> None:
    """A second use is an error, not a crash."""
    capsule = Tensor("A", np.zeros(3)).to_dlpack()
    Tensor.from_dlpack("B", capsule)
    with pytest.raises(TritonModelException, match="not supported"):
        Tensor.from_dlpack("C", capsule)


@pytest.mark.parametrize("array", [np.array(["x"]), np.array([1 + 2j]), np.array(["2026"], "M8")])
def test_unsupported_dtypes(array: np.ndarray[Any, Any]) -> None:
    """str, complex and dates have no Triton type."""
    with pytest.raises(TritonModelException, match=r"NumPy dtype is not supported\."):
        Tensor("A", array)


def test_constructor_makes_arrays_plain() -> None:
    """Other strides, byte order and fixed-size bytes become what travels."""
    assert Tensor("A", np.arange(6).reshape(2, 3).T).as_numpy().flags.c_contiguous
    assert Tensor("A", np.array([1], ">i4")).as_numpy().dtype == np.int32
    assert Tensor("A", np.array([b"ab"])).as_numpy().tolist() == [b"ab"]
    with pytest.raises(TritonModelException, match="cannot be an empty string"):
        Tensor("", np.zeros(1))
    with pytest.raises(TypeError):
        Tensor("A", [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Tensor("", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Tensor(5, np.zeros(1))  # type: ignore[arg-type]
    assert type(Tensor(np.str_("A"), np.zeros(1)).name()) is str


@given(st.lists(st.one_of(st.binary(), st.text(st.characters(exclude_categories=["Cs"])))))
def test_text_round_trip(elements: list[bytes | str]) -> None:
    """deserialize(serialize(x)) gives the bytes; an empty tensor is ()."""
    array = np.empty(len(elements), object)
    array[:] = elements
    wire = pb_tensor.serialize_byte_tensor(array)
    assert (wire == ()) == (not elements)
    expected = [e.encode() if isinstance(e, str) else e for e in elements]
    assert pb_tensor.deserialize_bytes_tensor(wire).tolist() == expected


@pytest.mark.parametrize("cut", [b"\x05\0\0\0ab", b"\x01\0\0\0a\x02\0", b"\x01"])
def test_text_that_is_cut_off(cut: bytes) -> None:
    """Half an element, or half its length, is an error."""
    with pytest.raises(struct.error):
        pb_tensor.deserialize_bytes_tensor(cut)


def test_type_conversions() -> None:
    """Names, numbers and NumPy types map as in Triton."""
    assert pb_tensor.triton_string_to_numpy("TYPE_STRING") is np.object_
    with pytest.raises(KeyError):
        pb_tensor.triton_string_to_numpy("TYPE_BF16")
    assert pb_tensor.triton_to_numpy_type(11) is np.float32
    assert pb_tensor.triton_to_numpy_type(99) is None
    assert pb_tensor.numpy_to_triton_type(np.bytes_) == 13
    for number in range(1, 14):
        numpy_type = pb_tensor.triton_to_numpy_type(number)
        assert pb_tensor.numpy_to_triton_type(numpy_type) == number
        assert pb_tensor.numpy_to_triton_type(np.dtype(numpy_type)) == number
    assert pb_tensor.numpy_to_triton_type("float32") is None
    assert pb_tensor.serialize_byte_tensor(np.zeros(2)) is None
