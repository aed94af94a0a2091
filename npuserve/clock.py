"""Time as an argument: schedulers read and wait on a Clock, so that tests can own it.

`testing.clock.FakeClock` is the other implementation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A pending call that can be taken back."""

    def cancel(self) -> None:
        """Do not call; harmless after the call or a second time."""


class Clock(Protocol):
    """Monotonic time in ns, and calls at a later time on the event loop's thread."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
        """Call back once `now_ns() >= when_ns`."""

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call back in this loop iteration, after what is running now."""


class LoopClock:
    """The clock of a running asyncio loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.call_soon: Callable[[Callable[[], None]], object] = loop.call_soon
        self.now_ns: Callable[[], int] = time.monotonic_ns

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
        """See `Clock.call_at`. uvloop rounds timers to milliseconds, so callers look again."""
        delay_ns = when_ns - time.monotonic_ns()
        if delay_ns <= 0:
            return self._loop.call_soon(callback)
        return self._loop.call_later(delay_ns / 1e9, callback)
