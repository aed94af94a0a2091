"""Statistics and latency distributions."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from npuserve.backends.base import MemoryUsage
from npuserve.backends.identity import IdentityInstance
from npuserve.protocol.grpc.control_codec import statistics_response
from npuserve.protocol.http.statistics_codec import statistics_document
from npuserve.server.latency import Histogram, LatencySummaries, SlidingSummary
from npuserve.server.statistics import FailureReason, ModelStatistics
from tests.server.models import serve, write_model

SECOND = 1_000_000_000


def test_a_batch_counts_in_full_for_each_of_its_requests() -> None:
    """Two requests of 3 and 1 elements in one execution of 4."""
    statistics = ModelStatistics()
    statistics.own.execution(4, 1, 10, 2)
    statistics.own.request_success(3, 20, 5, 1, 10, 2)
    statistics.own.request_success(1, 21, 6, 1, 10, 2)
    assert (statistics.inference_count, statistics.execution_count) == (4, 1)
    assert (statistics.success.count, statistics.success.ns) == (2, 41)
    assert (statistics.compute_infer.count, statistics.compute_infer.ns) == (2, 20)
    assert statistics.batch[4].compute_infer.count == 1
    assert statistics.last_inference_ms > 0


def test_a_request_without_batch_dimension_is_one_inference() -> None:
    """Batch size 0 counts as 1."""
    statistics = ModelStatistics()
    statistics.own.request_success(0, 1, 1, 1, 1, 1)
    assert statistics.inference_count == 1


def test_failures_are_counted_by_reason() -> None:
    """All four reasons exist from the start; an error is no inference."""
    statistics = ModelStatistics()
    assert set(statistics.failures) == {"REJECTED", "CANCELED", "BACKEND", "OTHER"}
    statistics.own.request_failure(FailureReason.REJECTED, 7)
    assert statistics.failures["REJECTED"] == 1
    assert (statistics.fail.count, statistics.fail.ns) == (1, 7)
    assert statistics.inference_count == 0


def test_responses_of_decoupled_models_are_counted_by_index() -> None:
    """The second response, a failed third and an end without a fourth."""
    statistics = ModelStatistics()
    statistics.response(0, 5, 1, failed=False)
    statistics.response(1, 6, 1, failed=False)
    statistics.response(2, 7, 1, failed=True)
    statistics.end_without_response(3, 8, cancelled=False)
    statistics.end_without_response(3, 9, cancelled=True)
    assert statistics.responses[1].success.ns == 7
    assert statistics.responses[2].fail.count == 1
    assert statistics.responses[3].empty_response.ns == 8
    assert statistics.responses[3].cancel.ns == 9


async def test_the_memory_of_all_instances_is_shown_by_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two instances on one card, as their backend tells of them."""
    usage = [MemoryUsage("GPU", 3, 100), MemoryUsage("CPU_PINNED", 0, 7)]
    monkeypatch.setattr(IdentityInstance, "memory_usage", usage)
    write_model(tmp_path, "m", "instance_group [ { kind: KIND_CPU } ]")
    async with serve(tmp_path) as server:
        models = [server.model("m")]
        assert statistics_document(models)["model_stats"][0]["memory_usage"] == [
            {"type": "CPU_PINNED", "id": 0, "byte_size": 14},
            {"type": "GPU", "id": 3, "byte_size": 200},
        ]
        (entry,) = statistics_response(models).model_stats
        assert [(each.type, each.id, each.byte_size) for each in entry.memory_usage] == [
            ("CPU_PINNED", 0, 14),
            ("GPU", 3, 200),
        ]


def test_an_endless_stream_takes_bounded_memory() -> None:
    """Responses far beyond the others are counted together."""
    statistics = ModelStatistics()
    for index in range(20_000):
        statistics.response(index, 5, 1, failed=False)
    assert len(statistics.responses) == 10_000
    assert statistics.responses[0].success.count == 1
    assert statistics.responses[9_999].success.count == 10_001


def test_quantiles_are_exact_for_few_values() -> None:
    """With a thousand values the quantiles are those of the sorted list."""
    summary = SlidingSummary()
    values = list(range(1, 1_001))
    random.Random(1).shuffle(values)
    for value in values:
        summary.observe(value, SECOND)
    assert summary.quantiles([0.5, 0.99, 0.9], SECOND) == [500, 990, 900]
    assert (summary.count, summary.sum) == (1_000, 500_500)


def test_the_window_forgets_old_values() -> None:
    """After a minute quantiles are NaN, count and sum stay."""
    summary = SlidingSummary()
    summary.observe(5, SECOND)
    assert summary.quantiles([0.5], 50 * SECOND) == [5]
    assert all(math.isnan(value) for value in summary.quantiles([0.5], 62 * SECOND))
    assert summary.count == 1


def test_many_values_take_bounded_memory() -> None:
    """A hundred thousand values: quantiles from a sample, within two percent."""
    summary = SlidingSummary()
    values = random.Random(1)
    for _ in range(100_000):
        summary.observe(values.random(), SECOND)
    assert sum(len(age.values) for age in summary._ages) <= 2_048
    assert summary.quantiles([0.9], SECOND)[0] == pytest.approx(0.9, abs=0.02)


def test_a_bound_includes_its_own_value() -> None:
    """Histogram buckets are `less or equal`."""
    histogram = Histogram((100.0, 500.0))
    for value in (100, 101, 501):
        histogram.observe(value)
    assert histogram.counts == [1, 1, 1]


def test_statistics_feed_the_distributions_if_there_are_any() -> None:
    """Summaries are in microseconds."""
    statistics = ModelStatistics()
    summaries = statistics.own.summaries = LatencySummaries()
    statistics.own.request_success(1, 5_000, 1_000, 1, 1, 1)
    statistics.request_cache_hit(2_000_000, 1_000)
    assert summaries.by_name["request"].sum == 2_005
    assert summaries.by_name["cache_hit"].count == 1


def test_totals_are_those_of_all_cards() -> None:
    """Two cards and a rejected request: each counted where it belongs, all seen together."""
    statistics = ModelStatistics()
    for card, batch_size in (("a", 3), ("b", 1), ("b", 2)):
        counters = statistics.device(card)
        counters.execution(batch_size, 1, 10, 2)
        counters.request_success(batch_size, 20, 5, 1, 10, 2)
    statistics.device("b").request_failure(FailureReason.BACKEND, 7)
    statistics.own.request_failure(FailureReason.REJECTED, 1)
    by_card = {card: device.inference_count for card, device in statistics.devices.items()}
    assert by_card == {"": 0, "a": 3, "b": 3}
    assert (statistics.inference_count, statistics.execution_count) == (6, 3)
    assert (statistics.success.count, statistics.success.ns) == (3, 60)
    assert (statistics.fail.count, statistics.fail.ns) == (2, 8)
    assert (statistics.failures["BACKEND"], statistics.failures["REJECTED"]) == (1, 1)
    assert statistics.batch[2].compute_infer.count == 1
