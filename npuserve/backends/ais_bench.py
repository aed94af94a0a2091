"""The other engine of `om`: `InferSession` of ais_bench, for users who have it.

Slower than acl: it executes synchronously and holds the GIL meanwhile, so an instance stops the
whole process for the length of an inference. Parameters in config.pbtxt:

    mode          static, dymbatch, dymhw, dymdims or dymshape; found out by default, where the
                  file says enough (static or dymshape)
    gears         batch sizes of a dymbatch model, such as "1,2,4,8": batches are padded to the
                  next one; ais_bench itself does not tell them
    custom_sizes  bytes of each output of a dymshape model, one number or one per output

Source of names and limits: ais_bench, interface.py of 2023 and later.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.backends.acl.codes import DATATYPE_BY_ACL, DYNAMIC_TENSOR_NAME
from npuserve.backends.base import BackendModelContext, ExecutionBatch, ModelInstance
from npuserve.backends.batch_input import BatchTensors
from npuserve.backends.model_signature import (
    ModelSignature,
    ModelTensor,
    complete_config,
    default_max_batch_size,
    scheduler_output_names,
)
from npuserve.backends.npu_batch import Group, OutputWriter, group_requests, sizes_of
from npuserve.errors import (
    InternalError,
    InvalidArgumentError,
    InvalidConfigError,
    NpuserveError,
    UnavailableError,
)
from npuserve.response import InferenceResponse
from npuserve.tensor import NUMPY_DTYPE

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

MODES = ("static", "dymbatch", "dymhw", "dymdims", "dymshape")


def open_session(path: Path, device_id: int) -> Any:
    """An `InferSession`.

    Raises:
        UnavailableError: ais_bench is not there.
        InternalError: it refused the model.
    """
    try:
        interface = importlib.import_module("ais_bench.infer.interface")
    except ImportError as error:
        raise UnavailableError(
            f"engine ais_bench cannot be imported ({error}): install its wheels (aclruntime and "
            "ais_bench, see the README of Ascend/tools), or use engine: acl"
        ) from error
    try:
        return interface.InferSession(device_id, str(path))
    except Exception as error:  # aclruntime raises what it likes
        raise InternalError(f"ais_bench cannot load '{path.name}': {error}") from error


def close_session(session: Any) -> None:
    """Free the model, not the whole process's runtime; older releases have no way to."""
    if hasattr(session, "free_resource"):
        session.free_resource()


def _datatype(tensor: Any) -> str:
    number = int(tensor.datatype)
    if number not in DATATYPE_BY_ACL:
        raise InvalidArgumentError(f"tensor '{tensor.name}' has the acl data type {number}")
    return DATATYPE_BY_ACL[number]


def _signature(session: Any, batching: bool) -> ModelSignature:
    def read(tensors: list[Any], is_output: bool) -> tuple[ModelTensor, ...]:
        return tuple(
            ModelTensor(
                tensor.name.rsplit(":", 1)[-1] if is_output else tensor.name,
                _datatype(tensor),
                (-1, *tensor.shape[1:]) if batching else tuple(tensor.shape),
            )
            for tensor in tensors
            if tensor.name != DYNAMIC_TENSOR_NAME
        )

    return ModelSignature(read(session.get_inputs(), False), read(session.get_outputs(), True))


def complete_from_session(context: BackendModelContext, path: Path, device_id: int) -> None:
    """Fill the configuration from what ais_bench says of the file."""
    session = open_session(path, device_id)
    try:
        signature = _signature(session, context.config.max_batch_size > 0)
        default = default_max_batch_size(context.backend_options)
        complete_config(context.config, signature, default)
    finally:
        close_session(session)


