"""Large tensors between the server and a worker: memory lent to the peer, not copied.

Each end owns the blocks of its own `BufferPool` and maps the peer's blocks. `lend` puts data where
the peer can read it and gives a reference (token, block id, offset, length); the lease is held
until the peer returns the token, which it does when its last view of that memory is gone. The
file descriptor of a block crosses once (SCM_RIGHTS), and the peer unmaps it when the owner's
pool dropped it. All this bookkeeping rides on ordinary messages (`take_memory`, `accept_memory`).

What one worker lent can be lent on to another one as it is (`relays`): the tensors of an ensemble
go from worker to worker without a copy.

There are no names in /dev/shm: whatever way a process ends, the kernel frees the memory.
Runs in every interpreter a worker may have: standard library and NumPy only.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.backends.worker.wire import MAX_FDS, WireError
from npuserve.buffer_pool import BufferPool, SharedArray, SharedBlock, locate

if TYPE_CHECKING:  # Python 3.8 has no such types
    Reference = tuple[int, int, int, int]
    Memory = tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[int, ...]]


class BorrowedArray(SharedArray):
    """uint8 view of borrowed memory.

    A subclass, so that NumPy keeps it as the base of all views made of it: its end is the end of
    the last view.
    """


class SharedMemoryLink:
    """The shared memory of one channel, as one of its two ends sees it.

    Not thread-safe, except for views that die in other threads: the caller holds a lock.

    Attributes:
        next_token: what the next `lend` gives.

    Args:
        pool: where this end leases the blocks it lends.
        on_return: called, in any thread, whenever a borrowed view is gone and its token waits to
            be sent back; gets the number of tokens and of bytes waiting.
        relays: whether borrowed memory may be lent on through another link. Not so in a worker:
            a model that returns its input would make one memory of two tensors.
    """

    def __init__(
        self,
        pool: BufferPool,
        on_return: Callable[[int, int], None] | None = None,
        *,
        relays: bool = False,
    ) -> None:
        self._pool = pool
        self._on_return = on_return
        self._relays = relays
        self._lent: dict[int, memoryview] = {}
        self.next_token = 1
        self._shown: dict[int, weakref.finalize[Any, Any]] = {}
        self._to_announce: list[SharedBlock] = []
        self._to_forget: deque[int] = deque()
        self._to_return: deque[int] = deque()
        self._return_bytes = 0
        self._maps: dict[int, SharedBlock] = {}  # by the peer's id of the block
        self._closed = False

    @property
    def lent_count(self) -> int:
        """Leases the peer has not given back."""
        return len(self._lent)

    def lend(self, data: Any, *, copy: bool = False) -> Reference:
        """A reference the peer can follow to the bytes of `data`.

        Args:
            data: a C-contiguous buffer. Copied into a leased block, unless it is a view of one.
            copy: always copy, for memory that others read while the peer may write to it.
        """
        view = data if isinstance(data, memoryview) else memoryview(data)
        place = None if copy else locate(view)
        if place is None:
            length = view.nbytes
            lease = self._pool.lease(length)
            np.copyto(np.frombuffer(lease, np.uint8), np.frombuffer(view, np.uint8))
            view = lease
            place = locate(lease)
            assert place is not None
        block, offset = place
        if block.id not in self._shown:
            self._announce(block)
        token = self.next_token
        self.next_token = token + 1
        self._lent[token] = view
        return token, block.id, offset, view.nbytes

    def take_back(self, first_token: int) -> None:
        """End the leases from this token on: the message that was to name them is not sent."""
        for token in range(first_token, self.next_token):
            self._lent.pop(token, None)

    def _announce(self, block: SharedBlock) -> None:
        finalizer = weakref.finalize(block, self._block_died, block.id)
        finalizer.atexit = False
        self._shown[block.id] = finalizer
        self._to_announce.append(block)

    def _block_died(self, block_id: int) -> None:
        del self._shown[block_id]
        self._to_forget.append(block_id)

    def borrow(self, reference: Reference) -> memoryview:
        """A writable view of the peer's memory; its end is reported to the peer by itself.

        Raises:
            OSError: it cannot be mapped; `decline` is due.
        """
        token, block_id, offset, length = reference
        block = self._maps[block_id]
        array = np.frombuffer(block.map, np.uint8, length, offset).view(BorrowedArray)
        if self._relays:
            array.block, array.block_offset = block, offset
        finalizer = weakref.finalize(array, self._returned, token, length)
        finalizer.atexit = False
        return memoryview(array)  # type: ignore[arg-type]  # NumPy's stub lacks the protocol

    def decline(self, tensors: Iterable[Any]) -> None:
        """Give the memory of tensors, as `wire` has them, back unread; borrowed or not."""
        for *_, data in tensors:
            if type(data) is not bytes:
                token, _, _, length = data
                self._returned(token, length)

    def _returned(self, token: int, length: int) -> None:
        if self._closed:
            return
        self._to_return.append(token)
        self._return_bytes += length
        if self._on_return is not None:
            self._on_return(len(self._to_return), self._return_bytes)

    @property
    def has_news(self) -> bool:
        """Whether the next message will carry bookkeeping."""
        return bool(self._to_return or self._to_announce or self._to_forget)

    def take_memory(self) -> tuple[Memory | None, list[int]]:
        """What the next message has to carry: its `memory` field and file descriptors.

        There is news left if those are more than one message carries.
        """
        if not (self._to_return or self._to_announce or self._to_forget):
            return None, []  # inlined `has_news`: this runs for every message
        returned = _drain(self._to_return)
        self._return_bytes = 0
        announced, self._to_announce = (
            self._to_announce[:MAX_FDS],
            self._to_announce[MAX_FDS:],
        )
        blocks = tuple((block.id, block.size) for block in announced)
        return (returned, blocks, _drain(self._to_forget)), [block.fd for block in announced]

    def accept_memory(self, memory: Memory, fds: list[int]) -> None:
        """Act on the `memory` field of a message from the peer. Takes over the descriptors.

        Raises:
            WireError: some did not arrive; all that lies in those blocks would be lost.
        """
        returned, blocks, forgotten = memory
        for token in returned:
            self._lent.pop(token, None)
        for (block_id, size), fd in zip(blocks, fds):  # noqa: B905 - workers may run Python 3.8
            self._maps[block_id] = SharedBlock(size, fd)
        if len(fds) < len(blocks):
            raise WireError("descriptors of shared memory were lost: too many open files")
        for block_id in forgotten:
            self._maps.pop(block_id, None)

    def close(self) -> None:
        """The peer is gone: take all leases back and drop the maps."""
        self._closed = True
        self._lent.clear()
        self._maps.clear()
        self._to_announce.clear()
        for finalizer in self._shown.values():
            finalizer.detach()
        self._shown.clear()


def _drain(queue: deque[int]) -> tuple[int, ...]:
    items = []
    while queue:
        items.append(queue.popleft())
    return tuple(items)
