"""Statistics of model versions as the JSON of the statistics extension. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npuserve.server.model import Model
    from npuserve.server.statistics import Duration, ModelStatistics

_REQUEST_DURATIONS = (
    "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit",
    "cache_miss",
)  # fmt: skip
_RESPONSE_DURATIONS = (
    "compute_infer", "compute_output", "success", "fail", "empty_response", "cancel",
)  # fmt: skip
_BATCH_DURATIONS = ("compute_input", "compute_infer", "compute_output")


def statistics_document(models: Iterable[Model]) -> dict[str, Any]:
    """The reply of the statistics endpoints."""
    return {"model_stats": [_entry(model) for model in models]}


def _entry(model: Model) -> dict[str, Any]:
    statistics: ModelStatistics = model.statistics
    return {
        "name": model.name,
        "version": str(model.version),
        "last_inference": statistics.last_inference_ms,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
        "inference_stats": _durations(statistics, _REQUEST_DURATIONS),
        "response_stats": {
            str(index): _durations(entry, _RESPONSE_DURATIONS)
            for index, entry in sorted(statistics.responses.items())
        },
        "batch_stats": [
            {"batch_size": size, **_durations(entry, _BATCH_DURATIONS)}
            for size, entry in sorted(statistics.batch.items())
        ],
        "memory_usage": [usage._asdict() for usage in statistics.memory_usage],
    }


def _durations(source: Any, names: tuple[str, ...]) -> dict[str, dict[str, int]]:
    return {name: _duration(getattr(source, name)) for name in names}


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
