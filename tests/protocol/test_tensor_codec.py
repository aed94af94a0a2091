"""JSON tensor data to bytes and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.errors import InvalidArgumentError
from npuserve.protocol.tensor_codec import flatten, is_finite, json_values, tensor_from_json
from npuserve.tensor import NUMPY_DTYPE, Tensor

INTEGERS = [name for name in NUMPY_DTYPE if "INT" in name]
nested = st.recursive(st.integers(), lambda inner: st.lists(inner, max_size=4), max_leaves=30)


def leaves(value: Any) -> list[Any]:
    return [x for item in value for x in leaves(item)] if isinstance(value, list) else [value]


@given(st.sampled_from(INTEGERS), st.data())
def test_integers_come_back(datatype: str, data: st.DataObject) -> None:
    """Integers within the range of their datatype survive both ways."""
    limits = np.iinfo(NUMPY_DTYPE[datatype])
    values = data.draw(st.lists(st.integers(int(limits.min), int(limits.max)), min_size=1))
    tensor = tensor_from_json("x", datatype, [len(values)], values)
    assert list(json_values(tensor)) == values


@given(st.sampled_from(INTEGERS), st.booleans())
def test_an_integer_out_of_range_is_refused(datatype: str, above: bool) -> None:
    """One beyond either end names the tensor and the datatype; 32 bits may come as 64."""
    limits = np.iinfo(NUMPY_DTYPE[datatype.replace("32", "64")])
    value = int(limits.max) + 1 if above else int(limits.min) - 1
    with pytest.raises(InvalidArgumentError, match=f"{value} .* out of range for {datatype}"):
        tensor_from_json("x", datatype, [1], [value])


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize(
    ("datatype", "value", "wrapped"),
    [
        ("INT32", 2**31, -(2**31)), ("INT32", -(2**31) - 1, 2**31 - 1), ("INT32", 2**32 - 1, -1),
        ("INT32", 2**40 + 5, 5), ("INT32", 2**63 - 1, -1), ("INT32", -(2**63), 0),
        ("UINT32", 2**32, 0), ("UINT32", 2**40 + 5, 5), ("UINT32", 2**64 - 1, 2**32 - 1),
    ],
)  # fmt: skip
def test_the_low_half_of_64_bits_counts(
    datatype: str, value: int, wrapped: int, as_array: bool
) -> None:
    """What Triton 2.51 answers to these numbers, whether they are in a list or an array."""
    values: Any = [1, value]
    if as_array:
        values = np.array(values, np.int64 if value < 2**63 else np.uint64)
    assert list(json_values(tensor_from_json("x", datatype, [2], values))) == [1, wrapped]


@given(st.lists(st.floats(width=32)))
def test_floats_come_back(values: list[float]) -> None:
    """FP32 values, NaN and infinities included, are exact both ways."""
    tensor = tensor_from_json("x", "FP32", [len(values)], values)
    np.testing.assert_array_equal(np.asarray(json_values(tensor)), np.array(values))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_texts_come_back(values: list[str]) -> None:
    """Texts of any characters survive both ways."""
    tensor = tensor_from_json("x", "BYTES", [len(values)], values)
    assert json_values(tensor) == values


@given(st.lists(nested))
def test_flatten_keeps_the_order_of_leaves(data: list[Any]) -> None:
    """Any nesting gives the leaves in row-major order."""
    assert flatten(data) == leaves(data)


def test_deep_nesting_needs_no_recursion() -> None:
    """Ten thousand levels beside a leaf are flattened."""
    data: list[Any] = [1]
    for _ in range(10_000):
        data = [data, 2]
    assert len(flatten(data)) == 10_001


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("INT32", 1.5), ("INT32", True), ("INT32", "1"), ("INT32", None), ("FP32", True),
        ("FP32", "NaN"), ("BOOL", 1), ("BOOL", "true"), ("BYTES", 5), ("BYTES", None),
        ("BYTES", "\ud800"), ("FP64", 10**400),
    ],
)  # fmt: skip
def test_values_of_another_kind_are_refused(datatype: str, value: Any) -> None:
    """JSON's kinds are not mixed up."""
    with pytest.raises(InvalidArgumentError, match="'x'"):
        tensor_from_json("x", datatype, [1], [value])


@pytest.mark.parametrize("data", [7, "abc", {"a": 1}])
def test_data_must_be_an_array(data: Any) -> None:
    """A bare value is refused."""
    with pytest.raises(InvalidArgumentError, match="non-array as array"):
        tensor_from_json("x", "INT32", [1], data)


@pytest.mark.parametrize("data", [[], [1], [1, 2, 3], [[1, 2], [3]]])
def test_the_number_of_elements_must_match(data: Any) -> None:
    """Too few and too many elements are refused."""
    with pytest.raises(InvalidArgumentError, match="Shape does not match"):
        tensor_from_json("x", "INT32", [2], data)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_16_bit_floats_are_binary_only(datatype: str) -> None:
    """Both directions name the datatype and the binary format."""
    with pytest.raises(InvalidArgumentError, match=f"receiving {datatype} .*binary data format"):
        tensor_from_json("x", datatype, [1], [1.5])
    with pytest.raises(InvalidArgumentError, match=f"sending {datatype} .*binary data format"):
        json_values(Tensor("x", datatype, [1], b"\0\0"))


def test_bytes_that_are_no_text_point_to_the_binary_format() -> None:
    """Invalid UTF-8 never becomes a body that is no JSON."""
    with pytest.raises(InvalidArgumentError, match="binary data format"):
        json_values(Tensor("x", "BYTES", [1], b"\x01\0\0\0\xff"))


def test_fp32_shows_the_digits_of_its_double() -> None:
    """0.1 in single precision is printed as Triton prints it."""
    assert json_values(tensor_from_json("x", "FP32", [1], [0.1]))[0] == 0.10000000149011612


def test_numbers_of_an_array_obey_the_same_rules() -> None:
    """Arrays of parsed numbers are checked like lists."""
    tensor = tensor_from_json("x", "UINT8", [2], np.array([1, 255]))
    assert bytes(tensor.data) == b"\x01\xff"
    with pytest.raises(InvalidArgumentError, match="out of range"):
        tensor_from_json("x", "UINT8", [1], np.array([256]))
    with pytest.raises(InvalidArgumentError, match="non-integer"):
        tensor_from_json("x", "UINT8", [1], np.array([1.0]))


def test_finite_tells_nan_and_infinity() -> None:
    """Only strict JSON's numbers count as finite."""
    assert is_finite(np.array([1.0]))
    assert is_finite(["NaN"])
    assert not is_finite(np.array([1.0, np.nan]))
    assert not is_finite(np.array([np.inf]))
