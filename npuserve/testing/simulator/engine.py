"""Executing a stand-in model: bytes in, bytes out, by onnxruntime."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npuserve.testing.simulator.om_file import NUMPY_BY_ACL, OmDescription, OmInput


@lru_cache(maxsize=64)
def _session(digest: bytes, onnx: bytes) -> Any:
    import onnxruntime

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

    def run(self, inputs: list[NDArray[np.uint8]], shapes: list[list[int]]) -> list[NDArray[Any]]:
        """Outputs for inputs given as bytes of these shapes."""
        feeds = {
            spec.name: _feed(spec, data, shape)
            for spec, data, shape in zip(self.description.inputs, inputs, shapes, strict=True)
        }
        results = self._session.run(self._outputs, feeds)
        return [
            np.ascontiguousarray(result).astype(NUMPY_BY_ACL[output.datatype], copy=False)
            for result, output in zip(results, self.description.outputs, strict=True)
        ]


def _feed(spec: OmInput, data: NDArray[np.uint8], shape: list[int]) -> NDArray[Any]:
    dtype = np.dtype(NUMPY_BY_ACL[spec.datatype])
    size = int(np.prod(shape)) * dtype.itemsize
    array = data[:size].view(dtype).reshape(shape)
    return preprocess(array, spec.aipp) if spec.aipp else array


def preprocess(image: NDArray[Any], aipp: dict[str, Any]) -> NDArray[np.float32]:
    """Static AIPP: a UINT8 image of layout NHWC to normalised FP32 of layout NCHW.

    pixel_out = (pixel_in - mean - min) * var_reci, a channel each.
    """
    if aipp["input_format"] == "YUV420SP_U8":
        image = _yuv420sp_to_rgb(image)
    if aipp.get("rbuv_swap_switch"):
        image = image[..., ::-1]
    channels = image.shape[-1]
    mean = np.array(aipp["mean"][:channels], np.float32)
    low = np.array(aipp["min"][:channels], np.float32)
    scale = np.array(aipp["var_reci"][:channels], np.float32)
    normal = (image.astype(np.float32) - mean - low) * scale
    return np.ascontiguousarray(normal.transpose(0, 3, 1, 2))


def _yuv420sp_to_rgb(image: NDArray[Any]) -> NDArray[Any]:
    """NV12 `[n, 1.5 h, w, 1]` to RGB `[n, h, w, 3]` (BT.601, full range)."""
    count, rows, width, _ = image.shape
    height = rows * 2 // 3
    luma = image[:, :height, :, 0].astype(np.float32)
    chroma = image[:, height:, :, 0].reshape(count, height // 2, width // 2, 2)
    chroma = chroma.repeat(2, axis=1).repeat(2, axis=2).astype(np.float32) - 128
    blue, red = chroma[..., 0], chroma[..., 1]
    rgb = np.stack(
        [luma + 1.402 * red, luma - 0.344 * blue - 0.714 * red, luma + 1.772 * blue], axis=-1
    )
    pixels: NDArray[Any] = np.clip(np.rint(rgb), 0, 255)
    return pixels.astype(np.uint8)
