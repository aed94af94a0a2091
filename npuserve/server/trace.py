"""Traces: which requests are sampled, what is noted of them, and where it goes.

Costs nothing when off: `Tracer.active` is False, and the rest of the server asks `request.trace is
None`. A sampled request carries a `Trace`; layers `mark` moments on it, and when its final
response and those of the requests made on its behalf are out it is handed to the exporter: Triton's
JSON file or OpenTelemetry.

Source: Triton server src/tracer.cc.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from npuserve.errors import InvalidArgumentError, UnsupportedError
from npuserve.server.trace_settings import (
    SETTINGS,
    Sampler,
    SettingValue,
    TraceSettings,
    known_levels,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npuserve.options import ServerOptions
    from npuserve.request import InferenceRequest, ResponseCallback
    from npuserve.response import InferenceResponse
    from npuserve.tensor import Tensor

_now_ns = time.monotonic_ns


class TraceContext:
    """W3C trace context a client sent; stands in `request.trace` until the request is accepted."""

    __slots__ = ("traceparent", "tracestate")

    def __init__(self, traceparent: str, tracestate: str = "") -> None:
        self.traceparent = traceparent
        self.tracestate = tracestate


class Exporter(Protocol):
    """Takes finished traces."""

    def export(self, trace: Trace) -> None:
        """Take one trace, all of whose children have ended; must not block.

        It has no parent, or began when that one had been exported already.
        """

    def settings_change(self, sampler: Sampler) -> None:
        """The settings of a sampler are about to be replaced; must not block."""

    def close(self) -> None:
        """Write what is left."""


class Trace:
    """What is noted of one request.

    Attributes:
        id: running number, from 1.
        parent: trace of the ensemble or BLS request it belongs to, None at the top.
        children: traces of the requests made on behalf of this one.
        sampler: what chose it, or its topmost parent.
        timestamps: (name, monotonic ns), in no particular order.
        tensors: (activity, tensor) pairs at level TENSORS.
        client: W3C context the client sent.
        span: set by the OpenTelemetry exporter once this trace is exported.
    """

    __slots__ = (
        "_ended", "_executing", "_exporter", "_open", "_top", "children", "client", "id",
        "model_name", "model_version", "parent", "request_id", "sampler", "settings", "span",
        "tensors", "timestamps",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        parent: Trace | None,
        request: InferenceRequest,
        sampler: Sampler,
        exporter: Exporter,
        client: TraceContext | None = None,
    ) -> None:
        self.id = id
        self.parent = parent
        self.children: list[Trace] = []
        self.sampler = sampler
        self._top = self  # what it is exported with
        self._open = 0  # traces to be exported with this one that have not ended
        if parent is not None and parent._top._open:
            self._top = parent._top
            parent.children.append(self)
        self._top._open += 1
        self.request_id = request.id
        self.model_name = request.model_name
        self.model_version = request.model_version
        self.settings: TraceSettings = sampler.settings if parent is None else parent.settings
        self.client = client
        self.span: object = None
        self.timestamps: list[tuple[str, int]] = []
        self.tensors: list[tuple[str, Tensor]] = []
        self._exporter = exporter
        self._executing = False
        self._ended = False  # the final response is out

    @property
    def context(self) -> str | None:
        """The client's W3C context as model code sees it, JSON; None if there was none."""
        if self.client is None:
            return None
        names = ("traceparent", "tracestate")
        return json.dumps({name: getattr(self.client, name) for name in names})

    def mark(self, name: str, ns: int = 0) -> None:
        """Note a moment; now without `ns` (monotonic)."""
        self.timestamps.append((name, ns or _now_ns()))

    def begin_execution(self, request: InferenceRequest) -> None:
        """The batch of the request was handed to an instance."""
        self._executing = True
        if "TENSORS" in self.settings.levels:
            self.tensors += [("TENSOR_BACKEND_INPUT", t) for t in request.inputs.values()]

    def executed(
        self, request: InferenceRequest, start_ns: int, input_ns: int, output_ns: int, end_ns: int
    ) -> None:
        """The batch ended, perhaps after the request's final response.

        For a request answered before, its computation ended with the answer.
        """
        self._executing = False
        if self._ended:
            answers = [ns for name, ns in self.timestamps if name == "INFER_RESPONSE_COMPLETE"]
            end_ns = max(output_ns, min([end_ns, *answers[-1:]]))
        self.timestamps += (
            ("COMPUTE_START", start_ns),
            ("COMPUTE_INPUT_END", input_ns),
            ("COMPUTE_OUTPUT_START", output_ns),
            ("COMPUTE_END", end_ns),
        )
        if self._ended:
            self._hand_over(request)

    def end(self, request: InferenceRequest) -> None:
        """The final response is out."""
        self._ended = True
        if not self._executing:
            self._hand_over(request)

    def _hand_over(self, request: InferenceRequest) -> None:
        if request.model is not None:
            self.model_version = request.model.version
        if "TIMESTAMPS" in self.settings.levels:
            self.mark("REQUEST_START", request.start_ns)
            self.mark("QUEUE_START", request.queue_ns)
            self.mark("REQUEST_END")
        else:
            self.timestamps.clear()
        self._top._open -= 1
        if not self._top._open:
            if self._top.parent is None:
                self.sampler.open -= 1
            self._exporter.export(self._top)


