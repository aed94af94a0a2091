"""The classification extension."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.errors import InvalidArgumentError
from npuserve.protocol.classification import MAX_ELEMENTS, classify
from npuserve.tensor import Tensor, deserialize_bytes


def texts(tensor: Tensor) -> list[str]:
    return [item.decode() for item in deserialize_bytes(tensor.data)]


def test_best_first_with_value_index_and_label() -> None:
    """Floats have six decimals; a class without a label has none."""
    tensor = Tensor.from_numpy("y", np.array([[0.5, 2.0, -1.0, 8.0, 8.5]], np.float32))
    result = classify(tensor, 3, ["ant", "bee", "cat", "dog"], batched=True)
    assert texts(result) == ["8.500000:4", "8.000000:3:dog", "2.000000:1:bee"]
    assert list(result.shape) == [1, 3]


def test_labels_of_any_encoding_come_as_they_are() -> None:
    """A label file need not be UTF-8."""
    gbk = "\u732b".encode("gbk")
    tensor = Tensor.from_numpy("y", np.array([7], np.int32))
    result = classify(tensor, 1, [gbk.decode(errors="surrogateescape")], batched=False)
    assert deserialize_bytes(result.data) == [b"7:0:" + gbk]


def test_every_batch_element_has_its_own_classes() -> None:
    """Rows are ranked apart."""
    tensor = Tensor.from_numpy("y", np.array([[1, 2], [4, 3]], np.int32))
    result = classify(tensor, 1, [], batched=True)
    assert texts(result) == ["2:1", "4:0"]
    assert list(result.shape) == [2, 1]


def test_without_batching_the_whole_tensor_is_one_row() -> None:
    """A wanted count above the number of classes gives all of them."""
    tensor = Tensor.from_numpy("y", np.array([[1, 2], [4, 3]], np.uint8))
    result = classify(tensor, 10, [], batched=False)
    assert texts(result) == ["4:2", "3:3", "2:1", "1:0"]
    assert list(result.shape) == [4]


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=20), st.integers(1, 25))
def test_values_descend_and_equal_ones_keep_their_order(values: list[int], k: int) -> None:
    """The ranking is sorted by value, then by index."""
    result = classify(Tensor.from_numpy("y", np.array(values, np.int64)), k, [], batched=False)
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert texts(result) == [f"{values[i]}:{i}" for i in ranked]


@pytest.mark.parametrize("datatype", ["BOOL", "BYTES", "FP16", "BF16"])
def test_datatypes_without_an_order_are_refused(datatype: str) -> None:
    """The message names the datatype."""
    with pytest.raises(InvalidArgumentError, match=f"unsupported type '{datatype}'"):
        classify(Tensor("y", datatype, [1], b"\0\0"), 1, [], batched=False)


def test_a_huge_output_is_refused() -> None:
    """Every element would become a text."""
    tensor = Tensor.from_numpy("y", np.zeros(MAX_ELEMENTS + 1, np.int8))
    with pytest.raises(InvalidArgumentError, match="too large"):
        classify(tensor, 1, [], batched=False)
