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

AIPP_MAX_BYTES = 3 * 10 * 12 * 4
DYNAMIC_AIPP = f"aipp_op {{ aipp_mode: dynamic max_src_image_size: {AIPP_MAX_BYTES} }}"


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


def image_onnx(model_dir: Path, channels: int = 3, batch: int | str = "n") -> Path:
    """Y = x for FP32 images of 8 rows and 6 columns."""
    shape: list[int | str | None] = [batch, channels, 8, 6]
    return onnx_models.save(
        model_dir, [helper.make_node("Identity", ["x"], ["y"])],
        [value("x", TensorProto.FLOAT, shape)], [value("y", TensorProto.FLOAT, shape)],
    )  # fmt: skip


def aipp_om(model_dir: Path, config: str = DYNAMIC_AIPP, *flags: str, channels: int = 3) -> Path:
    """`image_onnx` with AIPP, in batches of 1, 2, 4 unless other flags are given."""
    image_onnx(model_dir, channels)
    path = model_dir / "1" / "aipp.cfg"
    path.write_text(config)
    shape = (f"--input_shape=x:-1,{channels},8,6", "--dynamic_batch_size=1,2,4")
    return compile_om(model_dir, *(flags or shape), f"--insert_op_conf={path}")


def make_config(text: str = "") -> ModelConfig:
    """A configuration of the om backend."""
    return onnx_models.config(f'backend: "om" {text}')


def parameters(**values: Any) -> str:
    """`parameters` entries."""
    return " ".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}'
        for key, text in values.items()
    )