class Tracer:
    """Trace settings and sampling of the server. Loop thread only.

    Attributes:
        active: whether any model is traced at all; front ends ask it before they read a clock.
    """

    def __init__(self, options: ServerOptions) -> None:
        config = options.trace_config
        self.active = False
        self._config = config
        self._start_up = TraceSettings(
            known_levels(config.level), config.rate, config.count, config.log_frequency
        )
        self._global = Sampler(self._start_up)
        # What was set for single models; a model's sampler exists as long as it has any.
        self._overrides: dict[str, dict[str, object]] = {}
        self._samplers: dict[str, Sampler] = {}
        self._ids = itertools.count(1)
        self._exporter: Exporter | None = None
        if config.mode == "opentelemetry":
            self._open()  # its imports take long enough to be felt by requests
        self._refresh()

    # ---------------------------------------------------------------- sampling

    def attach(self, request: InferenceRequest) -> None:
        """Decide whether this request is traced, and if so begin.

        A request made on behalf of another one is traced if that one is.
        """
        client = request.trace if isinstance(request.trace, TraceContext) else None
        parent = request.parent
        if parent is not None:
            if not isinstance(parent.trace, Trace):
                return
            above = parent.trace
            trace = self._begin(request, above.sampler, above, above.client)
        else:
            sampler = self._samplers.get(request.model_name, self._global)
            if not sampler.sample():
                request.trace = None
                return
            trace = self._begin(request, sampler, None, client)
        request.trace = trace
        request.on_response = partial(_respond, request, trace, request.on_response)
        if "TENSORS" in trace.settings.levels:
            trace.tensors += [("TENSOR_QUEUE_INPUT", t) for t in request.inputs.values()]

    def refused(self, request: InferenceRequest) -> None:
        """End the trace of a request that no scheduler took: it will have no response."""
        if isinstance(request.trace, Trace):
            request.trace.end(request)

    def _begin(
        self,
        request: InferenceRequest,
        sampler: Sampler,
        parent: Trace | None,
        client: TraceContext | None,
    ) -> Trace:
        return Trace(next(self._ids), parent, request, sampler, self._open(), client)

    def _open(self) -> Exporter:
        if self._exporter is None:
            # Imported here: neither costs a server without traces anything.
            if self._config.mode == "opentelemetry":
                from npuserve.server.trace_opentelemetry import OpenTelemetryExporter

                self._exporter = OpenTelemetryExporter(self._config.opentelemetry)
            else:
                from npuserve.server.trace_file import TraceFile

                self._exporter = TraceFile(self._config.file)
        return self._exporter

    def close(self) -> None:
        """Write what is left; nothing is traced afterwards."""
        self.active = False
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None

    # ---------------------------------------------------------------- settings

    def settings(self, model: str = "") -> dict[str, SettingValue]:
        """The settings of a model (of all without a name), as the protocol shows them."""
        current = self._samplers.get(model, self._global).settings
        shown: dict[str, SettingValue] = {
            "trace_level": list(current.levels) or ["OFF"],
            "trace_rate": str(current.rate),
            "trace_count": str(current.count),
        }
        if self._config.mode == "opentelemetry":
            shown |= {"trace_mode": "opentelemetry", **dict(self._config.opentelemetry)}
        else:
            shown |= {
                "log_frequency": str(current.log_frequency),
                "trace_file": self._config.file,
                "trace_mode": "triton",
            }
        return shown

    def update(self, changes: Mapping[str, SettingValue | None], model: str = "") -> None:
        """Change settings; nothing is changed if one of them is refused.

        Args:
            changes: by name; None or an empty list clears a setting: a model's falls back to that
                of all, that of all to its start-up value. Unknown names are ignored.
            model: the model it is for; "" for all models without settings of their own.

        Raises:
            InvalidArgumentError: a value that cannot be read or makes no sense.
            UnsupportedError: the file cannot be changed while the server runs.
        """
        if "trace_file" in changes:
            raise UnsupportedError(
                "trace file location can not be updated through network protocol"
            )
        parsed = {
            field: None if value is None or value == [] else parse(key, value)
            for key, (field, parse) in SETTINGS.items()
            if key in changes
            for value in (changes[key],)
        }
        if model:
            self._update_model(model, parsed)
        else:
            self._update_global(parsed)
        self._refresh()

    def _update_global(self, parsed: Mapping[str, object]) -> None:
        values = {
            field: getattr(self._start_up, field) if value is None else value
            for field, value in parsed.items()
        }
        settings = self._checked(
            replace(self._global.settings, **values)  # type: ignore[arg-type]  # parsed above
        )
        self._set(self._global, settings)
        for model, overrides in self._overrides.items():
            self._set(self._samplers[model], self._merged(overrides))

    def _update_model(self, model: str, parsed: Mapping[str, object]) -> None:
        overrides = {**self._overrides.get(model, {}), **parsed}
        overrides = {field: value for field, value in overrides.items() if value is not None}
        settings = self._checked(self._merged(overrides))
        if overrides:
            self._overrides[model] = overrides
            self._set(self._samplers.setdefault(model, Sampler(settings)), settings)
        else:
            self._overrides.pop(model, None)
            former = self._samplers.pop(model, None)
            if former is not None:
                self._set(former, former.settings)

    def _set(self, sampler: Sampler, settings: TraceSettings) -> None:
        if self._exporter is not None:
            self._exporter.settings_change(sampler)
        sampler.settings = settings

    def _merged(self, overrides: Mapping[str, object]) -> TraceSettings:
        return replace(self._global.settings, **overrides)  # type: ignore[arg-type]  # as parsed

    def _checked(self, settings: TraceSettings) -> TraceSettings:
        invalid = "Attempting to set invalid trace setting :"
        if not settings.rate:
            raise InvalidArgumentError(invalid + "sample rate must be non-zero")
        if settings.levels and self._config.mode == "triton" and not self._config.file:
            raise InvalidArgumentError(invalid + "trace file name is not given")
        return settings

    def _refresh(self) -> None:
        samplers = (self._global, *self._samplers.values())
        self.active = any(sampler.settings.levels for sampler in samplers)


def _respond(
    request: InferenceRequest,
    trace: Trace,
    callback: ResponseCallback,
    response: InferenceResponse | None,
    final: bool,
) -> None:
    """Stands in front of the callback of a traced request."""
    if response is not None:
        trace.mark("INFER_RESPONSE_COMPLETE")
        if "TENSORS" in trace.settings.levels:
            trace.tensors += [("TENSOR_BACKEND_OUTPUT", t) for t in response.outputs]
    try:
        callback(response, final)
    finally:
        if final:
            trace.end(request)
