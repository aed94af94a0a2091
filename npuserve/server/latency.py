"""Distributions of latencies: summaries with sliding quantiles and a histogram.

Only models of a server with `--metrics-config summary_latencies=true` or
`histogram_latencies=true` have them; the plain counters cost less.
"""

from __future__ import annotations

import bisect
import math
import random
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_WINDOW_NS = 60_000_000_000
_AGE_NS = _WINDOW_NS // 5  # the window moves on in fifths
_SAMPLES_PER_AGE = 2_048

FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2_000.0, 5_000.0)

_now_ns = time.monotonic_ns


class _Age:
    """A uniform sample (reservoir) of the values seen in one fifth of the window."""

    __slots__ = ("seen", "start_ns", "values")

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        self.seen = 0
        self.values: list[float] = []

    def add(self, value: float) -> None:
        self.seen += 1
        if len(self.values) < _SAMPLES_PER_AGE:
            self.values.append(value)
        elif (place := random.randrange(self.seen)) < _SAMPLES_PER_AGE:
            self.values[place] = value


class SlidingSummary:
    """Count and sum since the start, quantiles over the last 60 s.

    Exact for up to 2,048 values in 12 s; above that quantiles come from a uniform sample.
    """

    __slots__ = ("_ages", "count", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self._ages: deque[_Age] = deque()

    def observe(self, value: float, now_ns: int) -> None:
        """Add one value."""
        self.count += 1
        self.sum += value
        ages = self._ages
        if not ages or now_ns - ages[-1].start_ns >= _AGE_NS:
            ages.append(_Age(now_ns))
            self._forget(now_ns)
        ages[-1].add(value)

    def quantiles(self, wanted: Sequence[float], now_ns: int) -> list[float]:
        """The values below which these fractions of the window lie; NaN for an empty window."""
        self._forget(now_ns)
        # An age that saw more than it keeps lets each value stand for several.
        weighted = sorted(
            (value, age.seen / len(age.values)) for age in self._ages for value in age.values
        )
        total = sum(weight for _, weight in weighted)
        reached, position, found = 0.0, 0, []
        for fraction in sorted(wanted):
            while position < len(weighted) and reached < fraction * total:
                reached += weighted[position][1]
                position += 1
            found.append(weighted[max(0, position - 1)][0] if weighted else math.nan)
        by_fraction = dict(zip(sorted(wanted), found, strict=True))
        return [by_fraction[fraction] for fraction in wanted]

    def _forget(self, now_ns: int) -> None:
        while self._ages and now_ns - self._ages[0].start_ns >= _WINDOW_NS:
            self._ages.popleft()


class Histogram:
    """Observations counted by upper bounds; the last count is of those above all bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Add one value; a bound includes its own value."""
        self.sum += value
        self.counts[bisect.bisect_left(self.bounds, value)] += 1


class LatencySummaries:
    """A summary in microseconds of each duration of the requests executed on one device.

    Attributes:
        by_name: by the name of the duration.
    """

    NAMES = (
        "request", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit",
        "cache_miss",
    )  # fmt: skip

    def __init__(self) -> None:
        self.by_name = {name: SlidingSummary() for name in self.NAMES}

    def observe(self, **durations_ns: int) -> None:
        """Add durations by name."""
        now_ns = _now_ns()
        for name, duration_ns in durations_ns.items():
            self.by_name[name].observe(duration_ns / 1_000, now_ns)
