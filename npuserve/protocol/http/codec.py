"""KServe v2 inference messages over HTTP: JSON plus binary tensor data, to values and back. Pure.

Knows no socket and no server. Shared-memory regions come in as callables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from npuserve.errors import InvalidArgumentError
from npuserve.protocol.classification import classify
from npuserve.protocol.http.json_members import (
    boolean,
    objects,
    shape_member,
    text,
    text_member,
    unsigned,
)
from npuserve.protocol.http.json_text import dump_json, json_data, json_scalars
from npuserve.protocol.shared_memory import RegionSlice
from npuserve.protocol.tensor_codec import json_values, tensor_from_json
from npuserve.request import SEQUENCE_END, SEQUENCE_START, checked_text_id
from npuserve.tensor import ITEM_SIZE, Buffer, Tensor, element_count, pack_strings

if TYPE_CHECKING:
    from npuserve.response import InferenceResponse, ParameterValue

_PARAMETER_TYPES = (str, int, bool, float)

# (region, offset, byte size) → the bytes, or the place for an output.
ReadRegion = Callable[[str, int, int], Buffer]
AcquireRegion = Callable[[str, int, int], RegionSlice]


class Output(NamedTuple):
    """How one output goes back."""

    binary: bool = False
    classification: int = 0
    region: tuple[str, int, int] | None = None


_NO_ID = "[request id: <id_unknown>] "

_JSON_OUTPUT = Output()
_BINARY_OUTPUT = Output(binary=True)


class InferMessage:
    """What an infer request says, before it becomes an `InferenceRequest`.

    Attributes:
        outputs: by name, as listed; empty means all outputs, each as `default_output`.
        The others are those of `InferenceRequest`.
    """

    __slots__ = (
        "correlation_id", "default_output", "flags", "id", "inputs", "outputs", "parameters",
        "priority", "timeout_us",
    )  # fmt: skip

    def __init__(self) -> None:
        self.id = ""
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Output] = {}
        self.default_output = _JSON_OUTPUT
        self.parameters: dict[str, ParameterValue] = {}
        self.correlation_id: int | str = 0
        self.flags = 0
        self.priority = 0
        self.timeout_us = 0

    def output(self, name: str) -> Output | None:
        """How an output goes back; None for one that was not asked for."""
        return self.outputs.get(name) if self.outputs else self.default_output


# ------------------------------------------------------------------ requests


def decode_infer(
    document: Any, binary: Buffer, model_name: str, read_region: ReadRegion
) -> InferMessage:
    """An infer request from its parsed JSON and the binary data after it.

    Args:
        document: value of the JSON part.
        binary: what follows the JSON; the inputs' data become views of it.
        model_name: for error texts.
        read_region: reads an input from shared memory.

    Raises:
        InvalidArgumentError: missing members, wrong types, data that do not add up.
        NpuserveError: from `read_region`.
    """
    if type(document) is not dict or "inputs" not in document:
        raise InvalidArgumentError(
            "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"
        )
    message = InferMessage()
    request_id = document.get("id")
    if request_id is not None:
        message.id = text(request_id, "id")
    if "parameters" in document:
        _decode_parameters(message, document["parameters"])
    source = _InputSource(memoryview(binary), model_name, read_region)
    message.inputs = source.decode(objects(document["inputs"], "inputs"), message.id)
    # Differs from Triton: null is no value, here and for other optional members.
    outputs = document.get("outputs")
    for entry in objects(outputs, "outputs") if outputs is not None else ():
        # Of an output listed twice the first entry counts, as in Triton.
        message.outputs.setdefault(text_member(entry, "name"), _decode_output(entry))
    return message


class _InputSource:
    """Makes tensors of input entries, consuming the binary data in their order."""

    __slots__ = ("_binary", "_model_name", "_offset", "_read_region")

    def __init__(self, binary: memoryview, model_name: str, read_region: ReadRegion) -> None:
        self._binary = binary
        self._model_name = model_name
        self._read_region = read_region
        self._offset = 0

    def decode(self, entries: Iterable[dict[str, Any]], request_id: str) -> dict[str, Tensor]:
        """All inputs of a request, by name; every byte of the binary data is some input's."""
        inputs: dict[str, Tensor] = {}
        for entry in entries:
            tensor = self._tensor(entry)
            if tensor.name in inputs:
                raise InvalidArgumentError(
                    f"[request id: {request_id or '<id_unknown>'}] "
                    f"input '{tensor.name}' already exists in request"
                )
            inputs[tensor.name] = tensor
        if self._offset != len(self._binary):
            raise InvalidArgumentError(
                f"unexpected additional input data for model '{self._model_name}'"
            )
        return inputs

    def _tensor(self, entry: dict[str, Any]) -> Tensor:
        parameters = entry.get("parameters")
        if type(parameters) is not dict:
            parameters = {}
        size = parameters.get("binary_data_size")
        region = parameters.get("shared_memory_region")
        data = entry.get("data")
        sources = (data is not None) + (size is not None) + (region is not None)
        if sources > 1 or (not sources and "data" not in entry):
            raise _ambiguous_source(data, size, region)
        name, datatype = text_member(entry, "name"), text_member(entry, "datatype")
        shape = shape_member(entry)
        if size is not None:
            return Tensor(name, datatype, shape, self._take(name, size))
        place = _region(parameters)
        if place is not None:
            return Tensor(name, datatype, shape, self._read_region(*place))
        return tensor_from_json(name, datatype, shape, data)

    def _take(self, name: str, size: Any) -> memoryview:
        start = self._offset
        end = self._offset = start + unsigned(size, "binary_data_size")
        if end > len(self._binary):
            raise InvalidArgumentError(
                f"unexpected size for input '{name}', expecting {end - len(self._binary)} "
                f"additional bytes for model '{self._model_name}'"
            )
        return self._binary[start:end]


