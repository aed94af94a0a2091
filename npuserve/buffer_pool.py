"""Reusable shared-memory buffers for large tensors.

A large request body is received straight into such a buffer; a worker process maps the same
memory, so the tensor reaches the model without a copy. Also used where no worker runs, since
fresh memory costs more than a copy (page faults of a new 5 MB allocation: about 1 ms).

A buffer goes back to the pool by itself when the last view of it is gone: views are made over a
NumPy array that only they keep alive.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    _Bytes = np.ndarray[Any, np.dtype[np.uint8]]
else:
    _Bytes = np.ndarray  # workers may run Python 3.8, which has no such types

# Tensors below this size travel inside messages; a shared buffer would cost more than the copy.
LARGE_TENSOR_BYTES = 32 * 1024

_MIN_BLOCK_BYTES = 1 << 16


class SharedArray(_Bytes):
    """uint8 view of memory in a block; `memoryview.obj` of any slice of it is this.

    Attributes:
        block: where it lies; None for memory that must not be handed on.
        block_offset: where it begins in the block.
    """

    block: SharedBlock | None = None
    block_offset = 0


class SharedBlock:
    """Memory behind a memfd. `id` is unique in this process, `fd` can be sent to a worker.

    The descriptor is closed with the block; the mapping ends with its last view.

    Args:
        fd: memory of another process, instead of new one.

    Raises:
        OSError: no descriptor or no memory can be had.
    """

    __slots__ = ("__weakref__", "_map", "fd", "id", "size")

    _ids = itertools.count(1)

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.id = next(self._ids)
        self.size = size
        self._map: mmap.mmap | None = None
        self.fd = os.memfd_create("npuserve", os.MFD_CLOEXEC) if fd is None else fd
        finalizer = weakref.finalize(self, os.close, self.fd)
        finalizer.atexit = False
        if fd is None:
            os.ftruncate(self.fd, size)

    @property
    def map(self) -> mmap.mmap:
        """The memory, mapped when it is first used.

        Raises:
            OSError: the process has no room for it.
        """
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.size)
        return self._map


class BufferPool:
    """Leases shared blocks of power-of-two sizes and takes them back, from any thread.

    Args:
        max_idle_bytes: idle memory kept for reuse; more is given back to the system.
    """

    def __init__(self, max_idle_bytes: int = 256 << 20) -> None:
        self._idle: dict[int, list[SharedBlock]] = {}
        self._idle_bytes = 0
        self._max_idle_bytes = max_idle_bytes
        self._leased_bytes = 0
        # Fewest idle blocks of each size since the last trim: so many were not needed.
        self._unused: dict[int, int] = {}
        self._closed = False
        self._new_lock()
        _pools.add(self)

    def _new_lock(self) -> None:
        # Re-entrant: the garbage collector may drop a view while this thread holds the lock.
        self._lock = threading.RLock()

    @property
    def leased_bytes(self) -> int:
        """Bytes of the blocks that somebody holds a view of."""
        return self._leased_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for reuse."""
        return self._idle_bytes

    def lease(self, size: int) -> memoryview:
        """A writable view of `size` bytes, 64-byte aligned; content undefined.

        The block returns to the pool when this view and all its slices are gone.

        Raises:
            OSError: no memory can be had.
        """
        block_size = max(_MIN_BLOCK_BYTES, 1 << (size - 1).bit_length())
        with self._lock:
            idle = self._idle.get(block_size)
            if idle:
                block = idle.pop()
                self._idle_bytes -= block_size
                self._unused[block_size] = min(self._unused.get(block_size, 0), len(idle))
            else:
                block = SharedBlock(block_size)
            array = np.frombuffer(block.map, np.uint8).view(SharedArray)
            self._leased_bytes += block_size
        array.block = block
        finalizer = weakref.finalize(array, self._give_back, block)
        finalizer.atexit = False
        return array.data[:size]

    def _give_back(self, block: SharedBlock) -> None:
        with self._lock:
            self._leased_bytes -= block.size
            if self._closed or self._idle_bytes + block.size > self._max_idle_bytes:
                return
            self._idle.setdefault(block.size, []).append(block)
            self._idle_bytes += block.size

    def trim(self) -> None:
        """Free the blocks that nobody needed since the last call; to be called now and then."""
        with self._lock:
            for size, blocks in self._idle.items():
                unused = self._unused.get(size, 0)
                self._idle_bytes -= size * len(blocks[:unused])
                del blocks[:unused]
                self._unused[size] = len(blocks)

    def close(self) -> None:
        """Free idle blocks now and leased ones when they come back."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            self._idle_bytes = 0


_pools: weakref.WeakSet[BufferPool] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked process: another thread, which is not there, may have held a lock."""
    for pool in tuple(_pools):
        pool._new_lock()


os.register_at_fork(after_in_child=_after_fork)


def locate(view: memoryview) -> tuple[SharedBlock, int] | None:
    """The block and byte offset a view lies in, or None if it is ordinary memory."""
    array = view.obj
    if not isinstance(array, SharedArray) or array.block is None:
        return None
    start: NDArray[np.uint8] = np.frombuffer(view, np.uint8)
    return array.block, start.ctypes.data - array.ctypes.data + array.block_offset
