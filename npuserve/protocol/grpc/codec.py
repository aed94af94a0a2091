"""Inference over gRPC: protobuf messages ↔ InferenceRequest and InferenceResponse. Pure.

A message is bytes on its way in and a list of buffers (`Parts`) on its way out. Large raw
contents are never copied here: they are cut out of the request's bytes as views before protobuf
sees the rest, and put between the serialised rest of the response.

Knows no transport, no server and no scheduler. Control-plane messages: `control_codec.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError

from npuserve._proto import grpc_service_pb2 as pb
from npuserve.buffer_pool import LARGE_TENSOR_BYTES
from npuserve.errors import InvalidArgumentError
from npuserve.request import SEQUENCE_END, SEQUENCE_START, InferenceRequest, ResponseCallback
from npuserve.tensor import NUMPY_DTYPE, Buffer, Tensor, serialize_bytes

if TYPE_CHECKING:
    from npuserve.response import InferenceResponse, ParameterValue

Parts = list[Buffer]

# Limits of the wire: protobuf and gRPC count message bytes in a signed 32-bit integer.
MAX_MESSAGE_BYTES = 2**31 - 1

EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
FINAL_RESPONSE = "triton_final_response"

_RAW_INPUT_FIELD = 7  # ModelInferRequest.raw_input_contents
_RAW_OUTPUT_TAG = b"\x32"  # ModelInferResponse.raw_output_contents = 6, length-delimited
_INFER_RESPONSE_TAG = b"\x12"  # ModelStreamInferResponse.infer_response = 2, length-delimited
_RAW_ALIGNMENT_BYTES = 64

# Typed list of InferTensorContents → the datatype named in errors, datatypes it may carry.
_CONTENTS: dict[str, tuple[str, frozenset[str]]] = {
    "bool_contents": ("BOOL", frozenset({"BOOL"})),
    "int_contents": ("INT32", frozenset({"INT8", "INT16", "INT32"})),
    "int64_contents": ("INT64", frozenset({"INT64"})),
    "uint_contents": ("UINT32", frozenset({"UINT8", "UINT16", "UINT32"})),
    "uint64_contents": ("UINT64", frozenset({"UINT64"})),
    "fp32_contents": ("FP32", frozenset({"FP32"})),
    "fp64_contents": ("FP64", frozenset({"FP64"})),
    "bytes_contents": ("BYTES", frozenset({"BYTES"})),
}


@dataclass(frozen=True)
class SharedMemoryReference:
    """Where in a registered region a tensor lies: `byte_size` bytes from `offset`."""

    region: str
    offset: int
    byte_size: int


@dataclass(frozen=True)
class OutputOption:
    """What a client wants done with one requested output.

    Attributes:
        classification: number of classes to answer instead of the tensor; 0 for the tensor.
        shared_memory: where to put the data; None for the response itself.
    """

    classification: int = 0
    shared_memory: SharedMemoryReference | None = None


# (region, offset, bytes) → a view of the memory, raising InvalidArgumentError or NotFoundError.
RegionReader = Callable[[str, int, int], Buffer]


def parse_infer_request(data: Buffer) -> tuple[pb.ModelInferRequest, Sequence[Buffer]]:
    """The message and its raw input contents, large ones as views of `data`.

    Raises:
        InvalidArgumentError: the bytes are no such message.
    """
    try:
        if len(data) < LARGE_TENSOR_BYTES:
            message = pb.ModelInferRequest.FromString(data)  # type: ignore[arg-type]
            return message, message.raw_input_contents
        rest, raw = _split_raw_contents(memoryview(data))
        return pb.ModelInferRequest.FromString(rest), raw
    except DecodeError as error:
        raise InvalidArgumentError(f"failed to parse ModelInferRequest: {error}") from error


def padding_for_alignment(prefix: memoryview) -> int:
    """Bytes to leave free before a message so that its first large raw tensor is aligned.

    Args:
        prefix: the beginning of a ModelInferRequest (of any message: garbage gives 0).
    """
    try:
        for number, start, end in _fields(prefix):
            if number == _RAW_INPUT_FIELD and end - start >= LARGE_TENSOR_BYTES:
                return -start % _RAW_ALIGNMENT_BYTES
    except InvalidArgumentError:
        pass  # cut off before any large tensor, or no such message: nothing to align
    return 0


def to_inference_request(
    message: pb.ModelInferRequest,
    raw: Sequence[Buffer],
    on_response: ResponseCallback,
    model_version: int,
    read_region: RegionReader,
) -> InferenceRequest:
    """The request a message stands for; its tensors are views of `raw` and shared memory.

    Raises:
        InvalidArgumentError: data missing, given twice or of the wrong kind; bad parameters.
        NpuserveError: from `read_region`.
    """
    request = InferenceRequest(
        message.model_name,
        _inputs(message, raw, read_region),
        on_response,
        model_version=model_version,
        id=message.id,
        requested_outputs=tuple([output.name for output in message.outputs]),
    )
    if message.parameters:
        _apply_parameters(request, message.parameters)
    return request


def output_options(message: pb.ModelInferRequest) -> dict[str, OutputOption] | None:
    """Options of the requested outputs that have any; None when no output has.

    Raises:
        InvalidArgumentError: a parameter of the wrong type.
    """
    options: dict[str, OutputOption] | None = None
    for output in message.outputs:
        if not output.parameters:
            continue
        classification = 0
        if "classification" in output.parameters:
            classification = _int_parameter(output.parameters, "classification")
            if classification == 0:
                raise InvalidArgumentError(
                    "invalid value for 'classification' parameter, expected >= 0"
                )
        memory = _shared_memory(output.name, output.parameters)
        if memory is not None and classification:
            raise InvalidArgumentError(
                "output can't set both 'shared_memory_region' and 'classification'"
            )
        options = options or {}
        options[output.name] = OutputOption(classification, memory)
    return options


def infer_response_message(
    response: InferenceResponse, request_id: str, final: bool | None = None
) -> pb.ModelInferResponse:
    """The response without tensor contents.

    Args:
        final: value of `triton_final_response`; None leaves it out (unary calls).
    """
    message = pb.ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=request_id
    )
    if response.parameters:
        for key, value in response.parameters.items():
            set_parameter(message.parameters[key], value)
    if final is not None:
        message.parameters[FINAL_RESPONSE].bool_param = final
    return message


def add_output(
    message: pb.ModelInferResponse, raw: list[Buffer], tensor: Tensor
) -> pb.ModelInferResponse.InferOutputTensor:
    """Append an output tensor to a response and its bytes (a view) to `raw`."""
    raw.append(tensor.data)
    return message.outputs.add(name=tensor.name, datatype=str(tensor.datatype), shape=tensor.shape)


def serialize_infer_response(message: pb.ModelInferResponse, raw: Sequence[Buffer]) -> Parts:
    """The bytes of a response with `raw` as its raw_output_contents; large ones not copied.

    Raises:
        InvalidArgumentError: larger than a gRPC message can be. Text as Triton's.
    """
    size = sum(map(len, raw))
    if size < LARGE_TENSOR_BYTES:
        message.raw_output_contents.extend(map(bytes, raw))
        return [message.SerializeToString()]
    if size > MAX_MESSAGE_BYTES:
        raise InvalidArgumentError(
            f"Response has byte size {size} which exceeds gRPC's byte size limit "
            f"{MAX_MESSAGE_BYTES}."
        )
    parts: Parts = [message.SerializeToString()]
    for data in raw:
        parts.append(_RAW_OUTPUT_TAG + _varint(len(data)))
        parts.append(data)
    return parts


def wrap_in_stream_response(parts: Parts) -> Parts:
    """A serialised ModelInferResponse as the `infer_response` of a ModelStreamInferResponse."""
    return [_INFER_RESPONSE_TAG + _varint(sum(map(len, parts))), *parts]


def stream_error(text: str, message: pb.ModelInferResponse) -> Parts:
    """A ModelStreamInferResponse that carries an error of one request."""
    wrapped = pb.ModelStreamInferResponse(error_message=text, infer_response=message)
    return [wrapped.SerializeToString()]


def set_parameter(target: pb.InferParameter, value: ParameterValue) -> None:
    """Store a parameter in the field its Python type asks for."""
    if isinstance(value, bool):
        target.bool_param = value
    elif isinstance(value, int):
        if value > 2**63 - 1:
            target.uint64_param = value
        else:
            target.int64_param = value
    elif isinstance(value, float):
        target.double_param = value
    else:
        target.string_param = value


def _inputs(
    message: pb.ModelInferRequest, raw: Sequence[Buffer], read_region: RegionReader
) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    next_raw = 0
    raw_count = len(raw)
    for item in message.inputs:
        name = item.name
        if name in inputs:
            raise InvalidArgumentError(f"input '{name}' already exists in request")
        memory = _shared_memory(name, item.parameters) if item.parameters else None
        data: Buffer
        if memory is not None:
            if item.HasField("contents"):
                raise InvalidArgumentError(
                    f"unexpected 'content' provided when using shared memory for input tensor "
                    f"'{name}' for model '{message.model_name}'"
                )
            data = read_region(memory.region, memory.offset, memory.byte_size)
        elif item.HasField("contents"):
            if raw_count:
                raise InvalidArgumentError(
                    f"contents field must not be specified when using raw_input_contents for "
                    f"'{name}' for model '{message.model_name}'"
                )
            data = _typed_contents(item, message.model_name)
        elif next_raw < raw_count:
            data = raw[next_raw]
            next_raw += 1
        else:
            raise InvalidArgumentError(
                f"unable to find data for input tensor '{name}' for model "
                f"'{message.model_name}' in request."
            )
        inputs[name] = Tensor(name, item.datatype, tuple(item.shape), data)
    return inputs


def _typed_contents(item: pb.ModelInferRequest.InferInputTensor, model_name: str) -> bytes:
    """The wire form of the one typed list an input may carry; b"" when all are empty."""
    where = f"for input tensor '{item.name}' for model '{model_name}'"
    data: bytes | None = None
    for field, (field_type, datatypes) in _CONTENTS.items():
        values = getattr(item.contents, field)
        if not values:
            continue
        if data is not None:
            raise InvalidArgumentError(
                f"unexpected explicit tensor data {where} of type '{field_type}', "
                "binary data was already supplied."
            )
        if item.datatype not in datatypes:
            raise InvalidArgumentError(
                f"unexpected explicit tensor data {where} of type '{field_type}', "
                f"expected datatype '{item.datatype}'"
            )
        data = _typed_bytes(values, field_type, item.datatype)
    return data or b""


def _typed_bytes(values: Iterable[Any], field_type: str, datatype: str) -> bytes:
    if datatype == "BYTES":
        elements = list(values)
        array = np.empty(len(elements), np.object_)
        array[:] = elements
        return serialize_bytes(array)
    # The low bytes of a wider integer count, as in Triton.
    wide = np.array(values, NUMPY_DTYPE[field_type])
    return wide.astype(NUMPY_DTYPE[datatype]).tobytes()


def _apply_parameters(
    request: InferenceRequest, parameters: Mapping[str, pb.InferParameter]
) -> None:
    """Reserved parameters set fields of the request, the rest becomes custom parameters.

    Source: server src/grpc/infer_handler.cc, SetInferenceRequestMetadata.
    """
    custom: dict[str, ParameterValue] = {}
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if key in _RESERVED:
            _RESERVED[key](request, key, parameter, kind)
        elif key.startswith("triton_"):
            raise InvalidArgumentError(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the "
                "following keys starting with 'triton_' are allowed: " + EMPTY_FINAL_RESPONSE
            )
        elif kind in _CUSTOM_KINDS:
            custom[key] = getattr(parameter, kind)
        else:
            raise _wrong_type(key, "int64_param, bool_param, or string_param")
    request.parameters = custom or None


_CUSTOM_KINDS = frozenset({"bool_param", "int64_param", "string_param", "double_param"})


def _set_sequence_id(
    request: InferenceRequest, key: str, parameter: pb.InferParameter, kind: str | None
) -> None:
    if kind == "int64_param":
        # The id is unsigned in the server; a client's bits are taken as they are.
        request.correlation_id = parameter.int64_param & 0xFFFF_FFFF_FFFF_FFFF
    elif kind == "uint64_param":
        request.correlation_id = parameter.uint64_param
    elif kind == "string_param":
        request.correlation_id = parameter.string_param
    else:
        raise _wrong_type(key, "int64_param or string_param")


def _set_sequence_flag(
    request: InferenceRequest, key: str, parameter: pb.InferParameter, kind: str | None
) -> None:
    if kind != "bool_param":
        raise _wrong_type(key, "bool_param")
    if parameter.bool_param:
        request.flags |= SEQUENCE_START if key == "sequence_start" else SEQUENCE_END


def _set_priority(
    request: InferenceRequest, key: str, parameter: pb.InferParameter, kind: str | None
) -> None:
    if kind == "int64_param":
        request.priority = parameter.int64_param
    elif kind == "uint64_param":
        request.priority = parameter.uint64_param
    else:
        raise _wrong_type(key, "int64_param or uint64_param")
    if request.priority < 0:
        raise InvalidArgumentError("invalid value for 'priority', expected value >= 0.")


def _set_timeout(
    request: InferenceRequest, key: str, parameter: pb.InferParameter, kind: str | None
) -> None:
    if kind != "int64_param":
        raise _wrong_type(key, "int64_param")
    request.timeout_us = max(parameter.int64_param, 0)


def _check_empty_final_response(
    request: InferenceRequest, key: str, parameter: pb.InferParameter, kind: str | None
) -> None:
    if kind != "bool_param":
        raise _wrong_type(key, "bool_param")


_RESERVED: dict[str, Callable[[InferenceRequest, str, pb.InferParameter, str | None], None]] = {
    "sequence_id": _set_sequence_id,
    "sequence_start": _set_sequence_flag,
    "sequence_end": _set_sequence_flag,
    "priority": _set_priority,
    "timeout": _set_timeout,
    EMPTY_FINAL_RESPONSE: _check_empty_final_response,
}


def _wrong_type(key: str, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"invalid value type for '{key}' parameter, expected {expected}.")


def _shared_memory(
    tensor: str, parameters: Mapping[str, pb.InferParameter]
) -> SharedMemoryReference | None:
    """The region an input or output lies in, if its parameters name one."""
    if "shared_memory_region" not in parameters:
        return None
    region = parameters["shared_memory_region"]
    if region.WhichOneof("parameter_choice") != "string_param":
        raise _wrong_type("shared_memory_region", "string_param")
    if "shared_memory_byte_size" not in parameters:
        raise InvalidArgumentError(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' "
            f"parameter for tensor '{tensor}'"
        )
    offset = 0
    if "shared_memory_offset" in parameters:
        offset = _int_parameter(parameters, "shared_memory_offset")
    byte_size = _int_parameter(parameters, "shared_memory_byte_size")
    return SharedMemoryReference(region.string_param, offset, byte_size)


def _int_parameter(parameters: Mapping[str, pb.InferParameter], key: str) -> int:
    parameter = parameters[key]
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        raise _wrong_type(key, "int64_param")
    if parameter.int64_param < 0:
        raise InvalidArgumentError(f"invalid value for '{key}', expected value >= 0.")
    return parameter.int64_param


def _split_raw_contents(data: memoryview) -> tuple[bytes, list[Buffer]]:
    """The message without its raw input contents, and those as views."""
    rest: list[memoryview] = []
    raw: list[Buffer] = []
    kept_from = 0
    field_start = 0
    for number, start, end in _fields(data):
        if number == _RAW_INPUT_FIELD:
            rest.append(data[kept_from:field_start])
            raw.append(data[start:end])
            kept_from = end
        field_start = end
    if field_start != len(data):
        raise InvalidArgumentError("failed to parse ModelInferRequest: the message is cut off")
    rest.append(data[kept_from:])
    return b"".join(rest), raw


def _fields(data: memoryview) -> Iterable[tuple[int, int, int]]:
    """(field number, start, end) of the length-delimited value of each top-level field.

    Fields of other wire types come as number 0. The last one may reach past the data: that is
    how `padding_for_alignment` sees a tensor of which only the beginning has arrived.

    Raises:
        InvalidArgumentError: not the encoding of a protobuf message.
    """
    offset, size = 0, len(data)
    while offset < size:
        tag, offset = _read_varint(data, offset)
        wire_type = tag & 7
        if wire_type == 2:
            length, start = _read_varint(data, offset)
            offset = start + length
            yield tag >> 3, start, offset
            continue
        if wire_type == 0:
            _, offset = _read_varint(data, offset)
        elif wire_type in _FIXED_BYTES:
            offset += _FIXED_BYTES[wire_type]
        else:
            raise InvalidArgumentError(f"protobuf wire type {wire_type} is not supported")
        yield 0, offset, offset


_FIXED_BYTES = {1: 8, 5: 4}


def _read_varint(data: memoryview, offset: int) -> tuple[int, int]:
    value = shift = 0
    for index in range(offset, min(offset + 10, len(data))):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    raise InvalidArgumentError("a protobuf integer is cut off or longer than 10 bytes")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
