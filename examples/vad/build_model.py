"""Writes the VAD model in the form that the server's sequence batcher works with.

Silero's file keeps the state as [2, batch, 128], has the caller keep the last 64 samples, and
takes the sample rate as a scalar. Here every tensor begins with the batch dimension, and the 64
samples are a second state, so that the server can keep both for each speaker and put chunks of
several speakers into one batch:

    audio [batch, 512], state [batch, 2, 128], context [batch, 64]
      → speech_probability [batch, 1], state_out, context_out
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

EXAMPLES = Path(__file__).resolve().parents[1]
SOURCE = EXAMPLES / ".models/silero_vad_16k_op15.onnx"
TARGET = EXAMPLES / "vad/model_repository/vad/1/model.onnx"

SAMPLE_RATE = 16_000
CHUNK = 512
CONTEXT = 64


def rewrap(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same network between new inputs and outputs."""
    graph = model.graph
    before = [
        helper.make_node("Concat", ["context_in", "audio"], ["input"], axis=1),
        helper.make_node("Transpose", ["state_in"], ["state"], perm=[1, 0, 2]),
        helper.make_node(
            "Constant",
            [],
            ["sr"],
            value=helper.make_tensor("rate", TensorProto.INT64, [], [SAMPLE_RATE]),
        ),
    ]
    after = [
        helper.make_node("Identity", ["output"], ["speech_probability"]),
        helper.make_node("Transpose", ["stateN"], ["state_out"], perm=[1, 0, 2]),
        helper.make_node(
            "Slice", ["audio", "slice_start", "slice_end", "slice_axis"], ["context_out"]
        ),
    ]
    graph.initializer.extend(
        helper.make_tensor(name, TensorProto.INT64, [1], [value])
        for name, value in (
            ("slice_start", CHUNK - CONTEXT),
            ("slice_end", CHUNK),
            ("slice_axis", 1),
        )
    )
    nodes = [*before, *graph.node, *after]
    del graph.node[:], graph.input[:], graph.output[:]
    graph.node.extend(nodes)
    graph.input.extend(
        [tensor("audio", CHUNK), tensor("state_in", 2, 128), tensor("context_in", CONTEXT)]
    )
    graph.output.extend(
        [
            tensor("speech_probability", 1),
            tensor("state_out", 2, 128),
            tensor("context_out", CONTEXT),
        ]
    )
    onnx.checker.check_model(model)
    return model


def tensor(name: str, *dims: int) -> onnx.ValueInfoProto:
    """A float tensor with a free batch dimension."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *dims])


if __name__ == "__main__":
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(rewrap(onnx.load(SOURCE)), TARGET)
    print(f"examples/{TARGET.relative_to(EXAMPLES)}: {TARGET.stat().st_size:,} bytes")
