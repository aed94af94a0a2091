"""Memory that one worker lent is lent on to another one as it is."""

from __future__ import annotations

import gc
import os

import numpy as np

from npuserve.backends.worker.shm import SharedMemoryLink
from npuserve.buffer_pool import BufferPool


class _Workers:
    """Worker a, the server's links to a and b, and worker b; in one process."""

    def __init__(self) -> None:
        self.pool = BufferPool()  # of the server
        self.pool_of_a = BufferPool()
        self.a = SharedMemoryLink(self.pool_of_a)
        self.to_a = SharedMemoryLink(self.pool, relays=True)
        self.to_b = SharedMemoryLink(self.pool, relays=True)
        self.b = SharedMemoryLink(BufferPool())

    def exchange(self) -> None:
        """One message each way on both channels."""
        for left, right in ((self.a, self.to_a), (self.to_b, self.b)):
            for sender, receiver in ((left, right), (right, left)):
                memory, fds = sender.take_memory()
                if memory is not None:
                    receiver.accept_memory(memory, [os.dup(fd) for fd in fds])

    def through(self, array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> memoryview:
        """What b sees of an output of a."""
        reference = self.a.lend(array)
        self.exchange()
        onwards = self.to_b.lend(self.to_a.borrow(reference)[10:])
        self.exchange()
        return self.b.borrow(onwards)


def test_the_server_copies_nothing_between_two_workers() -> None:
    """The second worker reads the first one's block, also a slice of it."""
    workers = _Workers()
    array = np.arange(100, dtype=np.uint8)
    for _ in range(2):  # the second time the block is known already
        view = workers.through(array)
        assert bytes(view) == bytes(array[10:])
    assert workers.pool.leased_bytes == workers.pool.idle_bytes == 0


def test_the_first_worker_gets_its_memory_back_when_the_second_one_is_done() -> None:
    """The token goes back along the whole way, and not before."""
    workers = _Workers()
    view = workers.through(np.zeros(100, np.uint8))
    gc.collect()
    workers.exchange()
    assert (workers.a.lent_count, workers.to_b.lent_count) == (1, 1)
    del view
    for _ in range(2):
        workers.exchange()
    assert (workers.a.lent_count, workers.to_b.lent_count) == (0, 0)


def test_the_second_worker_can_go_on_when_the_first_one_dies() -> None:
    """Its mapping keeps the memory; no descriptor is left open afterwards."""
    before = len(os.listdir("/proc/self/fd"))
    workers = _Workers()
    view = workers.through(np.full(100, 7, np.uint8))
    workers.to_a.close()
    workers.a.close()
    workers.pool_of_a.close()
    assert bytes(view) == bytes([7] * 90)
    del view
    workers.to_b.close()
    del workers
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_relaying_borrowed_memory_is_copied() -> None:
    """So it is in a worker: a model may return its input."""
    pool = BufferPool()
    server, worker = SharedMemoryLink(pool, relays=True), SharedMemoryLink(BufferPool())

    def exchange() -> None:
        for sender, receiver in ((server, worker), (worker, server)):
            memory, fds = sender.take_memory()
            if memory is not None:
                receiver.accept_memory(memory, [os.dup(fd) for fd in fds])

    lease = pool.lease(100)
    reference = server.lend(lease)
    exchange()
    returned = worker.lend(worker.borrow(reference))
    exchange()
    echoed = server.borrow(returned)
    echoed[:] = bytes([9] * 100)
    assert bytes(lease) != bytes(echoed)
