"""Traces as Triton's JSON file: one array, for each trace a header and its activities.

Formatting and writing happen in a helper thread; the event loop only hands traces over.
"""

from __future__ import annotations

import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from npuserve.errors import NpuserveError

if TYPE_CHECKING:
    from npuserve.server.trace import Trace
    from npuserve.tensor import Tensor

logger = logging.getLogger(__name__)


class TraceFile:
    """Exporter of the mode `triton`.

    Args:
        path: with a log frequency of n, `<path>.0`, `<path>.1` and so on hold n traces each;
            without one everything is written to `path` at the end.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers = itertools.count()
        self._traces: list[Trace] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trace-file")

    def export(self, trace: Trace) -> None:
        """See `trace.Exporter.export`."""
        self._traces.append(trace)
        frequency = trace.settings.log_frequency
        if frequency and len(self._traces) >= frequency:
            self._write(f"{self._path}.{next(self._numbers)}")

    def close(self) -> None:
        """See `trace.Exporter.close`; waits for the writer."""
        if self._traces:
            self._write(self._path)
        self._writer.shutdown()

    def _write(self, path: str) -> None:
        traces, self._traces = self._traces, []
        self._writer.submit(write_traces, path, traces)


def write_traces(path: str, traces: list[Trace]) -> None:
    """Write one file; a failure is logged, as nobody looks at the outcome of the thread."""
    try:
        Path(path).write_bytes(orjson.dumps([part for t in traces for part in trace_parts(t)]))
    except Exception as error:
        logger.error("failed to write the trace file %s: %r", path, error)


def trace_parts(trace: Trace) -> list[dict[str, Any]]:
    """The elements of the array that stand for one trace."""
    header: dict[str, Any] = {
        "id": trace.id,
        "model_name": trace.model_name,
        "model_version": trace.model_version,
    }
    if trace.request_id:
        header["request_id"] = trace.request_id
    if trace.parent is not None:
        header["parent_id"] = trace.parent.id
    parts = [header]
    for name, ns in sorted(trace.timestamps, key=lambda mark: mark[1]):
        parts.append({"id": trace.id, "timestamps": [{"name": name, "ns": ns}]})
    for activity, tensor in trace.tensors:
        parts.append({"id": trace.id, "activity": activity, "tensor": _tensor(tensor)})
    return parts


def _tensor(tensor: Tensor) -> dict[str, str]:
    return {
        "name": tensor.name,
        "data": _data(tensor),
        "shape": ",".join(str(dim) for dim in tensor.shape),
        "dtype": str(tensor.datatype),
    }


def _data(tensor: Tensor) -> str:
    try:
        values = tensor.as_numpy().reshape(-1).tolist()
    except NpuserveError as error:  # the model wrote something else
        return str(error)
    return ",".join(
        value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        for value in values
    )