class AisBenchInstance(ModelInstance):
    """One session in the thread of the instance."""

    def __init__(self, context: BackendModelContext, path: Path, device_id: int) -> None:
        self._context = context
        self._path = path
        self._device_id = device_id
        self._session: Any = None
        self._batching = context.config.max_batch_size > 0
        self._batch_tensors = BatchTensors(context.config)  # none: refused at load
        self._mode = ""
        self._gears = _gears(context.parameters.get("gears", ""))
        self._custom_sizes = _custom_sizes(context.parameters.get("custom_sizes", "100000"))
        self._input_names: list[str] = []
        self._output_names: list[str] = []
        self._static_rows = 0
        self._writer: OutputWriter

    def initialize(self) -> None:
        """See `ModelInstance.initialize`."""
        self._session = open_session(self._path, self._device_id)
        signature = _signature(self._session, batching=False)
        shapes = [tensor.shape for tensor in signature.inputs]
        self._mode = self._choose_mode(any(-1 in shape for shape in shapes))
        if self._mode == "static" and self._batching:
            self._static_rows = shapes[0][0]
        self._input_names = [tensor.name for tensor in signature.inputs]
        self._output_names = [tensor.name for tensor in signature.outputs]
        served = {output.name for output in self._context.config.output}
        states = scheduler_output_names(self._context.config)
        datatypes = {t.name: t.datatype for t in signature.outputs if t.name in served | states}
        services = self._context.services
        pool = None if services is None else services.buffer_pool
        self._writer = OutputWriter(datatypes, states, pool, self._batch_tensors)

    def _choose_mode(self, is_dynamic: bool) -> str:
        mode = self._context.parameters.get("mode")
        if mode is None:
            if is_dynamic and self._gears:
                return "dymbatch"
            return "dymshape" if is_dynamic else "static"
        if mode not in MODES:
            raise InvalidConfigError.of_parameter(
                "mode", f"parameter 'mode' is '{mode}'; ais_bench has {', '.join(MODES)}"
            )
        return mode

    def execute(self, batch: ExecutionBatch) -> None:
        """See `ModelInstance.execute`."""
        groups, refused = group_requests(
            batch.requests, self._input_names, self._batching, self._batch_tensors
        )
        for request, error in refused:
            batch.send(request, InferenceResponse.from_error(error))
        batch.input_ready()
        for group in groups:
            try:
                self._run(group)
            except NpuserveError as error:
                group.fail(error)
        batch.output_ready()
        for group in groups:
            for index, request in enumerate(group.requests):
                batch.send(request, self._writer.response(group, index))

    def finalize(self) -> None:
        """See `ModelInstance.finalize`."""
        session, self._session = self._session, None
        if session is not None:
            close_session(session)

    def _run(self, group: Group) -> None:
        feeds = [self._feed(group, name) for name in self._input_names]
        if not group.rows:
            self._infer(group, feeds, 0, 0)
            return
        limit = self._static_rows or max(self._gears, default=group.rows)
        for start in range(0, group.rows, limit):
            stop = min(start + limit, group.rows)
            rows = self._padded_rows(stop - start)
            parts = [_pad(feed[start:stop], rows) for feed in feeds]
            self._infer(group, parts, start, stop)

    def _padded_rows(self, rows: int) -> int:
        if self._static_rows:
            return self._static_rows
        return min((gear for gear in self._gears if gear >= rows), default=rows)

    def _feed(self, group: Group, name: str) -> NDArray[Any]:
        # ais_bench takes any bytes of the right number: the datatype is checked by the server,
        # the byte count by as_numpy.
        arrays = [request.inputs[name].as_numpy() for request in group.requests]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def _infer(self, group: Group, feeds: list[NDArray[Any]], start: int, stop: int) -> None:
        sizes = {"custom_sizes": self._custom_sizes} if self._mode == "dymshape" else {}
        try:
            results = self._session.infer(feeds, mode=self._mode, **sizes)
        except Exception as error:  # aclruntime raises what it likes
            raise InternalError(f"ais_bench failed: {error}") from error
        for name, result in zip(self._output_names, results, strict=True):
            datatype = self._writer.datatypes.get(name)
            if datatype is not None:
                dtype = NUMPY_DTYPE[datatype]
                array = np.ascontiguousarray(result).astype(dtype, copy=False)
                as_bytes = array.reshape(*array.shape, 1).view(np.uint8)
                self._writer.take(group, start, stop, name, as_bytes)


def _pad(array: NDArray[Any], rows: int) -> NDArray[Any]:
    if array.shape[0] == rows:
        return array
    padding = np.zeros((rows - array.shape[0], *array.shape[1:]), array.dtype)
    return np.concatenate([array, padding])


def _gears(text: str) -> list[int]:
    try:
        return sizes_of(text) if text.strip() else []
    except ValueError as error:
        raise InvalidConfigError.of_parameter(
            "gears", f"parameter 'gears' is '{text}'; batch sizes are expected"
        ) from error


def _custom_sizes(text: str) -> int | list[int]:
    try:
        sizes_of(text)
        sizes = [int(part) for part in text.split(",")]  # one for each output, in their order
    except ValueError as error:
        raise InvalidConfigError.of_parameter(
            "custom_sizes", f"parameter 'custom_sizes' is '{text}'; numbers of bytes are expected"
        ) from error
    return sizes[0] if len(sizes) == 1 else sizes
