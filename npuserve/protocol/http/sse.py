"""The generate extension: flat JSON to an infer request, responses to flat JSON and SSE. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npuserve.errors import InvalidArgumentError
from npuserve.protocol.http.codec import InferMessage, custom_parameter
from npuserve.protocol.http.json_members import text_member
from npuserve.protocol.http.json_text import dump_json, json_data, json_scalar, json_scalars
from npuserve.protocol.tensor_codec import json_values, tensor_from_json
from npuserve.server.validation import request_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npuserve.response import InferenceResponse
    from npuserve.server.metadata import TensorMetadata
    from npuserve.tensor import Tensor

_NESTED = "parameters"


def decode_generate(document: Any, inputs: Sequence[TensorMetadata]) -> InferMessage:
    """A request from the JSON of generate: members that name an input are tensors.

    Args:
        document: the parsed body.
        inputs: of the model's metadata, with the batch dimension.

    Raises:
        InvalidArgumentError: not an object, or members that fit no tensor and no parameter.
    """
    if type(document) is not dict:
        raise InvalidArgumentError("attempt to get members for non-object")
    message = InferMessage()
    if "id" in document:
        message.id = text_member(document, "id")
    _decode_members(message, document, {entry.name: entry for entry in inputs})
    return message


def _decode_members(
    message: InferMessage,
    members: dict[str, Any],
    inputs: dict[str, TensorMetadata],
    *,
    nested: bool = False,
) -> None:
    for key, value in members.items():
        if key == _NESTED and not nested:
            if key in inputs:
                raise InvalidArgumentError(
                    f"Keyword '{key}' for nested schema also given as input tensor name"
                )
            if type(value) is not dict:
                raise InvalidArgumentError(
                    f"Expected JSON object for keyword: '{key}': attempt to access JSON "
                    "non-object as object"
                )
            try:
                _decode_members(message, value, inputs, nested=True)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"Converting keyword: '{key}': {error}") from error
        elif key in message.inputs:
            raise InvalidArgumentError(
                f"{request_prefix(message.id)}input '{key}' already exists in request"
            )
        elif key in inputs:
            message.inputs[key] = _decode_tensor(inputs[key], value)
        else:
            message.parameters[key] = custom_parameter(key, value)


def _decode_tensor(metadata: TensorMetadata, value: Any) -> Tensor:
    values = value if type(value) is list else [value]
    shape = _shape_for(metadata, len(values))
    return tensor_from_json(metadata.name, metadata.datatype, shape, values)


def _shape_for(metadata: TensorMetadata, count: int) -> list[int]:
    """The shape with `count` elements: the innermost variable dimension takes what is left."""
    shape = [1 if dim == -1 else dim for dim in metadata.shape]
    rest = count
    for dim in metadata.shape:
        if dim == -1:
            continue
        if dim == 0 or rest % dim:
            raise _no_shape(metadata)
        rest //= dim
    variable = [index for index, dim in enumerate(metadata.shape) if dim == -1]
    if variable:
        shape[variable[-1]] = rest
    elif rest != 1:
        raise _no_shape(metadata)
    return shape


def _no_shape(metadata: TensorMetadata) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"The schema can not convert input '{metadata.name}' to tensor with proper shape"
    )


def encode_generate(response: InferenceResponse, request_id: str) -> bytes:
    """A response as flat JSON, members in ASCII order; outputs of one element are scalars.

    Raises:
        InvalidArgumentError: an output that JSON cannot carry.
    """
    members: dict[str, Any] = {}
    for tensor in response.outputs:
        values = json_values(tensor)
        if len(values) == 1:
            members[tensor.name] = json_scalar(
                values[0] if isinstance(values, list) else values.item()
            )
        else:
            members[tensor.name] = json_data(values)
    members.update(json_scalars(response.parameters or {}))
    if request_id:
        members["id"] = request_id
    members["model_name"] = response.model_name
    members["model_version"] = response.model_version
    return dump_json(dict(sorted(members.items())))


def event(data: bytes) -> bytes:
    """One server-sent event; JSON text has no line breaks of its own."""
    return b"data: %b\n\n" % data
