"""Metric families that models create (`pb_utils.MetricFamily`).

Handles are small integers, so that they can cross to a worker process. Families are shared by name
and counted by reference, series by their labels; both vanish with their last handle.

Source: Triton core src/metric_family.cc; python_backend's MetricFamily and Metric.
"""

from __future__ import annotations

import bisect
import itertools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import Metric

from npuserve.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

KINDS = ("COUNTER", "GAUGE", "HISTOGRAM")
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

_Labels = tuple[tuple[str, str], ...]


@dataclass
class _Series:
    """One labelled time series; `bounds` and `counts` are those of a histogram."""

    labels: _Labels
    bounds: list[float]
    value: float = 0.0  # of a histogram: the sum
    counts: list[int] = field(default_factory=list)
    references: int = 0


@dataclass
class _Family:
    name: str
    description: str
    kind: str
    references: int = 0
    series: dict[_Labels, _Series] = field(default_factory=dict)


@dataclass
class _MetricHandle:
    family: _Family
    family_handle: int
    series: _Series


class CustomMetrics:
    """The families of all models. Loop thread only.

    Every method raises InvalidArgumentError (AlreadyExistsError, NotFoundError) with the text a
    model author sees.

    Args:
        server_kinds: gives the kinds of the server's own families by name. A model may add series
            to one of them, as in Triton, but not give it another kind.
    """

    def __init__(self, server_kinds: Callable[[], Mapping[str, str]] = dict) -> None:
        self._server_kinds = server_kinds
        self._families: dict[str, _Family] = {}
        self._family_handles: dict[int, _Family] = {}
        self._metric_handles: dict[int, _MetricHandle] = {}
        self._handles = itertools.count(1)

    def create_family(self, name: str, description: str, kind: str) -> int:
        """A handle on the family of this name, which is made if it does not exist.

        The first description stays, as in Triton.

        Raises:
            AlreadyExistsError: it exists with another kind.
        """
        if kind not in KINDS:
            raise InvalidArgumentError(f"unknown metric kind '{kind}', known: {', '.join(KINDS)}")
        if not _METRIC_NAME.fullmatch(name):
            raise InvalidArgumentError(f"Invalid metric name '{name}'")
        family = self._families.get(name)
        known = family.kind if family is not None else self._server_kinds().get(name, kind)
        if known != kind:
            raise AlreadyExistsError(f"Metric family '{name}' already exists with kind {known}")
        if family is None:
            family = self._families[name] = _Family(name, description, kind)
        family.references += 1
        handle = next(self._handles)
        self._family_handles[handle] = family
        return handle

    def delete_family(self, handle: int) -> None:
        """Give a handle back; its metrics can no longer be used."""
        family = self._family_handles.pop(handle, None)
        if family is None:
            return
        family.references -= 1
        if not family.references and self._families.get(family.name) is family:
            del self._families[family.name]

    def create_metric(
        self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None = None
    ) -> int:
        """A handle on the series with these labels, which is made if it does not exist.

        Args:
            family: handle.
            buckets: upper bounds of a histogram, strictly increasing; +Inf is added.
        """
        owner = self._family_handles.get(family)
        if owner is None:
            raise NotFoundError("the MetricFamily has been deleted")
        bounds = _checked_buckets(owner.kind, buckets)
        for label in labels:
            if not _LABEL_NAME.fullmatch(label) or label.startswith("__"):  # Prometheus' own
                raise InvalidArgumentError(f"Invalid label name '{label}'")
        key = tuple(sorted(labels.items()))
        series = owner.series.get(key)
        if series is None:
            series = _Series(key, bounds, counts=[0] * (len(bounds) + 1))
            owner.series[key] = series
        series.references += 1
        handle = next(self._handles)
        self._metric_handles[handle] = _MetricHandle(owner, family, series)
        return handle

    def delete_metric(self, handle: int) -> None:
        """Give a handle back; the series vanishes with its last one."""
        metric = self._metric_handles.pop(handle, None)
        if metric is None:
            return
        metric.series.references -= 1
        if not metric.series.references:
            metric.family.series.pop(metric.series.labels, None)

    def increment(self, handle: int, value: float) -> None:
        """Add to a counter (never a negative amount) or a gauge."""
        metric = self._metric(handle)
        kind = metric.family.kind
        if kind == "HISTOGRAM":
            raise _unsupported(kind, "Increment")
        if kind == "COUNTER" and value < 0:
            raise InvalidArgumentError(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by "
                "non-negative values."
            )
        metric.series.value += value

    def set(self, handle: int, value: float) -> None:
        """Set a gauge."""
        metric = self._metric(handle)
        if metric.family.kind != "GAUGE":
            raise _unsupported(metric.family.kind, "Set")
        metric.series.value = value

    def observe(self, handle: int, value: float) -> None:
        """Add one value to a histogram."""
        metric = self._metric(handle)
        if metric.family.kind != "HISTOGRAM":
            raise _unsupported(metric.family.kind, "Observe")
        series = metric.series
        series.value += value
        series.counts[bisect.bisect_left(series.bounds, value)] += 1

    def value(self, handle: int) -> float:
        """Current value of a counter or gauge."""
        metric = self._metric(handle)
        if metric.family.kind == "HISTOGRAM":
            raise _unsupported(metric.family.kind, "Value")
        return metric.series.value

    def collect(self) -> Iterator[Metric]:
        """All families with their series, for the exposition."""
        for family in self._families.values():
            metric = Metric(family.name, family.description, family.kind.lower())
            for series in family.series.values():
                if family.kind == "HISTOGRAM":
                    add_histogram(metric, dict(series.labels), series.bounds, series.counts,
                                  series.value)  # fmt: skip
                else:
                    metric.add_sample(family.name, dict(series.labels), series.value)
            yield metric

    def _metric(self, handle: int) -> _MetricHandle:
        metric = self._metric_handles.get(handle)
        if metric is None:
            raise NotFoundError("the Metric has been deleted")
        if metric.family_handle not in self._family_handles:
            raise InvalidArgumentError(
                "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. "
                "The 'MetricFamily' object should be deleted AFTER its corresponding 'Metric' "
                "objects have been deleted."
            )
        return metric


def add_histogram(
    metric: Metric,
    labels: dict[str, str],
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
) -> None:
    """Add the samples of one histogram: `_count`, `_sum` and cumulative `_bucket`s.

    Args:
        counts: observations per bucket, one more than `bounds` for those above the last.
    """
    metric.add_sample(f"{metric.name}_count", labels, sum(counts))
    metric.add_sample(f"{metric.name}_sum", labels, total)
    edges = [f"{bound:g}" for bound in bounds] + ["+Inf"]
    for edge, reached in zip(edges, itertools.accumulate(counts), strict=True):
        metric.add_sample(f"{metric.name}_bucket", labels | {"le": edge}, reached)


def _checked_buckets(kind: str, buckets: Sequence[float] | None) -> list[float]:
    if kind != "HISTOGRAM":
        if buckets is not None:
            raise InvalidArgumentError("Failed to create metric. Unexpected buckets found.")
        return []
    if buckets is None:
        raise InvalidArgumentError("Failed to create metric. Missing required buckets.")
    bounds = [float(bound) for bound in buckets]
    if any(high <= low for low, high in itertools.pairwise(bounds)):
        raise InvalidArgumentError("Failed to create metric. Buckets must be strictly increasing.")
    return bounds


def _unsupported(kind: str, operation: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"TRITONSERVER_METRIC_KIND_{kind} does not support {operation}")
