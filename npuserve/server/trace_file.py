"""Traces as Triton's JSON file: one array, for each trace a header and its activities.

Formatting and writing happen in a helper thread; the event loop only hands traces over.
"""

from __future__ import annotations

import itertools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import orjson

from npuserve.errors import NpuserveError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npuserve.server.trace import Trace
    from npuserve.server.trace_settings import Sampler
    from npuserve.tensor import Tensor

logger = logging.getLogger(__name__)

# What waits at most, in requests and in bytes of their tensors, before it is written.
_MANY_TRACES = 100
_MANY_BYTES = 1 << 20


class TraceFile:
    """Exporter of the mode `triton`.

    Traces are kept by what chose them: `<path>.0`, `<path>.1` and so on hold as many requests as
    the log frequency says, or as were asked for by a count; all others are in `path`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers = itertools.count()
        self._waiting: dict[Sampler, _Waiting] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trace-file")
        self._rest = GrowingFile(path)

    def export(self, trace: Trace) -> None:
        """See `trace.Exporter.export`."""
        sampler = trace.sampler
        waiting = self._waiting.setdefault(sampler, _Waiting())
        waiting.add(trace)
        settings = sampler.settings
        if sampler.is_exhausted or 0 < settings.log_frequency <= len(waiting.traces):
            self._write_numbered(sampler)
        elif settings.count < 0 and not settings.log_frequency and waiting.is_much:
            # Differs from Triton: it keeps them all in memory until it ends.
            self._append(sampler)

    def settings_change(self, sampler: Sampler) -> None:
        """See `trace.Exporter.settings_change`: what the former settings brought is written."""
        if sampler not in self._waiting:
            return
        if sampler.settings.log_frequency:
            self._write_numbered(sampler)
        else:
            self._append(sampler)

    def close(self) -> None:
        """See `trace.Exporter.close`; waits for the writer."""
        for sampler in list(self._waiting):
            self.settings_change(sampler)
        self._writer.shutdown()

    def _write_numbered(self, sampler: Sampler) -> None:
        path = f"{self._path}.{next(self._numbers)}"
        self._writer.submit(write_traces, GrowingFile(path), self._waiting.pop(sampler).traces)

    def _append(self, sampler: Sampler) -> None:
        self._writer.submit(write_traces, self._rest, self._waiting.pop(sampler).traces)


class _Waiting:
    """Traces that wait for the others of their file."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []
        self._tensor_bytes = 0

    def add(self, trace: Trace) -> None:
        self.traces.append(trace)
        for part in _family(trace):
            self._tensor_bytes += sum(len(tensor.data) for _, tensor in part.tensors)

    @property
    def is_much(self) -> bool:
        return len(self.traces) >= _MANY_TRACES or self._tensor_bytes >= _MANY_BYTES


class GrowingFile:
    """A file that is one JSON array whenever nobody writes to it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._length = 0

    def append(self, parts: list[dict[str, Any]]) -> None:
        """Add elements; what was there before the first ones is lost.

        Raises:
            OSError: and the file is without them, or will be with the next ones.
        """
        text = orjson.dumps(parts)
        goes_on = self._length and self._is_there()
        with open(self.path, "r+b" if goes_on else "wb") as file:
            if goes_on:
                file.seek(self._length - 1)
                text = b"," + text[1:]
            file.write(text)
            length = file.tell()
            file.truncate()
        self._length = length

    def _is_there(self) -> bool:
        """Whether nobody has moved the file away, or emptied it, meanwhile."""
        try:
            return os.stat(self.path).st_size >= self._length
        except FileNotFoundError:
            return False


def write_traces(file: GrowingFile, traces: list[Trace]) -> None:
    """Append to a file; a failure is logged, as nobody looks at the outcome of the thread."""
    try:
        file.append([part for top in traces for t in _family(top) for part in trace_parts(t)])
    except Exception as error:
        logger.error("failed to write the trace file %s: %r", file.path, error)


def _family(trace: Trace) -> Iterator[Trace]:
    """The traces below it, a child's own children first, and then itself."""
    for child in trace.children:
        yield from _family(child)
    yield trace


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
