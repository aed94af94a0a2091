"""When the server has nothing to do, memory goes back to the system. Owned by the core."""

from __future__ import annotations

import ctypes
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from npuserve.buffer_pool import BufferPool
    from npuserve.clock import Clock, Timer

_PERIOD_NS = 5_000_000_000

# glibc's; other C libraries give memory back by themselves.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def release_heap() -> None:
    """Give the pages between the live blocks of the C heap back; blocks for up to 0.1 s.

    The garbage goes first: a model that was unloaded is full of cycles. glibc keeps the pages:
    after a burst of 5 MB messages through grpcio more than 100 MB, after 200 models 50 MB.
    """
    gc.collect()
    if _malloc_trim is not None:
        _malloc_trim(0)


class IdleMemory:
    """Trims the buffer pool in every period, and the heap once after each time of activity.

    Trimming the heap holds up everybody who allocates, so it waits for a period in which nothing
    happened.

    Args:
        activity: a value that is another one when something has happened.
        trim_heap: must not block.
    """

    def __init__(
        self,
        clock: Clock,
        pool: BufferPool,
        activity: Callable[[], object],
        trim_heap: Callable[[], object],
    ) -> None:
        self._clock = clock
        self._pool = pool
        self._activity = activity
        self._trim_heap = trim_heap
        self._seen = activity()
        self._untidy = False
        self._timer: Timer | None = None

    def start(self) -> None:
        """Begin the first period."""
        self._timer = self._clock.call_at(self._clock.now_ns() + _PERIOD_NS, self._end_period)

    def stop(self) -> None:
        """Trim no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _end_period(self) -> None:
        self._pool.trim()
        before, self._seen = self._seen, self._activity()
        if self._seen != before:
            self._untidy = True
        elif self._untidy:
            self._untidy = False
            self._trim_heap()
        self.start()
