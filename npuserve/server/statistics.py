"""Counters of one model version: plain integers, counted once, on the event loop's thread.

`/stats`, gRPC ModelStatistics and `/metrics` are three views of these numbers. Names and
counting rules are those of Triton's statistics extension.

What an instance executes is counted in the `DeviceStatistics` of its card, and `ModelStatistics`
sums over them when it is asked.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npuserve.backends.base import MemoryUsage
    from npuserve.server.latency import Histogram, LatencySummaries


# Streams may be endless, so that the index of a response needs a bound.
_MAX_RESPONSES = 10_000


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


class ResponseStatistics:
    """The n-th responses of the requests of a decoupled model.

    `success` and `fail` cover the whole time since the response before (or the start of the
    execution); `empty_response` is an end without a response, `cancel` one after a cancellation.
    """

    __slots__ = (
        "cancel", "compute_infer", "compute_output", "empty_response", "fail", "success",
    )  # fmt: skip

    def __init__(self) -> None:
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.success = Duration()
        self.fail = Duration()
        self.empty_response = Duration()
        self.cancel = Duration()


class DeviceStatistics:
    """What the instances of a model version on one card count. Durations in ns, monotonic.

    Attributes:
        inference_count: batch elements of successful requests, no cache hits.
        failures: failed requests by reason.
        summaries: distributions, None unless they are switched on.
    """

    __slots__ = (
        "_model", "cache_hit", "cache_miss", "compute_infer", "compute_input", "compute_output",
        "execution_count", "fail", "failures", "inference_count", "queue", "success", "summaries",
    )  # fmt: skip

    def __init__(self, model: ModelStatistics) -> None:
        self._model = model
        self.inference_count = 0
        self.execution_count = 0
        self.success = Duration()
        self.fail = Duration()
        self.queue = Duration()
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.cache_hit = Duration()
        self.cache_miss = Duration()
        self.failures: dict[str, int] = dict.fromkeys(FailureReason, 0)
        self.summaries: LatencySummaries | None = None

    def execution(self, batch_size: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """One batch was executed, well or badly."""
        self.execution_count += 1
        model = self._model
        model.last_inference_ms = time.time_ns() // 1_000_000
        entry = model.batch.get(batch_size)
        if entry is None:
            entry = model.batch[batch_size] = BatchStatistics()
        entry.compute_input.add(input_ns)
        entry.compute_infer.add(infer_ns)
        entry.compute_output.add(output_ns)

    def request_success(
        self, batch_size: int, total_ns: int, queue_ns: int,
        input_ns: int, infer_ns: int, output_ns: int,
    ) -> None:  # fmt: skip
        """A request ended well after an execution with these durations."""
        times = (input_ns, infer_ns, output_ns)
        self.observe(total_ns, queue_ns, times)
        self.requests_succeeded(1, batch_size or 1, total_ns, queue_ns, times)

    def observe(self, total_ns: int, queue_ns: int, times: tuple[int, int, int]) -> None:
        """Add the durations of one successful request to the distributions, if they are on."""
        if self.summaries is not None:
            input_ns, infer_ns, output_ns = times
            self.summaries.observe(
                request=total_ns, queue=queue_ns, compute_input=input_ns,
                compute_infer=infer_ns, compute_output=output_ns,
            )  # fmt: skip

    def requests_succeeded(
        self, count: int, elements: int, total_ns: int, queue_ns: int, times: tuple[int, int, int]
    ) -> None:
        """Count requests of one execution that ended well; `observe` sees each.

        Args:
            count, elements: requests and their batch elements.
            total_ns, queue_ns: sums over the requests.
            times: durations of compute_input, compute_infer and compute_output, which count in
                full for each request.
        """
        self.inference_count += elements
        input_ns, infer_ns, output_ns = times
        for duration, ns in (
            (self.success, total_ns),
            (self.queue, queue_ns),
            (self.compute_input, input_ns * count),
            (self.compute_infer, infer_ns * count),
            (self.compute_output, output_ns * count),
        ):
            duration.count += count
            duration.ns += ns

    def request_cache_hit(self, total_ns: int, lookup_ns: int) -> None:
        """A request was answered from the cache: a success without inference or execution."""
        self.success.add(total_ns)
        self.queue.add(0)
        self.cache_hit.add(lookup_ns)
        if self.summaries is not None:
            self.summaries.observe(request=total_ns, queue=0, cache_hit=lookup_ns)

    def request_cache_miss(self, lookup_and_insertion_ns: int) -> None:
        """A request that was not in the cache was executed."""
        self.cache_miss.add(lookup_and_insertion_ns)
        if self.summaries is not None:
            self.summaries.observe(cache_miss=lookup_and_insertion_ns)

    def request_failure(self, reason: FailureReason, total_ns: int) -> None:
        """A request ended with an error after it had been accepted."""
        self.fail.add(total_ns)
        self.failures[reason] += 1


class _Count:
    """Reads an integer of all devices together."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, statistics: ModelStatistics, owner: type) -> int:
        return sum(getattr(device, self._name) for device in statistics.devices.values())


