"""Small models compiled for the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper

from npuserve.model_config import ModelConfig
from npuserve.testing.simulator.atc import compile_model
from tests.backends import onnx_models
from tests.backends.onnx_models import value

SOC = "Ascend910B3"


def compile_om(model_dir: Path, *flags: str, soc: str = SOC) -> Path:
    """Compile `1/model.onnx` to `1/model.om`; `model_dir`."""
    onnx = model_dir / "1" / "model.onnx"
    compile_model(
        "--framework=5", f"--model={onnx}", f"--output={onnx.with_suffix('')}",
        f"--soc_version={soc}", *flags,
    )  # fmt: skip
    return model_dir


def affine(model_dir: Path, shape: Sequence[int | str | None]) -> Path:
    """X → y = 2 x + 1, any shape."""
    return onnx_models.save(
        model_dir,
        [
            helper.make_node("Constant", [], ["two"], value_float=2.0),
            helper.make_node("Constant", [], ["one"], value_float=1.0),
            helper.make_node("Mul", ["x", "two"], ["doubled"]),
            helper.make_node("Add", ["doubled", "one"], ["y"], name="add"),
        ],
        [value("x", TensorProto.FLOAT, shape)],
        [value("y", TensorProto.FLOAT, shape)],
    )


def batch_om(model_dir: Path, gears: str = "1,2,4", *flags: str) -> Path:
    """`affine` on rows of 3 with batch gears."""
    affine(model_dir, ["n", 3])
    return compile_om(model_dir, "--input_shape=x:-1,3", f"--dynamic_batch_size={gears}", *flags)


def make_config(text: str = "") -> ModelConfig:
    """A configuration of the om backend."""
    return onnx_models.config(f'backend: "om" {text}')


def parameters(**values: Any) -> str:
    """`parameters` entries."""
    return " ".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}'
        for key, text in values.items()
    )
