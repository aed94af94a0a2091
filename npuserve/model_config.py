"""The one model of a model's configuration: the protobuf message `ModelConfig`.

The message has Triton's names and defaults (`_proto/model_config.proto`). This module adds
what everybody needs around it: datatype names and the JSON form in which clients see and send
a configuration. It knows neither files nor the wire.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from google.protobuf import json_format

from npuserve._proto import model_config_pb2
from npuserve._proto.model_config_pb2 import ModelConfig
from npuserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    # protobuf has one class for descriptors written in Python and one for its C twin.
    FieldDescriptor = Any

__all__ = [
    "ModelConfig",
    "config_from_json",
    "config_to_dict",
    "config_to_json",
    "datatype_enum",
    "datatype_name",
    "enum_name",
    "is_decoupled",
]

_DATATYPE_NAMES: dict[int, str] = {
    number: name.removeprefix("TYPE_")
    for name, number in model_config_pb2.DataType.items()
    if number != model_config_pb2.TYPE_INVALID
} | {model_config_pb2.TYPE_STRING: "BYTES"}

_DATATYPE_ENUMS = {name: number for number, name in _DATATYPE_NAMES.items()}

# protobuf's JSON writes 64-bit integers as strings; Triton turns them into numbers, field by
# field, and has left these three out. Source: core src/model_config_utils.cc,
# ModelConfigToJson.
_STRING_INTEGERS = frozenset(
    {
        "inference.ModelSequenceBatching.InitialState.dims",
        "inference.ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim",
        "inference.ModelInstanceGroup.SecondaryDevice.device_id",
    }
)

# Fields younger than the /config that clients know; left out while they hold their default.
_OMITTED_IF_DEFAULT = frozenset({"inference.ModelEnsembling.max_inflight_requests"})


def datatype_name(data_type: int) -> str:
    """Protocol name of a `DataType` value: `FP32`, `BYTES`; `<invalid>` for anything unknown."""
    return _DATATYPE_NAMES.get(data_type, "<invalid>")


def datatype_enum(name: str) -> int:
    """`DataType` value of a protocol name; TYPE_INVALID for anything unknown."""
    return _DATATYPE_ENUMS.get(name, int(model_config_pb2.TYPE_INVALID))


def enum_name(message: Message, field: str) -> str:
    """Name of the value an enum field of `message` holds, `KIND_GPU` for example."""
    descriptor = message.DESCRIPTOR.fields_by_name[field]
    return _enum_value_name(descriptor, getattr(message, field))


def is_decoupled(config: ModelConfig) -> bool:
    """Whether a request of this model may have any number of responses."""
    return config.model_transaction_policy.decoupled


def config_to_json(config: ModelConfig) -> str:
    """The JSON text Triton shows for a configuration; see `config_to_dict`."""
    return orjson.dumps(config_to_dict(config)).decode()


def config_to_dict(config: Message) -> dict[str, Any]:
    """A configuration as Triton shows it: every field that is no unset message.

    Fields come in declaration order, enums by name, 64-bit integers as numbers (but for
    `_STRING_INTEGERS`), map keys as strings.
    """
    return {
        field.name: _field_to_json(field, getattr(config, field.name))
        for field in config.DESCRIPTOR.fields
        if _is_shown(config, field)
    }


def config_from_json(text: str) -> ModelConfig:
    """Parse the JSON form: snake_case or camelCase names, enums by name (any case) or number.

    Raises:
        InvalidArgumentError: no JSON, an unknown field or a value of the wrong type.
    """
    config = ModelConfig()
    try:
        values = orjson.loads(text)
        if not isinstance(values, dict):
            raise InvalidArgumentError("the model configuration must be a JSON object")
        _upper_case_enums(values, config.DESCRIPTOR)
        json_format.ParseDict(values, config)
    except (orjson.JSONDecodeError, json_format.ParseError) as error:
        raise InvalidArgumentError(str(error)) from error
    return config


def _is_shown(message: Message, field: FieldDescriptor) -> bool:
    if field.has_presence:
        return message.HasField(field.name)
    return field.full_name not in _OMITTED_IF_DEFAULT or bool(getattr(message, field.name))


def _field_to_json(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type and field.message_type.GetOptions().map_entry:
        item = field.message_type.fields_by_name["value"]
        # A map has no order in protobuf; sorted, the text does not depend on the process.
        return {str(key): _value_to_json(item, value[key]) for key in sorted(value)}
    if field.is_repeated:
        return [_value_to_json(field, item) for item in value]
    return _value_to_json(field, value)


def _value_to_json(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type:
        return config_to_dict(value)
    if field.enum_type:
        return _enum_value_name(field, value)
    if field.cpp_type == field.CPPTYPE_FLOAT:
        value = float(str(np.float32(value)))  # 0.1, not 0.10000000149011612
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)  # as protobuf's own JSON writes it
    if field.full_name in _STRING_INTEGERS:
        return str(value)
    return value


def _enum_value_name(field: FieldDescriptor, value: int) -> str:
    known = field.enum_type.values_by_number.get(value)
    return known.name if known else str(value)


def _upper_case_enums(values: dict[str, Any], descriptor: Any) -> None:
    """Make enum names upper case in place; Triton parses them in any case."""
    for field in descriptor.fields:
        for name in (field.name, field.camelcase_name):
            if name in values:
                values[name] = _with_upper_case_enums(values[name], field)


def _with_upper_case_enums(value: Any, field: FieldDescriptor) -> Any:
    if isinstance(value, list):
        return [_with_upper_case_enums(item, field) for item in value]
    if isinstance(value, str) and field.enum_type:
        return value.upper()
    if isinstance(value, dict) and field.message_type:
        if field.message_type.GetOptions().map_entry:
            item = field.message_type.fields_by_name["value"]
            return {key: _with_upper_case_enums(each, item) for key, each in value.items()}
        _upper_case_enums(value, field.message_type)
    return value
