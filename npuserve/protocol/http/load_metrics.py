"""The load report of generate replies, in the format of Open Request Cost Aggregation (ORCA). Pure.

A client that sends `endpoint-load-metrics-format: text` or `json` is told how full the model's
key-value cache is, from the metrics that the model itself keeps.

Source: Triton server src/orca_http.cc.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

FORMAT_HEADER = "endpoint-load-metrics-format"
REPORT_HEADER = "endpoint-load-metrics"

_FAMILY = "nv_trt_llm_kv_cache_block_metrics"
_LABEL = "kv_cache_block_type"


def load_report(wanted: str, metrics: Iterable[Metric]) -> str | None:
    """Value of the reply header; None when there is nothing to report.

    Args:
        wanted: value of the request header, `text` or `json`; others are ignored.
        metrics: the custom metrics of all models.
    """
    if wanted not in ("text", "json"):
        return None
    blocks = {
        sample.labels.get(_LABEL, ""): sample.value
        for metric in metrics
        if metric.name == _FAMILY
        for sample in metric.samples
    }
    if not blocks.keys() >= {"used", "max", "tokens_per"} or not blocks["max"]:
        return None
    named = {
        "kv_cache_utilization": blocks["used"] / blocks["max"],
        "max_token_capacity": int(blocks["max"] * blocks["tokens_per"]),
    }
    if wanted == "json":
        return "JSON " + json.dumps({"named_metrics": named})
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
