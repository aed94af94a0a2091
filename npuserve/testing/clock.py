"""A clock that stands still until a test moves it.

Example::

    clock = FakeClock()
    scheduler.enqueue(request)
    clock.run()  # what one iteration of the event loop would do
    clock.advance(us=500)  # calls every timer that is due on the way, in order
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable


class FakeTimer:
    """See `clock.Timer`."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """See `clock.Timer.cancel`."""
        self.callback = None


class FakeClock:
    """The `clock.Clock` of tests.

    Args:
        now_ns: where the time starts; not 0, which means "never" in many places.
    """

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self._now_ns = now_ns
        self._timers: list[tuple[int, int, FakeTimer]] = []
        self._sequence = itertools.count()
        self._soon: deque[Callable[[], None]] = deque()

    def now_ns(self) -> int:
        """See `clock.Clock.now_ns`."""
        return self._now_ns

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> FakeTimer:
        """See `clock.Clock.call_at`."""
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (when_ns, next(self._sequence), timer))
        return timer

    def call_soon(self, callback: Callable[[], None]) -> None:
        """See `clock.Clock.call_soon`; `run` or `advance` makes the call."""
        self._soon.append(callback)

    def run(self) -> None:
        """Make all calls that are due now, and those they ask for."""
        self.advance(ns=0)

    def advance(self, *, ns: int = 0, us: float = 0, ms: float = 0) -> None:
        """Let time pass; timers are called in deadline order, each at its own time."""
        end_ns = self._now_ns + ns + round(us * 1_000) + round(ms * 1_000_000)
        self._run_soon()
        while (when_ns := self.next_timer_ns) and when_ns <= end_ns:
            self._now_ns = max(self._now_ns, when_ns)
            callback = heapq.heappop(self._timers)[2].callback
            if callback is not None:
                callback()
            self._run_soon()
        self._now_ns = end_ns

    @property
    def next_timer_ns(self) -> int:
        """When the next timer is due; 0 if there is none."""
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else 0

    def _run_soon(self) -> None:
        while self._soon:
            self._soon.popleft()()
