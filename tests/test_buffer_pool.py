"""Reusable shared-memory buffers."""

from __future__ import annotations

import os

import numpy as np

from npuserve.buffer_pool import BufferPool, locate


def test_a_buffer_returns_when_its_last_view_is_gone() -> None:
    """Slices and arrays of a lease keep it; then the same memory is lent again."""
    pool = BufferPool()
    lease = pool.lease(100_000)
    place = locate(lease)
    assert place is not None
    array = np.frombuffer(lease[10:20], np.uint8)
    del lease
    assert pool.leased_bytes == 131_072
    del array
    assert (pool.leased_bytes, pool.idle_bytes) == (0, 131_072)
    again = locate(pool.lease(70_000))
    assert again is not None
    assert again[0] is place[0]


def test_locate_gives_the_offset_in_the_block_and_none_for_other_memory() -> None:
    """A worker finds the bytes at block and offset."""
    lease = BufferPool().lease(100_000)
    place = locate(lease[64:])
    assert place is not None
    assert place[1] == 64
    assert locate(memoryview(b"abc")) is None


def test_more_than_the_limit_is_not_kept() -> None:
    """Idle memory is bounded."""
    pool = BufferPool(max_idle_bytes=1 << 17)
    leases = [pool.lease(1 << 17) for _ in range(3)]
    del leases
    assert pool.idle_bytes == 1 << 17


def test_trim_frees_what_was_not_needed_since_the_last_trim() -> None:
    """Blocks in steady use stay, those of a burst go."""
    pool = BufferPool()
    burst = [pool.lease(1 << 17) for _ in range(4)]
    del burst
    pool.trim()
    assert pool.idle_bytes == 4 << 17
    lease = pool.lease(1 << 17)  # one of them is still needed
    del lease
    pool.trim()
    assert pool.idle_bytes == 1 << 17
    pool.trim()
    assert pool.idle_bytes == 0


def test_no_file_descriptor_is_left_after_close() -> None:
    """A lease that outlives the pool is freed when it comes back."""
    before = len(os.listdir("/proc/self/fd"))
    pool = BufferPool()
    lease = pool.lease(1 << 17)
    idle = pool.lease(1 << 17)
    del idle
    pool.close()
    assert len(os.listdir("/proc/self/fd")) > before
    del lease
    assert len(os.listdir("/proc/self/fd")) == before
