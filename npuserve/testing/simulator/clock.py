"""Time of the simulated machine: real, or modelled per host thread."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Protocol

_libc = ctypes.PyDLL(None)  # PyDLL keeps the GIL during a call


class HostClock(Protocol):
    """Time as one host thread sees it, ns."""

    def enter(self) -> None:
        """The thread enters the simulator."""

    def leave(self) -> None:
        """The thread goes back to its own work."""

    def now_ns(self) -> int:
        """Now, for the calling thread."""

    def wait_until(self, when_ns: int, hold_gil: bool = False) -> None:
        """Let the calling thread wait."""


class RealClock:
    """Monotonic time; waiting really waits."""

    def enter(self) -> None:
        """See `HostClock.enter`."""

    def leave(self) -> None:
        """See `HostClock.leave`."""

    def now_ns(self) -> int:
        """See `HostClock.now_ns`."""
        return time.monotonic_ns()

    def wait_until(self, when_ns: int, hold_gil: bool = False) -> None:
        """See `HostClock.wait_until`. With `hold_gil` the whole process stands still."""
        remaining_us = (when_ns - time.monotonic_ns()) // 1000
        if remaining_us <= 0:
            return
        if hold_gil:
            _libc.usleep(ctypes.c_uint(remaining_us))
        else:
            time.sleep(remaining_us / 1e6)


class ModelledClock:
    """A clock of its own for every thread, advanced by CPU time and by waiting.

    Time a thread sleeps or is pre-empted does not count, nor does time in the simulator.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def enter(self) -> None:
        """See `HostClock.enter`."""
        local = self._local
        local.now = (
            self.now_ns() + time.thread_time_ns() - getattr(local, "left", time.thread_time_ns())
        )

    def leave(self) -> None:
        """See `HostClock.leave`."""
        self._local.left = time.thread_time_ns()

    def now_ns(self) -> int:
        """See `HostClock.now_ns`. A thread starts at 0."""
        return getattr(self._local, "now", 0)

    def wait_until(self, when_ns: int, hold_gil: bool = False) -> None:
        """See `HostClock.wait_until`."""
        self._local.now = max(self.now_ns(), when_ns)


def make_clock(kind: str) -> HostClock:
    """The clock for `SimulatorOptions.time`."""
    return ModelledClock() if kind == "modelled" else RealClock()