def _ambiguous_source(data: Any, size: Any, region: Any) -> InvalidArgumentError:
    fields = {"data": data, "binary_data_size": size, "shared_memory_region": region}
    given = " ".join(f"'{key}'" for key, value in fields.items() if value is not None)
    return InvalidArgumentError(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in "
        "'parameters', 'shared_memory_region' in 'parameters'. But "
        + (f"set {given}" if given else "no field is set")
    )


def _decode_output(entry: dict[str, Any]) -> Output:
    parameters = entry.get("parameters")
    if not parameters or type(parameters) is not dict:  # as Triton, which ignores what is none
        return _JSON_OUTPUT
    binary = boolean(parameters.get("binary_data", False), "binary_data")
    classes = unsigned(parameters.get("classification", 0), "classification")
    region = _region(parameters)
    if region is None:
        return Output(binary, classes) if classes else (_BINARY_OUTPUT if binary else _JSON_OUTPUT)
    for key, value in (("classification", classes), ("binary_data", binary)):
        if value:
            raise InvalidArgumentError(f"Output can't set both 'shared_memory_region' and '{key}'")
    return Output(region=region)


def _region(parameters: dict[str, Any]) -> tuple[str, int, int] | None:
    """Region, offset and byte size; all are checked, even if no region is named."""
    region = parameters.get("shared_memory_region")
    if region is not None:
        text(region, "shared_memory_region")
    offset = unsigned(parameters.get("shared_memory_offset", 0), "shared_memory_offset")
    byte_size = unsigned(parameters.get("shared_memory_byte_size", 0), "shared_memory_byte_size")
    return None if region is None else (region, offset, byte_size)


def _decode_parameters(message: InferMessage, parameters: Any) -> None:
    """Split the request's parameters into those with a meaning and custom ones."""
    if type(parameters) is not dict:
        raise InvalidArgumentError(
            "failed to get request params.: attempt to get members for non-object"
        )
    custom = message.parameters
    for key, value in parameters.items():
        if key == "sequence_id":
            message.correlation_id = _correlation_id(value)
        elif key == "sequence_start":
            message.flags |= SEQUENCE_START * boolean(value, key)
        elif key == "sequence_end":
            message.flags |= SEQUENCE_END * boolean(value, key)
        elif key == "priority":
            message.priority = unsigned(value, key)
        elif key == "timeout":
            message.timeout_us = unsigned(value, key)
        elif key == "binary_data_output":
            message.default_output = _BINARY_OUTPUT if boolean(value, key) else _JSON_OUTPUT
        elif key.startswith("triton_"):
            raise InvalidArgumentError(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should "
                "not be specified."
            )
        else:
            custom[key] = custom_parameter(key, value)


def _correlation_id(value: Any) -> int | str:
    if type(value) is int and 0 <= value < 1 << 64:
        return value
    return checked_text_id(text(value, "sequence_id"))


