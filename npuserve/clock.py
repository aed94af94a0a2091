"""Time as an argument: schedulers read and wait on a Clock, so that tests can own it.

`testing.clock.FakeClock` is the other implementation.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import os
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_MIN_CANCELLED = 64  # cancelled timers below this number are not worth a clean-up


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

    def call_soon(self, callback: Callable[[], None], /) -> object:
        """Call back in this loop iteration, after what is running now."""


class Appointment:
    """One call at a time: at the earliest moment that was asked for since the last one."""

    __slots__ = ("_callback", "_clock", "_timer", "_when_ns")

    def __init__(self, clock: Clock, callback: Callable[[], None]) -> None:
        self._clock = clock
        self._callback = callback
        self._timer: Timer | None = None
        self._when_ns = 0

    def by(self, when_ns: int) -> None:
        """Call back at this time (0: never) unless that happens earlier anyway."""
        if not when_ns or (self._timer is not None and self._when_ns <= when_ns):
            return
        self.cancel()
        self._when_ns = when_ns
        self._timer = self._clock.call_at(when_ns, self._keep)

    def cancel(self) -> None:
        """Do not call until asked again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _keep(self) -> None:
        self._timer = None
        self._callback()


class LoopClock:
    """The clock of a running asyncio loop, exact to some ten microseconds.

    The loop's own timers will not do: uvloop rounds them to milliseconds, and a queue delay of
    100 us is an ordinary setting. All timers of the process share one timerfd that is armed for
    the earliest of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.call_soon: Callable[[Callable[[], None]], object] = loop.call_soon
        self.now_ns: Callable[[], int] = time.monotonic_ns
        self._timers: list[tuple[int, int, _LoopTimer]] = []  # heap
        self._sequence = itertools.count()
        self._cancelled = 0
        self._armed_ns = 0  # 0: not armed
        self._alarm: _TimerFd | None = None

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
        """See `Clock.call_at`."""
        if when_ns <= time.monotonic_ns():
            return self._loop.call_soon(callback)
        timer = _LoopTimer(self, callback)
        heapq.heappush(self._timers, (when_ns, next(self._sequence), timer))
        if not self._armed_ns or when_ns < self._armed_ns:
            self._arm(when_ns)
        return timer

    def close(self) -> None:
        """Drop all timers and free the descriptor; the loop must still be open."""
        self._timers.clear()
        if self._alarm is not None:
            self._loop.remove_reader(self._alarm.fd)
            self._alarm.close()
            self._alarm = None
        self._armed_ns = 0

    def _arm(self, when_ns: int) -> None:
        if self._alarm is None:
            self._alarm = _TimerFd()
            self._loop.add_reader(self._alarm.fd, self._ring)
        self._alarm.arm(when_ns)
        self._armed_ns = when_ns

    def _ring(self) -> None:
        if self._alarm is None:
            return
        self._alarm.acknowledge()
        self._armed_ns = 0
        now = time.monotonic_ns()
        timers = self._timers
        while timers and timers[0][0] <= now:
            # Through the loop, so that an exception of one callback stops no other.
            self._loop.call_soon(heapq.heappop(timers)[2].fire)
        if timers:
            self._arm(timers[0][0])

    def timer_cancelled(self) -> None:
        """A timer of this clock will not fire; forget such timers once they are the most."""
        self._cancelled += 1
        if self._cancelled > max(_MIN_CANCELLED, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if entry[2].pending]
            heapq.heapify(self._timers)
            self._cancelled = 0


class _LoopTimer:
    __slots__ = ("_callback", "_clock")

    def __init__(self, clock: LoopClock, callback: Callable[[], None]) -> None:
        self._clock = clock
        self._callback: Callable[[], None] | None = callback

    @property
    def pending(self) -> bool:
        return self._callback is not None

    def cancel(self) -> None:
        if self._callback is not None:
            self._callback = None
            self._clock.timer_cancelled()

    def fire(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class _TimerFd:
    """timerfd(2) on CLOCK_MONOTONIC, the clock of `time.monotonic_ns`; `os` has it from 3.13 on."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def arm(self, when_ns: int) -> None:
        """Make the descriptor readable at this time instead of any earlier setting."""
        seconds, nanoseconds = divmod(when_ns, 1_000_000_000)
        setting = _Itimerspec(_Timespec(0, 0), _Timespec(seconds, nanoseconds))
        if self._libc.timerfd_settime(self.fd, _TFD_TIMER_ABSTIME, ctypes.byref(setting), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def acknowledge(self) -> None:
        """Make the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):  # armed anew since it became readable
            os.read(self.fd, 8)

    def close(self) -> None:
        """Free the descriptor."""
        os.close(self.fd)
