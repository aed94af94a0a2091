"""Custom metrics of triton_python_backend_utils: the model's handles to the server's registry.

Values live in the server. Changes are sent without waiting, since what can be wrong with them is
checked here; only `value` waits. Behaviour and texts: Triton python_backend, src/metric.cc,
src/metric_family.cc.
"""

from __future__ import annotations

import enum
import itertools
from typing import TYPE_CHECKING, Any

from npuserve.backends.worker import wire
from npuserve.backends.worker.pb_tensor import TritonModelException

if TYPE_CHECKING:
    from npuserve.backends.worker.port import Port

_ids = itertools.count(1)

_FAMILY_DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The "
    "'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have been "
    "deleted."
)


class MetricKind(enum.Enum):
    """Kind of a metric family."""

    COUNTER = "COUNTER"
    GAUGE = "GAUGE"
    HISTOGRAM = "HISTOGRAM"


class MetricFamily:
    """A named family of metrics, shared with every model that makes the same one."""

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    _port: Port  # set by `pb_utils.bind` on the class that a model sees

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self._id = 0  # before anything can fail: __del__ looks at it
        self._port = self._port  # now: that of the class may be another one later (loader.py)
        if not isinstance(kind, MetricKind):
            raise TypeError("kind must be MetricFamily.COUNTER, GAUGE or HISTOGRAM")
        self._kind = kind
        self._alive = [True]  # shared with the metrics, which must not keep the family alive
        handle = next(_ids)
        name, description = wire.text(name, "name"), wire.text(description, "description")
        self._port.call("metric_family_new", handle, name, description, kind.value)
        self._id = handle

    def Metric(  # noqa: N802 - the name models call
        self, labels: dict[str, str] | None = None, buckets: list[float] | None = None
    ) -> Metric:
        """The time series with these labels; the same labels give the same series."""
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        histogram = self._kind is MetricKind.HISTOGRAM
        if buckets is not None and not histogram:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        if buckets is None and histogram:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        handle = next(_ids)
        texts = {str(key): str(value) for key, value in (labels or {}).items()}
        bounds = None if buckets is None else [float(bound) for bound in buckets]
        self._port.call("metric_new", handle, self._id, texts, bounds)
        return Metric(self._port, handle, self._kind, self._alive)

    def __del__(self) -> None:
        if self._id:
            self._alive[0] = False
            self._port.notify("metric_family_delete", self._id)


class Metric:
    """One time series. Made by `MetricFamily.Metric`."""

    def __init__(self, port: Port, handle: int, kind: MetricKind, alive: list[bool]) -> None:
        self._port = port
        self._id = handle
        self._kind = kind
        self._family_alive = alive

    def increment(self, value: float) -> None:
        """Add to a counter (not negative) or a gauge."""
        prefix = "Failed to increment metric value: "
        self._check(prefix)
        if self._kind is MetricKind.HISTOGRAM:
            raise TritonModelException(
                f"{prefix}TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Increment"
            )
        if self._kind is MetricKind.COUNTER and not value >= 0:
            raise TritonModelException(
                f"{prefix}TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically "
                "by non-negative values."
            )
        self._change("metric_increment", value)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._check("Failed to set metric value: ")
        if self._kind is not MetricKind.GAUGE:
            raise TritonModelException(
                "Failed to set metric value: "
                f"TRITONSERVER_METRIC_KIND_{self._kind.value} does not support Set"
            )
        self._change("metric_set", value)

    def observe(self, value: float) -> None:
        """Add an observation to a histogram."""
        self._check("Failed to observe metric value: ")
        if self._kind is not MetricKind.HISTOGRAM:
            raise TritonModelException(
                "Failed to observe metric value: "
                f"TRITONSERVER_METRIC_KIND_{self._kind.value} does not support Observe"
            )
        self._change("metric_observe", value)

    def value(self) -> float:
        """The current value of a counter or a gauge."""
        self._check("Failed to get metric value: ")
        if self._kind is MetricKind.HISTOGRAM:
            raise TritonModelException(
                "Failed to get metric value: "
                "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value"
            )
        result: float = self._port.call("metric_value", self._id)
        return result

    def _check(self, prefix: str) -> None:
        if not self._family_alive[0]:
            raise TritonModelException(prefix + _FAMILY_DELETED)

    def _change(self, method: str, value: Any) -> None:
        self._port.notify(method, self._id, float(value))

    def __del__(self) -> None:
        self._port.notify("metric_delete", self._id)
