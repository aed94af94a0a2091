"""Makes the detector and compiles it for the NPU.

    python examples/yolo/build_model.py [--soc-version Ascend310P3]

The detector is a small network without training: it finds squares of pure red, green and blue,
and its output has the form of YOLOv8, [batch, 4 + classes, anchors]. To serve a trained model,
put its model.om (or its ONNX file, with this script's `compile_model`) in its place.

With CANN the model is compiled by its atc, else by the simulator's, for
`npuserve --npu-simulator=1`.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from yolo_steps import CLASSES, SIZE

TARGET = Path(__file__).parent / "model_repository/yolo_detector/1/model.om"
BATCHES = "1,2,4,8"
BOX = 64  # every anchor stands for a box of this size
STRIDE = 32
CELLS = (SIZE - BOX) // STRIDE + 1


def anchors():
    """Centre x, centre y, width and height of every anchor: [1, 4, anchors]."""
    centres = np.arange(CELLS, dtype=np.float32) * STRIDE + BOX / 2
    y, x = np.meshgrid(centres, centres, indexing="ij")
    size = np.full(CELLS * CELLS, BOX, np.float32)
    return np.stack([x.reshape(-1), y.reshape(-1), size, size])[np.newaxis]


def detector():
    """Images [n, 3, SIZE, SIZE] → predictions [n, 4 + classes, anchors]."""
    count = len(CLASSES)
    # A class scores by how much its own colour exceeds the two others.
    weights = 24 * (2 * np.eye(count, dtype=np.float32) - 1).reshape(count, count, 1, 1)
    constants = {
        "weights": weights,
        "bias": np.full(count, -16, np.float32),
        "cells": np.array([0, count, -1], np.int64),
        "anchors": anchors(),
        "one": np.array([1, 1], np.int64),
    }
    nodes = [
        helper.make_node(
            "AveragePool", ["images"], ["colours"], kernel_shape=[BOX, BOX], strides=[STRIDE] * 2
        ),
        helper.make_node("Conv", ["colours", "weights", "bias"], ["logits"]),
        helper.make_node("Sigmoid", ["logits"], ["map"]),
        helper.make_node("Reshape", ["map", "cells"], ["scores"]),
        helper.make_node("Shape", ["images"], ["batch"], start=0, end=1),
        helper.make_node("Concat", ["batch", "one"], ["repeats"], axis=0),
        helper.make_node("Tile", ["anchors", "repeats"], ["boxes"]),
        helper.make_node("Concat", ["boxes", "scores"], ["predictions"], axis=1, name="head"),
    ]
    graph = helper.make_graph(
        nodes,
        "squares",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, SIZE, SIZE])],
        [
            helper.make_tensor_value_info(
                "predictions", TensorProto.FLOAT, ["n", 4 + count, CELLS * CELLS]
            )
        ],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.checker.check_model(model)
    return model


def compile_model(onnx_path, target, soc_version):
    """Run atc; `target` is the file without `.om`."""
    flags = [
        "--framework=5",
        f"--model={onnx_path}",
        f"--output={target}",
        f"--soc_version={soc_version}",
        f"--input_shape=images:-1,3,{SIZE},{SIZE}",
        f"--dynamic_batch_size={BATCHES}",
    ]
    if shutil.which("atc"):
        subprocess.run(["atc", *flags], check=True)
        return
    from npuserve.testing.simulator.atc import compile_model as simulated_atc

    simulated_atc(*flags)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--soc-version", default="Ascend910B3", help="the chip to compile for")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        onnx_path = Path(directory, "detector.onnx")
        onnx.save(detector(), onnx_path)
        compile_model(onnx_path, Path(directory, "model"), arguments.soc_version)
        # atc may add the host to the name: model_linux_x86_64.om.
        (compiled,) = Path(directory).glob("*.om")
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(compiled, TARGET.with_suffix(".part"))
        TARGET.with_suffix(".part").replace(TARGET)
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
