"""Small ONNX models for tests, built on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from google.protobuf import text_format
from onnx import TensorProto, helper

from npuserve.model_config import ModelConfig

OPSET = 17

Shape = Sequence[object]  # sizes; a name or None for a free dimension


def value(name: str, elem_type: int, shape: Shape) -> Any:
    """An input or output of a graph."""
    dims: Any = list(shape)
    return helper.make_tensor_value_info(name, elem_type, dims)


def save(
    model_dir: Path,
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    *,
    opset: int = OPSET,
) -> Path:
    """Write `model_dir/1/model.onnx` and return `model_dir`."""
    graph = helper.make_graph(list(nodes), "test", list(inputs), list(outputs))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8
    path = model_dir / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return model_dir


def identity(
    model_dir: Path, shape: Shape = ("batch", 3), elem_type: int = TensorProto.FLOAT
) -> Path:
    """IN → OUT, the same."""
    return save(
        model_dir,
        [helper.make_node("Identity", ["IN"], ["OUT"])],
        [value("IN", elem_type, shape)],
        [value("OUT", elem_type, shape)],
    )


def sum_and_difference(model_dir: Path, shape: Shape = ("batch", 4)) -> Path:
    """INPUT0, INPUT1 → OUTPUT0 (sum), OUTPUT1 (difference)."""
    names = ("INPUT0", "INPUT1"), ("OUTPUT0", "OUTPUT1")
    return save(
        model_dir,
        [
            helper.make_node("Add", list(names[0]), ["OUTPUT0"]),
            helper.make_node("Sub", list(names[0]), ["OUTPUT1"]),
        ],
        [value(name, TensorProto.FLOAT, shape) for name in names[0]],
        [value(name, TensorProto.FLOAT, shape) for name in names[1]],
    )


def config(text: str = "") -> ModelConfig:
    """A ModelConfig in protobuf text form."""
    parsed: ModelConfig = text_format.Parse(f'name: "m" {text}', ModelConfig())
    return parsed
