"""The onnxruntime backend: gathers a batch, runs the session once, scatters views of the outputs.

Every instance has a thread of its own; onnxruntime lets go of the GIL while it computes. What
the session is made of stands in `onnx_session.py`.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.backends import onnx_session
from npuserve.backends.base import Backend, BackendModelContext, ExecutionBatch, ModelInstance
from npuserve.backends.batch_arrays import InputGatherer, cut_rows, split_by_inputs
from npuserve.backends.batch_input import BatchTensors, join_ragged
from npuserve.backends.model_signature import (
    ModelTensor,
    check_config,
    complete_config,
    default_max_batch_size,
    scheduler_output_names,
)
from npuserve.errors import InvalidArgumentError, NpuserveError
from npuserve.response import InferenceResponse
from npuserve.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from npuserve.backends.base import Placement
    from npuserve.request import InferenceRequest

_ONNX_BFLOAT16 = 16  # TensorProto.BFLOAT16


class OnnxruntimeInstance(ModelInstance):
    """One instance.

    Args:
        session: an open session that other instances may use too; None to open one for this
            instance alone, in its own thread.
    """

    def __init__(self, context: BackendModelContext, placement: Placement, session: Any) -> None:
        self._context = context
        self._placement = placement
        self._session = session
        self._inputs: dict[str, ModelTensor] = {}
        self._outputs: dict[str, ModelTensor] = {}
        self._states = scheduler_output_names(context.config)
        self._batching = context.config.max_batch_size > 0
        self._gatherer = InputGatherer()
        self._batch_tensors = BatchTensors(context.config)
        self._run_options: Any = None
        self._has_bf16 = False

    def initialize(self) -> None:
        """See `ModelInstance.initialize`."""
        if self._session is None:
            self._session = onnx_session.open_session(self._context, self._placement)
        signature = onnx_session.signature_of(self._session, self._context.name)
        config = self._context.config
        served = {output.name for output in config.output} | self._states
        self._inputs = {tensor.name: tensor for tensor in signature.inputs}
        self._outputs = {t.name: t for t in signature.outputs if t.name in served}
        self._has_bf16 = any(
            tensor.datatype == "BF16" for tensor in (*signature.inputs, *self._outputs.values())
        )
        self._run_options = onnx_session.run_options(self._context)

    def execute(self, batch: ExecutionBatch) -> None:
        """See `ModelInstance.execute`."""
        for requests in split_by_inputs(batch.requests, self._batching):
            try:
                self._run(batch, requests)
            except NpuserveError as error:
                for request in requests:
                    batch.send(request, InferenceResponse.from_error(error))

    def finalize(self) -> None:
        """See `ModelInstance.finalize`."""
        self._session = None

    def _run(self, batch: ExecutionBatch, requests: Sequence[InferenceRequest]) -> None:
        feeds = {
            name: self._feed(self._inputs[name], [r.inputs[name] for r in requests])
            for name in requests[0].inputs
        }
        feeds.update(self._batch_tensors.inputs(requests))
        names = self._wanted(requests)
        batch.input_ready()
        arrays = self._compute(names, feeds)
        batch.output_ready()
        parts = [self._cut(name, a, requests) for name, a in zip(names, arrays, strict=True)]
        for index, request in enumerate(requests):
            wanted = request.requested_outputs
            outputs = [
                Tensor.from_numpy(name, own[index], self._outputs[name].datatype)
                for name, own in zip(names, parts, strict=True)
                if not wanted or name in wanted or name in self._states
            ]
            batch.send(request, InferenceResponse(outputs))

    def _cut(
        self, name: str, array: NDArray[Any], requests: Sequence[InferenceRequest]
    ) -> list[NDArray[Any]]:
        """The part of an output of the whole batch that belongs to each request."""
        if not self._batching:
            return [array]
        scattered = self._batch_tensors.scatter(name, array, requests)
        return scattered or cut_rows(name, array, requests)

    def _wanted(self, requests: Sequence[InferenceRequest]) -> list[str]:
        """Outputs to compute: what any of the requests asks for, and states."""
        if any(not request.requested_outputs for request in requests):
            return list(self._outputs)
        asked = {name for request in requests for name in request.requested_outputs}
        return [name for name in self._outputs if name in asked or name in self._states]

    def _feed(self, spec: ModelTensor, tensors: Sequence[Tensor]) -> NDArray[Any]:
        if spec.name in self._batch_tensors.ragged:
            array = join_ragged(tensors)
        else:
            array = self._gatherer.gather(tensors)
        if spec.datatype == "BYTES":
            return _decoded(array, spec.name)
        if not spec.shape and array.size == 1:  # a scalar, which configurations call [1]
            return array.reshape(())
        return array

    def _compute(self, names: list[str], feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """One run of the session; every array has at least one dimension.

        Raises:
            InvalidArgumentError: the shapes do not suit the model.
            InternalError: any other failure of onnxruntime.
        """
        try:
            if self._has_bf16:
                arrays = self._compute_values(names, feeds)
            else:
                arrays = self._session.run(names, feeds, self._run_options)
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise onnx_session.as_npuserve_error(error) from error
        # A scalar goes out as one element, as its configuration has to say.
        return [np.atleast_1d(array) for array in arrays]

    def _compute_values(
        self, names: list[str], feeds: dict[str, NDArray[Any]]
    ) -> list[NDArray[Any]]:
        """A run with BF16 tensors, which NumPy cannot hold: their bits travel as uint16."""
        make = onnx_session.runtime().OrtValue
        values = {
            name: make.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(a), _ONNX_BFLOAT16)
            if self._inputs[name].datatype == "BF16"
            else make.ortvalue_from_numpy(a)
            for name, a in feeds.items()
        }
        results = self._session.run_with_ort_values(names, values, self._run_options)
        return [
            _bfloat16_bits(value) if self._outputs[name].datatype == "BF16" else value.numpy()
            for name, value in zip(names, results, strict=True)
        ]


class OnnxruntimeBackend(Backend):
    """Backend named `onnxruntime` (platform `onnxruntime_onnx`)."""

    def auto_complete(self, context: BackendModelContext) -> None:
        """See `Backend.auto_complete`.

        Raises:
            NpuserveError: the file cannot be read, or the configuration contradicts it.
        """
        signature = onnx_session.read_signature(context)
        default = default_max_batch_size(context.backend_options)
        complete_config(context.config, signature, default)

    def load(self, context: BackendModelContext) -> Sequence[ModelInstance]:
        """See `Backend.load`.

        Raises:
            NpuserveError: the file cannot be read, or the configuration contradicts it.
        """
        check_config(context.config, onnx_session.read_signature(context))
        shared: Any = None
        instances = []
        for placement in context.placements:
            session = None
            if onnx_session.shares_session(context, placement):
                if shared is None:
                    shared = onnx_session.open_session(context, placement)
                session = shared
            instances.append(OnnxruntimeInstance(context, placement, session))
        return instances


def _decoded(array: NDArray[Any], name: str) -> NDArray[Any]:
    """Text as onnxruntime takes it: its Python interface knows str only.

    # Differs from Triton: bytes that are no UTF-8 are refused, not passed on.
    """
    texts = np.empty(array.shape, np.object_)
    try:
        texts.reshape(-1)[:] = [element.decode() for element in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"input '{name}' holds text that is no UTF-8: {error}"
        ) from error
    return texts


def _bfloat16_bits(value: Any) -> NDArray[np.uint16]:
    """A copy of a BF16 OrtValue; `numpy()` of it is not there."""
    shape = tuple(value.shape())
    data = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(data, np.uint16).reshape(shape)
