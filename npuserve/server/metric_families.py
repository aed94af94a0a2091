"""The counter and summary families of every model version: names, texts, where the value is.

Names and HELP texts are Triton's. Source: Triton core src/metrics.cc, src/infer_stats.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from npuserve.server.statistics import FailureReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from npuserve.server.statistics import DeviceStatistics


class Counter(NamedTuple):
    """A counter family of every model version and where its value is."""

    name: str
    help: str
    read: Callable[[DeviceStatistics], int]


SUCCESS = Counter(
    "nv_inference_request_success",
    "Number of successful inference requests, all batch sizes",
    lambda s: s.success.count,
)
COUNTERS = (
    Counter(
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda s: s.inference_count,
    ),
    Counter(
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda s: s.execution_count,
    ),
)
LATENCY_COUNTERS = (
    Counter(
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda s: s.success.ns // 1_000,
    ),
    Counter(
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda s: s.queue.ns // 1_000,
    ),
    Counter(
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda s: s.compute_input.ns // 1_000,
    ),
    Counter(
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda s: s.compute_infer.ns // 1_000,
    ),
    Counter(
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached "
        "requests)",
        lambda s: s.compute_output.ns // 1_000,
    ),
)
CACHE_COUNTERS = (
    Counter(
        "nv_cache_num_hits_per_model",
        "Number of cache hits per model",
        lambda s: s.cache_hit.count,
    ),
    Counter(
        "nv_cache_num_misses_per_model",
        "Number of cache misses per model",
        lambda s: s.cache_miss.count,
    ),
)
CACHE_LATENCY_COUNTERS = (
    Counter(
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda s: s.cache_hit.ns // 1_000,
    ),
    Counter(
        "nv_cache_miss_duration_per_model",
        "Total cache miss duration per model, in microseconds",
        lambda s: s.cache_miss.ns // 1_000,
    ),
)
# (duration, family, help)
SUMMARIES = (
    ("request", "nv_inference_request_summary_us",
     "Summary of inference request duration in microseconds (includes cached requests)"),
    ("queue", "nv_inference_queue_summary_us",
     "Summary of inference queuing duration in microseconds (includes cached requests)"),
    ("compute_input", "nv_inference_compute_input_summary_us",
     "Summary of compute input duration in microseconds (does not include cached requests)"),
    ("compute_infer", "nv_inference_compute_infer_summary_us",
     "Summary of compute inference duration in microseconds (does not include cached requests)"),
    ("compute_output", "nv_inference_compute_output_summary_us",
     "Summary of inference compute output duration in microseconds (does not include cached "
     "requests)"),
)  # fmt: skip
CACHE_SUMMARIES = (
    ("cache_hit", "nv_cache_hit_summary_per_model",
     "Summary of cache hit duration per model, in microseconds"),
    ("cache_miss", "nv_cache_miss_summary_per_model",
     "Summary of cache miss duration per model, in microseconds"),
)  # fmt: skip


def failure_reader(reason: FailureReason) -> tuple[str, Callable[[DeviceStatistics], int]]:
    """A name for the failures of this reason, and how to read them."""
    return f"failure {reason.value}", lambda statistics: statistics.failures[reason]


def all_readers() -> Iterator[tuple[str, Callable[[DeviceStatistics], int]]]:
    """Everything that must go on counting over a reload: name and how to read it."""
    for counter in (
        SUCCESS, *COUNTERS, *LATENCY_COUNTERS, *CACHE_COUNTERS, *CACHE_LATENCY_COUNTERS,
    ):  # fmt: skip
        yield counter.name, counter.read
    for reason in FailureReason:
        yield failure_reader(reason)
