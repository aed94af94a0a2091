"""After a burst of large requests, memory goes back to the system. Owned by the core."""

from __future__ import annotations

import ctypes
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

    glibc keeps them: after a burst of 5 MB messages through grpcio, more than 100 MB.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


class IdleMemory:
    """Trims the buffer pool in every period, and the heap once after each burst of requests.

    Trimming the heap holds up everybody who allocates, so it waits for a period without an
    inference.

    Args:
        last_inference_ms: when the newest inference was; any unit, 0 before the first one.
        trim_heap: must not block.
    """

    def __init__(
        self,
        clock: Clock,
        pool: BufferPool,
        last_inference_ms: Callable[[], int],
        trim_heap: Callable[[], object],
    ) -> None:
        self._clock = clock
        self._pool = pool
        self._last_inference_ms = last_inference_ms
        self._trim_heap = trim_heap
        self._seen_ms = self._trimmed_ms = 0
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
        seen_ms, self._seen_ms = self._seen_ms, self._last_inference_ms()
        if self._seen_ms == seen_ms != self._trimmed_ms:
            self._trimmed_ms = seen_ms
            self._trim_heap()
        self.start()
