"""Counters of one model version: plain integers, counted once, on the event loop's thread.

`/stats`, gRPC ModelStatistics and `/metrics` are three views of these numbers. Names and
counting rules are those of Triton's statistics extension.
"""

from __future__ import annotations

import time
from enum import StrEnum


class FailureReason(StrEnum):
    """Label `reason` of nv_inference_request_failure."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


class Duration:
    """A count and the nanoseconds summed over it."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int) -> None:
        """Count one more, `ns` long."""
        self.count += 1
        self.ns += ns


class BatchStatistics:
    """Executions of one batch size."""

    __slots__ = ("compute_infer", "compute_input", "compute_output")

    def __init__(self) -> None:
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()


class ModelStatistics:
    """All counters of one model version. Durations in ns, monotonic."""

    def __init__(self) -> None:
        self.last_inference_ms = 0  # wall clock, ms since the epoch
        self.inference_count = 0  # batch elements of successful requests, no cache hits
        self.execution_count = 0
        self.success = Duration()
        self.fail = Duration()
        self.queue = Duration()
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.cache_hit = Duration()
        self.cache_miss = Duration()
        self.batch: dict[int, BatchStatistics] = {}
        self.failures: dict[str, int] = dict.fromkeys(FailureReason, 0)
        self.pending = 0  # accepted and not yet executing

    def execution(
        self, batch_size: int, input_ns: int, infer_ns: int, output_ns: int
    ) -> None:
        """One batch was executed, well or badly."""
        self.execution_count += 1
        self.last_inference_ms = time.time_ns() // 1_000_000
        entry = self.batch.get(batch_size)
        if entry is None:
            entry = self.batch[batch_size] = BatchStatistics()
        entry.compute_input.add(input_ns)
        entry.compute_infer.add(infer_ns)
        entry.compute_output.add(output_ns)

    def request_success(
        self, batch_size: int, total_ns: int, queue_ns: int,
        input_ns: int, infer_ns: int, output_ns: int,
    ) -> None:  # fmt: skip
        """A request ended well after an execution with these durations."""
        self.inference_count += batch_size or 1
        self.success.add(total_ns)
        self.queue.add(queue_ns)
        self.compute_input.add(input_ns)
        self.compute_infer.add(infer_ns)
        self.compute_output.add(output_ns)

    def request_cache_hit(self, total_ns: int, lookup_ns: int) -> None:
        """A request was answered from the cache: a success without inference or execution."""
        self.pending -= 1
        self.success.add(total_ns)
        self.queue.add(0)
        self.cache_hit.add(lookup_ns)

    def request_failure(self, reason: FailureReason, total_ns: int) -> None:
        """A request ended with an error after it had been accepted."""
        self.fail.add(total_ns)
        self.failures[reason] += 1