class _Sum:
    """Reads a `Duration` of all devices together."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, statistics: ModelStatistics, owner: type) -> Duration:
        total = Duration()
        for device in statistics.devices.values():
            duration = getattr(device, self._name)
            total.count += duration.count
            total.ns += duration.ns
        return total


class ModelStatistics:
    """All counters of one model version. Durations in ns, monotonic.

    Attributes:
        devices: by the stable name of the card; "" is `own`.
        own: of instances that are on no card, and of requests that no instance executed: answered
            from the cache, rejected, of an ensemble.
        last_inference_ms: wall clock of the last execution, ms since the epoch; 0 before.
        batch: executions by batch size.
        responses: of a decoupled model, by the index of the response in its request; the last
            entry there may be has all that come after it, too.
        memory_usage: what its instances held when it was loaded, as far as the backend knows.
        pending: requests accepted and not yet executing.
        first_response: time until the first response in ms, None unless it is switched on.
    """

    inference_count = _Count()
    execution_count = _Count()
    success = _Sum()
    fail = _Sum()
    queue = _Sum()
    compute_input = _Sum()
    compute_infer = _Sum()
    compute_output = _Sum()
    cache_hit = _Sum()
    cache_miss = _Sum()

    def __init__(self) -> None:
        self.own = DeviceStatistics(self)
        self.devices: dict[str, DeviceStatistics] = {"": self.own}
        self.last_inference_ms = 0
        self.batch: dict[int, BatchStatistics] = {}
        self.responses: dict[int, ResponseStatistics] = {}
        self.memory_usage: list[MemoryUsage] = []
        self.pending = 0
        self.first_response: Histogram | None = None

    @property
    def failures(self) -> dict[str, int]:
        """Failed requests by reason."""
        devices = self.devices.values()
        return {
            reason: sum(device.failures[reason] for device in devices) for reason in FailureReason
        }

    def device(self, card: str) -> DeviceStatistics:
        """Where instances on this card count; "" for no card, or one without a known name."""
        found = self.devices.get(card)
        if found is None:
            found = self.devices[card] = DeviceStatistics(self)
        return found

    def request_cache_hit(self, total_ns: int, lookup_ns: int) -> None:
        """See `DeviceStatistics.request_cache_hit`; the request waits no more."""
        self.pending -= 1
        self.own.request_cache_hit(total_ns, lookup_ns)

    def response(self, index: int, infer_ns: int, output_ns: int, failed: bool) -> None:
        """A decoupled model sent the response number `index` (from 0) of a request."""
        entry = self._response_entry(index)
        entry.compute_infer.add(infer_ns)
        entry.compute_output.add(output_ns)
        (entry.fail if failed else entry.success).add(infer_ns + output_ns)

    def end_without_response(self, index: int, infer_ns: int, cancelled: bool) -> None:
        """A decoupled request ended where response number `index` would have been."""
        entry = self._response_entry(index)
        (entry.cancel if cancelled else entry.empty_response).add(infer_ns)

    def _response_entry(self, index: int) -> ResponseStatistics:
        # Differs from Triton: it has an entry for every index, until the memory is full.
        index = min(index, _MAX_RESPONSES - 1)
        entry = self.responses.get(index)
        if entry is None:
            entry = self.responses[index] = ResponseStatistics()
        return entry
