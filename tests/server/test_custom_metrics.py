"""Metric families that models create."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from npuserve.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, NpuserveError
from npuserve.protocol.prometheus import exposition
from npuserve.server.custom_metrics import CustomMetrics


def text(metrics: CustomMetrics) -> list[str]:
    return exposition(metrics.collect()).decode().splitlines()


def test_a_counter_is_shown_under_its_own_name() -> None:
    """No `_total` is added; labels are sorted and escaped."""
    metrics = CustomMetrics()
    family = metrics.create_family("requests_seen", "Requests seen", "COUNTER")
    metric = metrics.create_metric(family, {"z": "1", "a": 'x"\n\\'})
    metrics.increment(metric, 2)
    metrics.increment(metric, 0.5)
    assert metrics.value(metric) == 2.5
    assert text(metrics) == [
        "# HELP requests_seen Requests seen",
        "# TYPE requests_seen counter",
        'requests_seen{a="x\\"\\n\\\\",z="1"} 2.5',
    ]


def test_a_histogram_is_cumulative_and_ends_in_infinity() -> None:
    """Observations are counted in every bucket that includes them."""
    metrics = CustomMetrics()
    family = metrics.create_family("h", "H", "HISTOGRAM")
    metric = metrics.create_metric(family, {}, [0.1, 1, 2.5])
    for value in (0.1, 2, 7):
        metrics.observe(metric, value)
    assert text(metrics)[2:] == [
        "h_count 3",
        "h_sum 9.1",
        'h_bucket{le="0.1"} 1',
        'h_bucket{le="1"} 1',
        'h_bucket{le="2.5"} 2',
        'h_bucket{le="+Inf"} 3',
    ]


def test_families_and_series_are_shared_and_counted() -> None:
    """Two models with the same family and labels add up; the last handle takes all away."""
    metrics = CustomMetrics()
    families = [metrics.create_family("g", "G", "GAUGE") for _ in range(2)]
    handles = [metrics.create_metric(family, {"k": "v"}) for family in families]
    metrics.set(handles[0], 5)
    metrics.increment(handles[1], -2)
    assert metrics.value(handles[0]) == 3
    metrics.delete_metric(handles[0])
    metrics.delete_family(families[0])
    assert 'g{k="v"} 3' in text(metrics)
    metrics.delete_metric(handles[1])
    assert text(metrics) == ["# HELP g G", "# TYPE g gauge"]
    metrics.delete_family(families[1])
    assert text(metrics) == []


def test_another_kind_under_the_same_name_is_refused() -> None:
    """A family keeps its kind, and its first description."""
    metrics = CustomMetrics(lambda: {"nv_inference_count": "COUNTER"})
    metrics.create_family("m", "M", "GAUGE")
    metrics.create_family("m", "another text", "GAUGE")
    assert text(metrics) == ["# HELP m M", "# TYPE m gauge"]
    with pytest.raises(AlreadyExistsError):
        metrics.create_family("m", "M", "COUNTER")
    metrics.create_family("nv_inference_count", "M", "COUNTER")
    with pytest.raises(AlreadyExistsError, match="'nv_inference_count' already exists with kind"):
        metrics.create_family("nv_inference_count", "M", "GAUGE")


@pytest.mark.parametrize(
    ("kind", "call", "message"),
    [
        ("COUNTER", lambda m, h: m.increment(h, -1), "can only be incremented monotonically"),
        ("COUNTER", lambda m, h: m.set(h, 1), "KIND_COUNTER does not support Set"),
        ("COUNTER", lambda m, h: m.observe(h, 1), "KIND_COUNTER does not support Observe"),
        ("GAUGE", lambda m, h: m.observe(h, 1), "KIND_GAUGE does not support Observe"),
        ("HISTOGRAM", lambda m, h: m.increment(h, 1), "HISTOGRAM does not support Increment"),
        ("HISTOGRAM", lambda m, h: m.set(h, 1), "HISTOGRAM does not support Set"),
        ("HISTOGRAM", lambda m, h: m.value(h), "HISTOGRAM does not support Value"),
    ],
)
def test_what_a_kind_does_not_support(
    kind: str, call: Callable[[CustomMetrics, int], object], message: str
) -> None:
    """An operation that makes no sense for the kind is an error with Triton's text."""
    metrics = CustomMetrics()
    family = metrics.create_family("m", "M", kind)
    metric = metrics.create_metric(family, {}, [1.0] if kind == "HISTOGRAM" else None)
    with pytest.raises(InvalidArgumentError, match=message):
        call(metrics, metric)


def test_a_metric_does_not_outlive_its_family() -> None:
    """Triton's text says which object to delete first."""
    metrics = CustomMetrics()
    family = metrics.create_family("m", "M", "GAUGE")
    metric = metrics.create_metric(family, {})
    metrics.delete_family(family)
    with pytest.raises(InvalidArgumentError, match="should be deleted AFTER"):
        metrics.set(metric, 1)
    metrics.delete_metric(metric)
    with pytest.raises(NotFoundError):
        metrics.set(metric, 1)


@pytest.mark.parametrize(
    ("kind", "labels", "buckets"),
    [
        ("COUNTER", {}, [1.0]),
        ("HISTOGRAM", {}, None),
        ("HISTOGRAM", {}, [1.0, 1.0]),
        ("COUNTER", {"not a label": "x"}, None),
        ("COUNTER", {"__own": "x"}, None),
    ],
)
def test_metrics_that_cannot_be(
    kind: str, labels: dict[str, str], buckets: list[float] | None
) -> None:
    """Bad buckets and label names are refused."""
    metrics = CustomMetrics()
    family = metrics.create_family("m", "M", kind)
    with pytest.raises(NpuserveError):
        metrics.create_metric(family, labels, buckets)
