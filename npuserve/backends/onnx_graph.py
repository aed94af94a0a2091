"""Inputs and outputs of an ONNX file, read without any ONNX library.

Reads the few fields of the protobuf message that are needed and steps over everything else, so
weights of any size are never touched. A machine that compiles models needs no `onnx` package.

Source: onnx.proto: ModelProto.graph = 7; GraphProto.initializer = 5, input = 11, output = 12;
ValueInfoProto.name = 1, type = 2; TypeProto.tensor_type = 1; Tensor.elem_type = 1, shape = 2;
TensorShapeProto.dim = 1; Dimension.dim_value = 1; TensorProto.name = 8.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from npuserve.backends.model_signature import ModelSignature, ModelTensor
from npuserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# TensorProto.DataType → wire datatype.
_DATATYPES = {
    1: "FP32", 2: "UINT8", 3: "INT8", 4: "UINT16", 5: "INT16", 6: "INT32", 7: "INT64",
    8: "BYTES", 9: "BOOL", 10: "FP16", 11: "FP64", 12: "UINT32", 13: "UINT64", 16: "BF16",
}  # fmt: skip

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def read_signature(path: Path) -> ModelSignature:
    """Names, datatypes and shapes (-1 for free dimensions).

    Raises:
        InvalidArgumentError: no ONNX model, or a datatype that cannot be served.
    """
    try:
        with path.open("rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return _model(content)
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"'{path.name}' is no ONNX model: {error}") from error


def _model(content: memoryview) -> ModelSignature:
    weights: set[str] = set()
    inputs: list[ModelTensor] = []
    outputs: list[ModelTensor] = []
    for number, graph in _messages(content):
        if number != 7:
            continue
        for part, value in _messages(graph):
            if part == 5:
                weights.add(_text(value, 8))
            elif part == 11:
                inputs.append(_tensor(value))
            elif part == 12:
                outputs.append(_tensor(value))
    if not outputs:
        raise ValueError("it has no graph with outputs")
    # Old exporters list weights among the inputs.
    return ModelSignature(tuple(t for t in inputs if t.name not in weights), tuple(outputs))


def _tensor(value: memoryview) -> ModelTensor:
    name = _text(value, 1)
    element = 0
    shape: list[int] = []
    for number, kind in _messages(value):
        if number != 2:
            continue
        for number_of_kind, tensor in _messages(kind):
            if number_of_kind == 1:
                element, shape = _type(tensor)
    if element not in _DATATYPES:
        raise ValueError(f"tensor '{name}' has the element type {element}")
    return ModelTensor(name, _DATATYPES[element], tuple(shape))


def _type(tensor: memoryview) -> tuple[int, list[int]]:
    element, shape = 0, list[int]()
    for number, field in _fields(tensor):
        if number == 1 and isinstance(field, int):
            element = field
        elif number == 2 and isinstance(field, memoryview):
            shape = [_dimension(dim) for part, dim in _messages(field) if part == 1]
    return element, shape


def _dimension(dim: memoryview) -> int:
    values = [field for number, field in _fields(dim) if number == 1 and isinstance(field, int)]
    return values[0] if values and values[0] > 0 else -1


def _text(message: memoryview, wanted: int) -> str:
    texts = [bytes(field).decode() for number, field in _messages(message) if number == wanted]
    return texts[0] if texts else ""


def _messages(content: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Fields that hold bytes: messages and texts."""
    for number, field in _fields(content):
        if isinstance(field, memoryview):
            yield number, field


def _fields(content: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    position, end = 0, len(content)
    while position < end:
        key, position = _varint(content, position)
        kind = key & 7
        if kind == _VARINT:
            value, position = _varint(content, position)
            yield key >> 3, value
        elif kind == _BYTES:
            length, position = _varint(content, position)
            if position + length > end:
                raise ValueError("it is cut off")
            yield key >> 3, content[position : position + length]
            position += length
        elif kind in (_FIXED32, _FIXED64):
            position += 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("it is no protobuf message")


def _varint(content: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("it is no protobuf message")
