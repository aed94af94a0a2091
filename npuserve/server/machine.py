"""Processor and memory of this machine, as the metrics show them (from /proc).

Refreshed when somebody looks and the last look is older than the metrics interval; a thread that
polls, as Triton has, would show the same numbers.

Files are read as bytes: in CPython 3.11 every file opened as text leaves a name in the cache of
methods, and one that was made while memory was full keeps an arena of 1 MiB from being freed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import Metric

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC = Path("/proc")


class Machine:
    """The nv_cpu_* families.

    Args:
        interval_ns: values younger than this are shown again.
    """

    def __init__(self, interval_ns: int, proc: Path = _PROC) -> None:
        self._interval_ns = interval_ns
        self._proc = proc
        self._looked_ns = 0
        self._busy = self._total = 0
        self._utilization = 0.0
        self._memory_total = self._memory_used = 0

    def refresh(self) -> None:
        """Read the values anew; utilisation is the mean since the last look."""
        busy, total = self._processor_times()
        if total > self._total:
            self._utilization = (busy - self._busy) / (total - self._total)
        self._busy, self._total = busy, total
        self._memory_total, self._memory_used = self._memory()
        self._looked_ns = time.monotonic_ns()

    def collect(self) -> Iterator[Metric]:
        """The families with their current values."""
        if time.monotonic_ns() - self._looked_ns >= self._interval_ns:
            self.refresh()
        for name, text, value in (
            ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._utilization),
            ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", self._memory_total),
            ("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", self._memory_used),
        ):
            family = Metric(name, text, "gauge")
            family.add_sample(name, {}, value)
            yield family

    def _processor_times(self) -> tuple[int, int]:
        """(busy, total) ticks of all processors since boot."""
        line = (self._proc / "stat").read_bytes().partition(b"\n")[0]
        # user nice system idle iowait irq softirq steal; guest times are part of user.
        ticks = [int(field) for field in line.split()[1:9]]
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)

    def _memory(self) -> tuple[int, int]:
        """(total, used) bytes."""
        fields = {}
        for line in (self._proc / "meminfo").read_bytes().splitlines():
            name, _, rest = line.partition(b":")
            fields[name] = int(rest.split()[0]) * 1_024
        return fields[b"MemTotal"], fields[b"MemTotal"] - fields[b"MemAvailable"]
