"""Metric families → the text format 0.0.4 that Prometheus scrapes. Pure.

Families are prometheus_client's `Metric` objects. Its own `generate_latest` is not used: it names
every counter `…_total`, and dashboards made for Triton ask for Triton's names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

    from npuserve.server.core import InferenceServer

CONTENT_TYPE = "text/plain; charset=utf-8"

_LAST_LABELS = ("quantile", "le")  # Triton prints them behind the sorted ones
_EXACT_INTEGERS = 1 << 53


def render(server: InferenceServer) -> bytes:
    """What `GET /metrics` answers."""
    return exposition(server.metrics.collect())


def exposition(families: Iterable[Metric]) -> bytes:
    """The exposition of all families, each with HELP and TYPE even without a sample."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escape_help(family.documentation)}")
        lines.append(f"# TYPE {family.name} {family.type}")
        lines += [
            f"{sample.name}{_labels(sample.labels)} {format_value(sample.value)}"
            for sample in family.samples
        ]
    lines.append("")
    return "\n".join(lines).encode("utf-8", "replace")


def format_value(value: float) -> str:
    """A sample's value; whole numbers without a fraction, `Nan` as Triton writes it."""
    if math.isnan(value):
        return "Nan"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if value == int(value) and abs(value) < _EXACT_INTEGERS:
        return str(int(value))
    return repr(float(value))


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    ordered = sorted(labels, key=lambda name: (name in _LAST_LABELS, name))
    return "{" + ",".join(f'{name}="{_escape(labels[name])}"' for name in ordered) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
