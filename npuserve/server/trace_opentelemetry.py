"""Traces as OpenTelemetry spans: `InferRequest` → model name → `compute`.

Spans are made when a trace is complete, from the moments noted on it. The exporter has a thread
of its own (BatchSpanProcessor).
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from npuserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from npuserve.server.trace import Trace
    from npuserve.server.trace_settings import Sampler

logger = logging.getLogger(__name__)

# How long the exit waits for a collector to take the last spans.
_LAST_EXPORT_S = 1.0
_DEFAULT_URL = "http://localhost:4318/v1/traces"
_COMPUTE = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
_MODEL = ("REQUEST_START", "QUEUE_START", "INFER_RESPONSE_COMPLETE", "REQUEST_END")


class OpenTelemetryExporter:
    """Exporter of the mode `opentelemetry`.

    Args:
        settings: `--trace-config opentelemetry,<key>=<value>` in order; `resource` may repeat.
    """

    def __init__(self, settings: Iterable[tuple[str, str]]) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
        except ImportError as error:
            raise InvalidArgumentError(
                "the trace mode opentelemetry needs its SDK: pip install 'npuserve[otel]'"
            ) from error
        options = dict(settings)
        resource = {"service.name": "triton-inference-server"}
        for key, value in settings:
            if key == "resource":
                name, _, text = value.partition("=")
                resource[name] = text
        self._url = _with_scheme(options.get("url", _DEFAULT_URL))
        self._exporter = _CountingExporter(_otlp_exporter(self._url))
        # `close` shuts it down; at the exit of the interpreter nothing is waited for.
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        self._provider.add_span_processor(_batch_processor(self._exporter, options))
        self._tracer = self._provider.get_tracer("npuserve")
        self._wall_offset_ns = 0
        self._made = 0  # spans, without those that the client wants not recorded

    def export(self, trace: Trace) -> None:
        """See `trace.Exporter.export`."""
        # Spans are stamped with wall-clock time, which may be set; the moments noted are monotonic.
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()
        if trace.parent is None:
            self._export_root(trace)
        else:
            self._export_model(trace, trace.parent.span)

    def settings_change(self, sampler: Sampler) -> None:
        """See `trace.Exporter.settings_change`: spans know no settings."""

    def close(self) -> None:
        """See `trace.Exporter.close`. A collector that does not answer is given up."""
        last = threading.Thread(
            target=self._provider.shutdown, name="opentelemetry-shutdown", daemon=True
        )
        last.start()
        last.join(_LAST_EXPORT_S)
        lost = self._made - self._exporter.delivered
        if lost:
            logger.warning(
                "%d of %d OpenTelemetry spans did not reach %s", lost, self._made, self._url
            )

    def _export_root(self, trace: Trace) -> None:
        marks = _in_order(trace.timestamps)
        if not marks:
            return
        root = self._span("InferRequest", _client_context(trace), marks[0][1])
        self._add_events(root, [m for m in marks if m[0] not in _MODEL + _COMPUTE])
        self._export_model(trace, root)
        root.end(self._wall_ns(marks[-1][1]))

    def _export_model(self, trace: Trace, parent: Any) -> None:
        marks = [m for m in _in_order(trace.timestamps) if m[0] in _MODEL + _COMPUTE]
        if not marks:
            return
        span = self._span(trace.model_name, _as_context(parent), marks[0][1])
        trace.span = span
        span.set_attributes(_attributes(trace))
        self._add_events(span, [m for m in marks if m[0] in _MODEL])
        compute = [m for m in marks if m[0] in _COMPUTE]
        if compute:
            inner = self._span("compute", _as_context(span), compute[0][1])
            self._add_events(inner, compute)
            inner.end(self._wall_ns(compute[-1][1]))
        for child in trace.children:
            self._export_model(child, span)
        span.end(self._wall_ns(marks[-1][1]))

    def _span(self, name: str, context: Any, start_ns: int) -> Any:
        span = self._tracer.start_span(name, context, start_time=self._wall_ns(start_ns))
        self._made += span.is_recording()
        return span

    def _add_events(self, span: Any, marks: list[tuple[str, int]]) -> None:
        for name, ns in marks:
            span.add_event(name, timestamp=self._wall_ns(ns))

    def _wall_ns(self, monotonic_ns: int) -> int:
        return monotonic_ns + self._wall_offset_ns


def _in_order(marks: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(marks, key=lambda mark: mark[1])


def _attributes(trace: Trace) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "triton.model_name": trace.model_name,
        "triton.model_version": trace.model_version,
        "triton.trace_id": trace.id,
    }
    if trace.parent is not None:
        attributes["triton.trace_parent_id"] = trace.parent.id
    if trace.request_id:
        attributes["triton.request_id"] = trace.request_id
    return attributes


def _as_context(span: Any) -> Any:
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span)


def _client_context(trace: Trace) -> Any:
    """The W3C context the client sent as OpenTelemetry's object; an empty one without."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if trace.client is None:
        return Context()
    carrier = {
        "traceparent": trace.client.traceparent,
        "tracestate": trace.client.tracestate,
    }
    return TraceContextTextMapPropagator().extract(carrier, Context())


class _CountingExporter:
    """A span exporter that counts what arrived.

    Attributes:
        delivered: spans that the other side has taken.
    """

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self.delivered = 0

    def export(self, spans: Sequence[Any]) -> Any:
        """Send a batch; in the processor's thread."""
        result = self._exporter.export(spans)
        if result.name == "SUCCESS":
            self.delivered += len(spans)
        return result

    def shutdown(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()


def _with_scheme(url: str) -> str:
    """Triton's examples write `localhost:4318/v1/traces`; its HTTP client then takes http."""
    return url if "://" in url else f"http://{url}"


def _otlp_exporter(url: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=url)


def _batch_processor(exporter: Any, options: dict[str, str]) -> Any:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # Without a value here the processor reads the OTEL_BSP_* environment variables.
    names = {
        "bsp_max_queue_size": "max_queue_size",
        "bsp_schedule_delay": "schedule_delay_millis",
        "bsp_max_export_batch_size": "max_export_batch_size",
    }
    given = {key: options[key] for key in names if key in options}
    try:
        sizes: dict[str, Any] = {names[key]: int(text) for key, text in given.items()}
        return BatchSpanProcessor(exporter, **sizes)
    except ValueError as error:
        shown = ", ".join(f"{key}={text}" for key, text in given.items())
        raise InvalidArgumentError(f"--trace-config opentelemetry,{shown}: {error}") from error
