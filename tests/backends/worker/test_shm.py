"""Memory lent across a worker's channel: two links in one process, as if they were two."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from npuserve.backends.worker.shm import SharedMemoryLink
from npuserve.buffer_pool import BufferPool


class _Pair:
    """Two ends, and the messages between them."""

    def __init__(self) -> None:
        self.pool = BufferPool()
        self.owner = SharedMemoryLink(self.pool)
        self.peer = SharedMemoryLink(BufferPool())

    def exchange(self) -> int:
        """One message each way; gives the number of descriptors that crossed."""
        count = 0
        for sender, receiver in ((self.owner, self.peer), (self.peer, self.owner)):
            memory, fds = sender.take_memory()
            if memory is not None:
                receiver.accept_memory(memory, [os.dup(fd) for fd in fds])
            count += len(fds)
        return count


@pytest.fixture
def pair() -> _Pair:
    return _Pair()


def test_lent_bytes_are_seen_without_a_copy(pair: _Pair) -> None:
    """The peer reads what is in the owner's block, and its writes are the owner's."""
    lease = pair.pool.lease(1000)
    lease[:5] = b"hello"
    reference = pair.owner.lend(lease[:5])
    pair.exchange()
    view = pair.peer.borrow(reference)
    assert bytes(view) == b"hello"
    view[0] = ord("j")
    assert bytes(lease[:5]) == b"jello"


def test_ordinary_memory_is_copied_into_a_block(pair: _Pair) -> None:
    """Arrays and bytes outside the pool are lent as a copy."""
    array = np.arange(4, dtype=np.float32)
    reference = pair.owner.lend(array)
    pair.exchange()
    assert np.frombuffer(pair.peer.borrow(reference), np.float32).tolist() == [0, 1, 2, 3]


def test_copy_on_demand_protects_the_original(pair: _Pair) -> None:
    """With copy=True the peer's writes stay its own."""
    lease = pair.pool.lease(4)
    lease[:] = b"abcd"
    reference = pair.owner.lend(lease, copy=True)
    pair.exchange()
    pair.peer.borrow(reference)[0] = 0
    assert bytes(lease) == b"abcd"


def test_lease_ends_with_the_last_view_of_the_peer(pair: _Pair) -> None:
    """The block is the owner's again once no view is left, however it was made."""
    reference = pair.owner.lend(b"x" * 100)
    pair.exchange()
    array = np.frombuffer(pair.peer.borrow(reference), np.uint8)
    part = array[10:20].view(np.uint16)
    del array
    gc.collect()
    pair.exchange()
    assert pair.owner.lent_count == 1
    del part
    pair.exchange()
    assert (pair.owner.lent_count, pair.pool.leased_bytes) == (0, 0)


def test_descriptor_crosses_once(pair: _Pair) -> None:
    """A block that is lent again is known to the peer."""
    lease = pair.pool.lease(100)
    first = pair.owner.lend(lease)
    assert pair.exchange() == 1
    second = pair.owner.lend(lease[50:])
    assert pair.exchange() == 0
    assert bytes(pair.peer.borrow(first)[50:]) == bytes(pair.peer.borrow(second))


def test_peer_unmaps_what_the_pool_dropped() -> None:
    """A block that its pool gives back to the system is forgotten by the peer."""
    pair = _Pair()
    pair.pool = BufferPool(max_idle_bytes=0)
    pair.owner = SharedMemoryLink(pair.pool)
    reference = pair.owner.lend(b"x" * 100)
    pair.exchange()
    view = pair.peer.borrow(reference)
    assert view[0] == ord("x")
    del view
    pair.exchange()
    pair.exchange()
    assert not pair.peer._maps


def test_close_takes_everything_back(pair: _Pair) -> None:
    """After the peer died all leases are the pool's, and late ends of views do no harm."""
    reference = pair.owner.lend(b"x" * 100)
    pair.exchange()
    view = pair.peer.borrow(reference)
    pair.owner.close()
    pair.peer.close()
    del view
    assert pair.pool.leased_bytes == 0
