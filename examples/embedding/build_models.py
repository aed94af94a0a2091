"""Builds the ONNX files of the sentence-embedding ensemble from the weights of all-MiniLM-L6-v2.

Neither torch nor transformers is needed: the weights are read from the safetensors file, and the
network, a BERT of six layers, is written down node by node.

    minilm_encoder   input_ids, attention_mask [batch, length] → hidden [batch, length, 384]
    minilm_pooling   hidden, attention_mask → embedding [batch, 384], of length 1
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

EXAMPLES = Path(__file__).resolve().parents[1]
SOURCE = EXAMPLES / ".models/minilm"
REPOSITORY = EXAMPLES / "embedding/model_repository"
OPSET = 17


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Tensors by name: a length, a JSON header with offsets, then the data."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    start = 8 + length
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            begin, end = (start + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(data[begin:end], np.float32).reshape(entry["shape"])
    return tensors


class Graph:
    """Nodes and constants in the making; every method returns the name of its result."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}

    def op(self, kind: str, *inputs: str, output: str = "", **attributes: object) -> str:
        """Add a node."""
        result = output or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [result], **attributes))
        return result

    def constant(self, name: str, value: object, dtype: type = np.float32) -> str:
        """Add a constant once."""
        if name not in self.initializers:
            array = np.ascontiguousarray(np.array(value, dtype))
            self.initializers[name] = numpy_helper.from_array(array, name)
        return name

    def dense(self, name: str, x: str) -> str:
        """X · Wᵀ + b; PyTorch keeps W as [out, in]."""
        weight = self.constant(f"{name}.weight", self.weights[f"{name}.weight"].T)
        bias = self.constant(f"{name}.bias", self.weights[f"{name}.bias"])
        return self.op("Add", self.op("MatMul", x, weight), bias)

    def layer_norm(self, name: str, x: str, epsilon: float, output: str = "") -> str:
        """Normalise the last dimension."""
        scale, bias = (
            self.constant(f"{name}.{part}", self.weights[f"{name}.{part}"])
            for part in ("weight", "bias")
        )
        return self.op(
            "LayerNormalization", x, scale, bias, axis=-1, epsilon=epsilon, output=output
        )

    def gelu(self, x: str) -> str:
        """The exact form, with the error function."""
        erf = self.op("Erf", self.op("Div", x, self.constant("sqrt2", math.sqrt(2))))
        half = self.op("Mul", x, self.constant("half", 0.5))
        return self.op("Mul", half, self.op("Add", erf, self.constant("one", 1)))

    def save(self, name: str, inputs: list[object], outputs: list[object]) -> Path:
        """Write `<name>/1/model.onnx`."""
        graph = helper.make_graph(
            self.nodes, name, inputs, outputs, list(self.initializers.values())
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
        model.ir_version = 8
        onnx.checker.check_model(model)
        path = REPOSITORY / name / "1/model.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path)
        print(f"examples/{path.relative_to(EXAMPLES)}: {path.stat().st_size:,} bytes")
        return path


def build_encoder(weights: dict[str, np.ndarray], config: dict[str, object]) -> Path:
    """The BERT encoder."""
    graph = Graph(weights)
    epsilon = config["layer_norm_eps"]
    x = embed(graph, epsilon)
    mask = attention_mask(graph)
    layers = config["num_hidden_layers"]
    for index in range(layers):
        name = f"encoder.layer.{index}"
        context = attend(graph, f"{name}.attention.self", x, mask, config)
        projected = graph.dense(f"{name}.attention.output.dense", context)
        norm = f"{name}.attention.output.LayerNorm"
        x = graph.layer_norm(norm, graph.op("Add", projected, x), epsilon)
        inner = graph.gelu(graph.dense(f"{name}.intermediate.dense", x))
        projected = graph.dense(f"{name}.output.dense", inner)
        x = graph.layer_norm(
            f"{name}.output.LayerNorm",
            graph.op("Add", projected, x),
            epsilon,
            output="hidden" if index == layers - 1 else "",
        )
    return graph.save(
        "minilm_encoder",
        [value("input_ids", TensorProto.INT64), value("attention_mask", TensorProto.INT64)],
        [value("hidden", TensorProto.FLOAT, config["hidden_size"])],
    )


def embed(graph: Graph, epsilon: float) -> str:
    """Word, position and token-type embeddings, normalised."""
    words, positions, types = (
        graph.constant(name, graph.weights[name])
        for name in (
            "embeddings.word_embeddings.weight",
            "embeddings.position_embeddings.weight",
            "embeddings.token_type_embeddings.weight",
        )
    )
    length = graph.op("Slice", graph.op("Shape", "input_ids"), index(graph, 1), index(graph, 2))
    places = graph.op("Slice", positions, index(graph, 0), length, index(graph, 0))
    first_type = graph.op("Slice", types, index(graph, 0), index(graph, 1), index(graph, 0))
    x = graph.op("Add", graph.op("Gather", words, "input_ids"), places)
    return graph.layer_norm("embeddings.LayerNorm", graph.op("Add", x, first_type), epsilon)


def attention_mask(graph: Graph) -> str:
    """[batch, 1, 1, length]: 0 for a token, very negative for padding."""
    mask = graph.op("Cast", "attention_mask", to=TensorProto.FLOAT)
    away = graph.op("Sub", graph.constant("one", 1), mask)
    away = graph.op("Mul", away, graph.constant("very_negative", -10_000))
    return graph.op("Unsqueeze", away, graph.constant("middle", [1, 2], np.int64))


def attend(graph: Graph, name: str, x: str, mask: str, config: dict[str, object]) -> str:
    """Multi-head self-attention before its output projection."""
    heads = config["num_attention_heads"]
    size = config["hidden_size"]
    split = graph.constant("split", [0, 0, heads, size // heads], np.int64)
    join = graph.constant("join", [0, 0, size], np.int64)

    def head(part: str, perm: list[int]) -> str:
        projected = graph.dense(f"{name}.{part}", x)
        return graph.op("Transpose", graph.op("Reshape", projected, split), perm=perm)

    query, key = head("query", [0, 2, 1, 3]), head("key", [0, 2, 3, 1])
    scale = graph.constant("scale", math.sqrt(size // heads))
    scores = graph.op("Div", graph.op("MatMul", query, key), scale)
    weights = graph.op("Softmax", graph.op("Add", scores, mask), axis=-1)
    context = graph.op("MatMul", weights, head("value", [0, 2, 1, 3]))
    return graph.op("Reshape", graph.op("Transpose", context, perm=[0, 2, 1, 3]), join)


def build_pooling(size: int) -> Path:
    """Mean over the tokens that are no padding, then length 1."""
    graph = Graph({})
    mask = graph.op("Cast", "attention_mask", to=TensorProto.FLOAT)
    mask = graph.op("Unsqueeze", mask, graph.constant("last", [2], np.int64))
    tokens = graph.constant("tokens", [1], np.int64)
    total = graph.op("ReduceSum", graph.op("Mul", "hidden", mask), tokens, keepdims=0)
    count = graph.op("ReduceSum", mask, tokens, keepdims=0)
    mean = graph.op("Div", total, count)
    norm = graph.op("ReduceL2", mean, axes=[1], keepdims=1)
    graph.op("Div", mean, norm, output="embedding")
    return graph.save(
        "minilm_pooling",
        [
            value("hidden", TensorProto.FLOAT, size),
            value("attention_mask", TensorProto.INT64),
        ],
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["batch", size])],
    )


def index(graph: Graph, number: int) -> str:
    """A one-element index for Slice."""
    return graph.constant(f"index_{number}", [number], np.int64)


def value(name: str, elem_type: int, *dims: int) -> onnx.ValueInfoProto:
    """[batch, length, *dims]."""
    return helper.make_tensor_value_info(name, elem_type, ["batch", "length", *dims])


def main() -> None:
    """Build both files and put the other parts of the ensemble in place."""
    config = json.loads((SOURCE / "config.json").read_text())
    encoder = build_encoder(read_safetensors(SOURCE / "model.safetensors"), config)
    build_pooling(config["hidden_size"])
    twin = REPOSITORY / "minilm_encoder_unbatched/1/model.onnx"
    twin.parent.mkdir(parents=True, exist_ok=True)
    twin.unlink(missing_ok=True)
    os.link(encoder, twin)
    shutil.copy(SOURCE / "vocab.txt", REPOSITORY / "minilm_tokenizer/1/vocab.txt")


if __name__ == "__main__":
    main()
