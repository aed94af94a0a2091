"""Strings in their wire form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.tensor import (
    MANY_STRINGS,
    Tensor,
    deserialize_bytes,
    pack_strings,
)


@given(st.lists(st.binary(max_size=20)), st.binary(max_size=3))
def test_strings_are_counted_up_to_what_is_no_string(elements: list[bytes], rest: bytes) -> None:
    """Whole elements, and the bytes behind them."""
    data = bytes(pack_strings(elements)) + rest
    assert deserialize_bytes(pack_strings(elements)) == elements
    tensor = Tensor("x", "BYTES", [len(elements) + 1], data)
    assert tensor.scan_strings() == (len(elements), len(rest))


@given(st.lists(st.binary(max_size=20), min_size=1))
def test_no_more_are_counted_than_the_shape_has(elements: list[bytes]) -> None:
    """A client cannot have a million strings looked at in a tensor of one."""
    data = pack_strings(elements)
    tensor = Tensor("x", "BYTES", [len(elements) - 1], data)
    assert tensor.scan_strings() == (len(elements) - 1, 4 + len(elements[-1]))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_a_tensor_of_strings_knows_them(count: int) -> None:
    """As if it had been walked through, also if they are not as many as the shape says."""
    elements = [b"a", b"", b"abc", b"d"][:count]
    known = Tensor.from_strings("x", [2, 1], elements, count)
    assert known.data == pack_strings(elements)
    assert known.scan_strings() == Tensor("x", "BYTES", [2, 1], known.data).scan_strings()


def test_only_many_strings_are_long_to_scan() -> None:
    """Neither numbers nor one long text, nor those that were counted."""
    many = pack_strings([b"x"] * (MANY_STRINGS + 1))
    assert Tensor("x", "BYTES", [MANY_STRINGS + 1], many).long_to_scan
    assert not Tensor("x", "BYTES", [1], many).long_to_scan
    assert not Tensor("x", "UINT8", [len(many)], many).long_to_scan
    assert not Tensor("x", "BYTES", [MANY_STRINGS + 1], b"").long_to_scan
    counted = Tensor("x", "BYTES", [MANY_STRINGS + 1], many)
    counted.scan_strings()
    assert not counted.long_to_scan
