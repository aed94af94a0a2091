"""Inference over gRPC: protobuf messages ↔ InferenceRequest and InferenceResponse. Pure.

A message is bytes on its way in and a list of buffers (`Parts`) on its way out. Large raw
contents are never copied here: they are cut out of the request's bytes as views before protobuf
sees the rest, and put between the serialised rest of the response.

Knows no transport, no server and no scheduler. Control-plane messages: `control_codec.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError

from npuserve._proto import grpc_service_pb2 as pb
from npuserve.buffer_pool import LARGE_TENSOR_BYTES
from npuserve.errors import InvalidArgumentError
from npuserve.protocol.grpc.parameters import (
    FINAL_RESPONSE,
    SharedMemoryReference,
    apply_parameters,
    set_parameter,
    shared_memory_reference,
)
from npuserve.protocol.grpc.raw_contents import split_raw_contents, varint
from npuserve.request import InferenceRequest, ResponseCallback
from npuserve.server.validation import request_prefix
from npuserve.tensor import MANY_STRINGS, NUMPY_DTYPE, Buffer, Tensor, element_count

if TYPE_CHECKING:
    from npuserve.response import InferenceResponse

Parts = list[Buffer]

# Typed contents beyond this are decoded in a thread.
_LARGE_TYPED_BYTES = 128 * 1024

# Limits of the wire: protobuf and gRPC count message bytes in a signed 32-bit integer.
MAX_MESSAGE_BYTES = 2**31 - 1

RAW_OUTPUT_TAG = b"\x32"  # ModelInferResponse.raw_output_contents = 6, length-delimited
_INFER_RESPONSE_TAG = b"\x12"  # ModelStreamInferResponse.infer_response = 2, length-delimited

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
        rest, raw = split_raw_contents(memoryview(data))
        return pb.ModelInferRequest.FromString(rest), raw
    except DecodeError as error:
        # Differs from Triton: it is the client's fault, not INTERNAL; a stream, which Triton ends
        # without a word, is told.
        raise InvalidArgumentError(f"failed to parse ModelInferRequest: {error}") from error


def takes_long(message: pb.ModelInferRequest, raw: Sequence[Buffer], size: int) -> bool:
    """Whether `to_inference_request` would hold up an event loop: many typed values or strings.

    Args:
        size: bytes of the whole message.
    """
    return size - sum(map(len, raw)) > _LARGE_TYPED_BYTES or any(
        item.datatype == "BYTES" and element_count(item.shape) > MANY_STRINGS
        for item in message.inputs
    )


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
        apply_parameters(request, message.parameters)
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
            parameter = output.parameters["classification"]
            if parameter.WhichOneof("parameter_choice") != "int64_param":
                raise InvalidArgumentError(
                    "invalid value type for 'classification' parameter, expected int64_param"
                )
            classification = parameter.int64_param
            if classification <= 0:
                raise InvalidArgumentError(
                    "invalid value for 'classification' parameter, expected >= 0"
                )
        memory = shared_memory_reference(output.name, output.parameters)
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
    check_response_size(size)
    parts: Parts = [message.SerializeToString()]
    for data in raw:
        parts.append(RAW_OUTPUT_TAG + varint(len(data)))
        parts.append(data)
    return parts


def check_response_size(size: int) -> None:
    """Refuse a response with more tensor bytes than a gRPC message can have.

    Raises:
        InvalidArgumentError: text as Triton's.
    """
    if size > MAX_MESSAGE_BYTES:
        raise InvalidArgumentError(
            f"Response has byte size {size} which exceeds gRPC's byte size limit "
            f"{MAX_MESSAGE_BYTES}."
        )


def wrap_in_stream_response(parts: Parts) -> Parts:
    """A serialised ModelInferResponse as the `infer_response` of a ModelStreamInferResponse."""
    return [_INFER_RESPONSE_TAG + varint(sum(map(len, parts))), *parts]


def stream_error(text: str, message: pb.ModelInferResponse) -> Parts:
    """A ModelStreamInferResponse that carries an error of one request."""
    text = text.encode("utf-8", "replace").decode()  # what a model raised may be no Unicode
    wrapped = pb.ModelStreamInferResponse(error_message=text, infer_response=message)
    return [wrapped.SerializeToString()]


def _inputs(
    message: pb.ModelInferRequest, raw: Sequence[Buffer], read_region: RegionReader
) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    next_raw = 0
    raw_count = len(raw)
    for item in message.inputs:
        name = item.name
        if name in inputs:
            raise InvalidArgumentError(
                f"{request_prefix(message.id)}input '{name}' already exists in request"
            )
        memory = shared_memory_reference(name, item.parameters) if item.parameters else None
        if memory is not None:
            if item.HasField("contents"):
                raise InvalidArgumentError(
                    f"unexpected 'content' provided when using shared memory for input tensor "
                    f"'{name}' for model '{message.model_name}'"
                )
            data = read_region(memory.region, memory.offset, memory.byte_size)
            inputs[name] = Tensor(name, item.datatype, tuple(item.shape), data)
        elif item.HasField("contents"):
            if raw_count:
                raise InvalidArgumentError(
                    f"contents field must not be specified when using raw_input_contents for "
                    f"'{name}' for model '{message.model_name}'"
                )
            inputs[name] = _typed_tensor(item, message.model_name)
        elif next_raw < raw_count:
            inputs[name] = Tensor(name, item.datatype, tuple(item.shape), raw[next_raw])
            next_raw += 1
        else:
            raise InvalidArgumentError(
                f"unable to find data for input tensor '{name}' for model "
                f"'{message.model_name}' in request."
            )
    if next_raw < raw_count:
        # Differs from Triton: it leaves them unread; over HTTP it refuses them with this text.
        raise InvalidArgumentError(
            f"unexpected additional input data for model '{message.model_name}'"
        )
    return inputs


def _typed_tensor(item: pb.ModelInferRequest.InferInputTensor, model_name: str) -> Tensor:
    """The tensor of the one typed list an input may carry; without data when all are empty."""
    where = f"for input tensor '{item.name}' for model '{model_name}'"
    tensor: Tensor | None = None
    for field, (field_type, datatypes) in _CONTENTS.items():
        values = getattr(item.contents, field)
        if not values:
            continue
        if tensor is not None:
            raise InvalidArgumentError(
                f"unexpected explicit tensor data {where} of type '{field_type}', "
                "binary data was already supplied."
            )
        if item.datatype not in datatypes:
            raise InvalidArgumentError(
                f"unexpected explicit tensor data {where} of type '{field_type}', "
                f"expected datatype '{item.datatype}'"
            )
        shape = tuple(item.shape)
        if item.datatype == "BYTES":
            tensor = Tensor.from_strings(item.name, shape, values, len(values))
        else:
            data = _typed_numbers(values, field_type, item.datatype)
            tensor = Tensor(item.name, item.datatype, shape, data)
    return tensor or Tensor(item.name, item.datatype, tuple(item.shape), b"")


def _typed_numbers(values: Iterable[Any], field_type: str, datatype: str) -> bytes:
    # The low bytes of a wider integer count, as in Triton.
    wide = np.array(values, NUMPY_DTYPE[field_type])
    return wide.astype(NUMPY_DTYPE[datatype]).tobytes()
