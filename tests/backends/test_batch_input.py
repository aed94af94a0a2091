"""Batch inputs, batch outputs and ragged inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper

from npuserve.backends.batch_input import BatchTensors, join_ragged
from npuserve.backends.onnxruntime import OnnxruntimeBackend
from npuserve.errors import InternalError
from npuserve.model_config import ModelConfig
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.tensor import Tensor
from npuserve.testing.backend_driver import BackendDriver
from tests.backends import onnx_models


def ignore(response: InferenceResponse | None, final: bool) -> None:
    pass


def request(*shape: int) -> InferenceRequest:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return InferenceRequest("m", {"IN": Tensor.from_numpy("IN", array)}, ignore)


def tensors(text: str) -> BatchTensors:
    return BatchTensors(text_format.Parse(text, ModelConfig()))


REQUESTS = [request(1, 3), request(2, 2), request(1, 5)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [3, 4, 5]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [3, 7, 12]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 3, 7, 12]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0, 0, 0, 0, 0]),
        ("BATCH_ITEM_SHAPE", [[3], [2], [2], [5]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [3, 2, 2, 5]),
    ],
)
@pytest.mark.parametrize(("datatype", "dtype"), [("INT32", np.int32), ("FP32", np.float32)])
def test_every_kind_of_batch_input(
    kind: str, expected: list[int], datatype: str, dtype: type
) -> None:
    """The values follow from the source input's shapes, batch dimension included."""
    made = tensors(
        f'batch_input {{ kind: {kind} target_name: ["A", "B"] data_type: TYPE_{datatype} '
        'source_input: "IN" }'
    ).inputs(REQUESTS)
    assert set(made) == {"A", "B"}
    assert made["A"].dtype == dtype
    assert made["A"].tolist() == expected


def test_ragged_inputs_are_joined_to_one_row() -> None:
    """Request after request, whatever their shapes."""
    joined = join_ragged([each.inputs["IN"] for each in REQUESTS])
    assert joined.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]


def test_an_output_is_scattered_with_the_shape_of_an_input() -> None:
    """Every request gets its own part, in the shape its input had; other outputs are not cut."""
    made = tensors(
        'batch_output { target_name: "OUT" kind: BATCH_SCATTER_WITH_INPUT_SHAPE '
        'source_input: "IN" }'
    )
    parts = made.scatter("OUT", np.arange(12), REQUESTS)
    assert parts is not None
    assert [part.shape for part in parts] == [(1, 3), (2, 2), (1, 5)]
    assert parts[1].tolist() == [[3, 4], [5, 6]]
    assert made.scatter("OTHER", np.arange(12), REQUESTS) is None


def test_an_output_of_the_wrong_size_cannot_be_scattered() -> None:
    """The error names both tensors and sizes."""
    made = tensors(
        'batch_output { target_name: "OUT" kind: BATCH_SCATTER_WITH_INPUT_SHAPE '
        'source_input: "IN" }'
    )
    with pytest.raises(InternalError, match="output 'OUT' has 11 elements, but input 'IN'"):
        made.scatter("OUT", np.arange(11), REQUESTS)


async def test_a_ragged_onnx_model_serves_requests_of_different_shapes_in_one_run(
    tmp_path: Path,
) -> None:
    """It gets one row of elements with their ends, and its output is cut apart again."""
    onnx_models.save(
        tmp_path,
        [
            helper.make_node("Identity", ["IN"], ["OUT"]),
            helper.make_node("Unsqueeze", ["END", "axis"], ["SEEN"]),
            helper.make_node("Constant", [], ["axis"], value_ints=[1]),
        ][::-1],
        [
            onnx_models.value("IN", TensorProto.FLOAT, ["elements"]),
            onnx_models.value("END", TensorProto.INT32, ["requests"]),
        ],
        [
            onnx_models.value("OUT", TensorProto.FLOAT, ["elements"]),
            onnx_models.value("SEEN", TensorProto.INT32, ["requests", 1]),
        ],
    )
    config = onnx_models.config(
        """max_batch_size: 8
        input { name: "IN" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
        output { name: "OUT" data_type: TYPE_FP32 dims: -1 }
        output { name: "SEEN" data_type: TYPE_INT32 dims: 1 }
        batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "END"
                      data_type: TYPE_INT32 source_input: "IN" }
        batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "OUT"
                       source_input: "IN" }"""
    )
    async with BackendDriver(OnnxruntimeBackend(), config, tmp_path) as driver:
        inputs = [{"IN": np.arange(size, dtype=np.float32).reshape(1, size)} for size in (3, 1, 4)]
        answers = await driver.infer(*inputs)
    assert [answer.array("OUT").tolist() for answer in answers] == [
        each["IN"].tolist() for each in inputs
    ]
    assert [answer.array("SEEN").tolist() for answer in answers] == [[[3]], [[4]], [[8]]]
