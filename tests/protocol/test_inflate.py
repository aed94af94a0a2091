"""Compressed data unpack to what they were, and never to more than is allowed."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.protocol.inflate import TooLargeError, inflate
from npuserve.tensor import Buffer

ZLIB = 15
MIB = 1 << 20


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most memory in use at any time during `work`."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300), st.integers(0, 3000), st.integers(0, 9))
def test_all_bytes_come_back(piece: bytes, count: int, level: int) -> None:
    """Whatever the ratio, with the exact size as the limit, and with bytes after the end."""
    plain = piece * count
    assert inflate(zlib.compress(plain, level) + b"after", ZLIB, len(plain)) == plain


@pytest.mark.parametrize("size", [MIB - 1, MIB, MIB + 1, 3 * MIB, 3 * MIB + 1])
def test_the_sizes_of_the_steps_change_nothing(size: int) -> None:
    """Where a step ends exactly with the data, or zlib still holds some of them."""
    plain = bytes(size)
    packed = zlib.compress(plain)
    assert inflate(packed, ZLIB, size) == plain
    with pytest.raises(TooLargeError):
        inflate(packed, ZLIB, size - 1)


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_data_that_are_cut_off_are_damaged(cut: int) -> None:
    """Also when only the check sum is missing."""
    with pytest.raises(zlib.error):
        inflate(zlib.compress(bytes(10 * MIB))[:cut], ZLIB, 20 * MIB)


def test_a_bomb_costs_no_more_than_the_limit() -> None:
    """It is refused as soon as the limit is passed."""
    packed = zlib.compress(bytes(64 * MIB))

    def refused() -> None:
        with pytest.raises(TooLargeError):
            inflate(packed, ZLIB, 8 * MIB)

    assert peak_bytes(refused) < 12 * MIB


def test_what_is_allowed_is_in_memory_once() -> None:
    """However well it was packed."""
    packed = zlib.compress(bytes(64 * MIB))
    kept: list[Buffer] = []
    assert peak_bytes(lambda: kept.append(inflate(packed, ZLIB, 100 * MIB))) < 76 * MIB
    assert len(kept[0]) == 64 * MIB
