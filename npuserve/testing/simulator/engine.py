"""Executing a stand-in model: bytes in, bytes out, by onnxruntime."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npuserve.testing.simulator.aipp import AippParams, from_config, preprocess, sized
from npuserve.testing.simulator.om_file import NUMPY_BY_ACL, OmDescription, OmInput


@lru_cache(maxsize=64)
def _session(digest: bytes, onnx: bytes) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            f"the NPU simulator needs onnxruntime ({error}): pip install 'npuserve[npu-sim]'"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])


def open_session(onnx: bytes) -> Any:
    """An onnxruntime session; the same one for the same bytes.

    Raises:
        Exception: onnxruntime's own, when the bytes are no valid model.
    """
    return _session(hashlib.sha256(onnx).digest(), onnx)


class Engine:
    """A compiled model that can run."""

    def __init__(self, description: OmDescription, onnx: bytes) -> None:
        self.description = description
        self._session = open_session(onnx)
        self._outputs = [output.name.rsplit(":", 1)[-1] for output in description.outputs]

    def run(
        self, inputs: list[NDArray[np.uint8]], shapes: list[list[int]],
        dynamic_aipp: Mapping[int, AippParams],
    ) -> list[NDArray[Any]]:  # fmt: skip
        """Outputs for inputs given as bytes of these shapes.

        Args:
            dynamic_aipp: settings of the inputs that have dynamic AIPP.
        """
        feeds = {
            spec.name: _feed(spec, data, shape, dynamic_aipp.get(index))
            for index, (spec, data, shape) in enumerate(
                zip(self.description.inputs, inputs, shapes, strict=True)
            )
        }
        results = self._session.run(self._outputs, feeds)
        return [
            np.ascontiguousarray(result).astype(NUMPY_BY_ACL[output.datatype], copy=False)
            for result, output in zip(results, self.description.outputs, strict=True)
        ]


def _feed(
    spec: OmInput, data: NDArray[np.uint8], shape: list[int], aipp: AippParams | None
) -> NDArray[Any]:
    if aipp is not None:
        return preprocess(data, aipp, spec.model_shape[1])
    dtype = np.dtype(NUMPY_BY_ACL[spec.datatype])
    size = int(np.prod(shape)) * dtype.itemsize
    array = data[:size].view(dtype).reshape(shape)
    if not spec.aipp:
        return array
    return preprocess(data[:size], sized(from_config(spec.aipp), shape), spec.model_shape[1])
