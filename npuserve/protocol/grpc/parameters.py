"""Parameters of inference messages: reserved ones, custom ones, those of tensors. Pure.

Source: server src/grpc/infer_handler.cc, SetInferenceRequestMetadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npuserve.errors import InvalidArgumentError
from npuserve.request import SEQUENCE_END, SEQUENCE_START, InferenceRequest, checked_text_id

if TYPE_CHECKING:
    from npuserve._proto import grpc_service_pb2 as pb
    from npuserve.response import ParameterValue

EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
FINAL_RESPONSE = "triton_final_response"

_CUSTOM_KINDS = frozenset({"bool_param", "int64_param", "string_param", "double_param"})


@dataclass(frozen=True)
class SharedMemoryReference:
    """Where in a registered region a tensor lies: `byte_size` bytes from `offset`."""

    region: str
    offset: int
    byte_size: int


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


def apply_parameters(
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


def _set_sequence_id(
    request: InferenceRequest, key: str, parameter: pb.InferParameter, kind: str | None
) -> None:
    if kind == "int64_param":
        # The id is unsigned in the server; a client's bits are taken as they are.
        request.correlation_id = parameter.int64_param & 0xFFFF_FFFF_FFFF_FFFF
    elif kind == "uint64_param":
        # Differs from Triton: it refuses this type, which says what is meant.
        request.correlation_id = parameter.uint64_param
    elif kind == "string_param":
        request.correlation_id = checked_text_id(parameter.string_param)
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


def _wrong_type(key: str, expected: str, tensor: str = "") -> InvalidArgumentError:
    place = f" for tensor '{tensor}'" if tensor else ""
    return InvalidArgumentError(
        f"invalid value type for '{key}' parameter{place}, expected {expected}."
    )


def shared_memory_reference(
    tensor: str, parameters: Mapping[str, pb.InferParameter]
) -> SharedMemoryReference | None:
    """The region an input or output lies in, if its parameters name one."""
    if "shared_memory_region" not in parameters:
        for key in ("shared_memory_byte_size", "shared_memory_offset"):
            if key in parameters:
                raise InvalidArgumentError(
                    f"'{key}' can not be specified without 'shared_memory_region' parameter for "
                    f"tensor '{tensor}'"
                )
        return None
    region = parameters["shared_memory_region"]
    if region.WhichOneof("parameter_choice") != "string_param":
        raise _wrong_type("shared_memory_region", "string_param", tensor)
    if "shared_memory_byte_size" not in parameters:
        raise InvalidArgumentError(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' "
            f"parameter for tensor '{tensor}'"
        )
    offset = 0
    if "shared_memory_offset" in parameters:
        offset = _int_parameter(tensor, parameters, "shared_memory_offset")
    byte_size = _int_parameter(tensor, parameters, "shared_memory_byte_size")
    return SharedMemoryReference(region.string_param, offset, byte_size)


def _int_parameter(tensor: str, parameters: Mapping[str, pb.InferParameter], key: str) -> int:
    """A parameter that must be an integer; the region knows which ones it can have."""
    parameter = parameters[key]
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        raise _wrong_type(key, "int64_param", tensor)
    return parameter.int64_param