def custom_parameter(key: str, value: Any) -> ParameterValue:
    """A parameter that goes to the model as it is.

    # Differs from Triton: it makes integers from 2^63 on doubles, and cuts a text at a zero byte.

    Raises:
        InvalidArgumentError: not a text, number or boolean.
    """
    if isinstance(value, _PARAMETER_TYPES):
        return value
    raise InvalidArgumentError(
        f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
    )


def decode_raw(
    body: Buffer,
    model_name: str,
    input_specs: Mapping[str, tuple[str, Sequence[int]]],
    max_batch_size: int,
) -> InferMessage:
    """A request whose body is the data of the model's only input; all outputs go back binary.

    Args:
        body: the tensor's bytes; for BYTES the content of its one element.
        model_name: for error texts.
        input_specs: datatype and dims of the model's inputs, without batch dimension.
        max_batch_size: 0 for a model without a batch dimension.

    Raises:
        InvalidArgumentError: the input cannot be deduced.
    """
    if len(input_specs) != 1:
        raise InvalidArgumentError(
            f"{_NO_ID}Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(input_specs)} inputs in '{model_name}' model configuration"
        )
    ((name, (datatype, dims)),) = input_specs.items()
    if datatype == "BYTES":
        shape = list(dims)
        if shape != [1]:
            raise InvalidArgumentError(
                f"{_NO_ID}For BYTE datatype raw input '{name}', the model must have input shape [1]"
            )
        body = pack_strings([bytes(body)])
    else:
        shape = _raw_shape(name, dims, len(body) // ITEM_SIZE[datatype])
        expected = element_count(shape) * ITEM_SIZE[datatype]
        if expected != len(body):
            raise InvalidArgumentError(
                f"{_NO_ID}input byte size mismatch for input 'raw_input' for model "
                f"'{model_name}'. Expected {expected}, got {len(body)}"
            )
    message = InferMessage()
    message.inputs[name] = Tensor(name, datatype, [1, *shape] if max_batch_size else shape, body)
    message.default_output = _BINARY_OUTPUT
    return message


def _raw_shape(name: str, dims: Sequence[int], elements: int) -> list[int]:
    """The dims of so many elements; the variable one, of which there may be one, is deduced."""
    fixed = [dim for dim in dims if dim != -1]
    if len(dims) - len(fixed) > 1:
        raise InvalidArgumentError(
            f"{_NO_ID}The shape of the raw input '{name}' can not be deduced because there are "
            "more than one variable-sized dimension"
        )
    variable = elements // (element_count(fixed) or 1)
    return [variable if dim == -1 else dim for dim in dims]


# ----------------------------------------------------------------- responses


def json_output_bytes(response: InferenceResponse, message: InferMessage) -> int:
    """Bytes of the outputs that go back as JSON, as an estimate of the work of `encode_infer`."""
    size = 0
    for tensor in response.outputs:
        output = message.output(tensor.name)
        if output is not None and not output.binary:
            size += len(tensor.data)
    return size


def encode_infer(
    response: InferenceResponse,
    message: InferMessage,
    slices: Mapping[str, RegionSlice],
    *,
    labels: Callable[[str], Sequence[str]],
    batched: bool,
) -> tuple[bytes, list[Buffer]]:
    """The JSON part of a reply and the binary data that follow it.

    Args:
        response: one without an error.
        message: the request; says how each output goes back.
        slices: places of the outputs that go to shared memory.
        labels: of an output, for classification.
        batched: the model has a batch dimension.

    Raises:
        NpuserveError: an output that cannot be expressed in the form asked for.
    """
    entries: list[dict[str, Any]] = []
    blobs: list[Buffer] = []
    for tensor in response.outputs:
        output = message.output(tensor.name)
        if output is None:
            continue
        if classes := output.classification:
            tensor = classify(tensor, classes, labels(tensor.name), batched=batched)
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        entries.append(entry)
        if output.binary:
            entry["parameters"] = {"binary_data_size": len(tensor.data)}
            blobs.append(tensor.data)
        elif output.region is not None:
            slices[tensor.name].write(tensor.name, tensor.data)
        else:
            entry["data"] = json_data(json_values(tensor))
    return dump_json(_reply(response, message.id, entries)), blobs


def _reply(response: InferenceResponse, request_id: str, outputs: list[Any]) -> dict[str, Any]:
    reply: dict[str, Any] = {"id": request_id} if request_id else {}
    reply["model_name"] = response.model_name
    reply["model_version"] = response.model_version
    if response.parameters:
        reply["parameters"] = json_scalars(response.parameters)
    reply["outputs"] = outputs
    return reply
