"""A request against the model's configuration: names, datatypes, shapes, sizes, batch dimension.

Step 5 of the walk. Pure: no clock, no I/O. Every refusal names the tensor, what was expected
and what came, in Triton's words; the order of the checks is Triton's too, since clients see only
the first. Source: Triton core src/infer_request.cc, InferenceRequest::Normalize.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from npuserve.errors import InvalidArgumentError
from npuserve.model_config import datatype_name
from npuserve.request import Checked
from npuserve.tensor import ITEM_SIZE, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from npuserve._proto.model_config_pb2 import ModelInput, ModelOutput
    from npuserve.model_config import ModelConfig
    from npuserve.request import InferenceRequest

_MAX_ELEMENTS = (1 << 63) - 1
_KNOWN_SHAPES = 1024  # remembered per model; a client cannot make it grow without bound
_LENGTH = struct.Struct("<I")

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a configuration, in wire terms.

    Attributes:
        dims: without the batch dimension; -1 is variable.
        reshape: what the backend sees instead of `dims`; None for the same.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    optional: bool = False

    @classmethod
    def of(cls, entry: ModelInput | ModelOutput, *, optional: bool = False) -> TensorSpec:
        """The spec of an entry of the configuration's `input` or `output`."""
        return cls(
            entry.name,
            datatype_name(entry.data_type),
            tuple(entry.dims),
            tuple(entry.reshape.shape) if entry.HasField("reshape") else None,
            optional,
        )


def request_prefix(request_id: str) -> str:
    """The `[request id: …] ` that Triton puts before its errors about one request."""
    return f"[request id: {request_id or '<id_unknown>'}] "


class RequestValidator:
    """The checks of one model version, with what it has already seen remembered.

    A shape that passed once passes again by one dictionary look-up, which is all that a steady
    load costs here.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._name = config.name
        self._max_batch_size = config.max_batch_size
        # By name, in the order of the configuration.
        self.inputs = {
            entry.name: TensorSpec.of(entry, optional=entry.optional) for entry in config.input
        }
        self.outputs = {entry.name: TensorSpec.of(entry) for entry in config.output}
        self.output_names = tuple(self.outputs)
        self._required = sum(not spec.optional for spec in self.inputs.values())
        self._reshapes = any(spec.reshape is not None for spec in self.inputs.values())
        # Backends learn the size of a batch from its first input; control and state tensors have
        # it, too.
        sequences = config.sequence_batching
        self._needs_input = (
            config.max_batch_size > 0
            and not config.HasField("ensemble_scheduling")
            and not sequences.control_input
            and not sequences.state
        )
        # (input name, datatype, shape) → (size in bytes or -1 for BYTES, batch size, elements)
        self._known: dict[tuple[str, str, tuple[int, ...]], tuple[int, int, int]] = {}

    def check(self, request: InferenceRequest) -> int:
        """Validate the request, apply `reshape` to its inputs, and return its batch size.

        Returns:
            Number of batch elements; 0 for a model without a batch dimension.

        Raises:
            InvalidArgumentError: with Triton's text; the request is unchanged.
        """
        self._check_names(request)
        batch_size = -1
        strings: tuple[tuple[str, int], ...] = ()
        for tensor in request.inputs.values():
            key = (tensor.name, tensor.datatype, tuple(tensor.shape))
            size, batch, elements = self._known.get(key) or self._learn(request, key)
            if batch != batch_size >= 0:
                raise InvalidArgumentError(
                    f"{request_prefix(request.id)}input '{tensor.name}' batch size does not "
                    f"match other inputs for '{self._name}'"
                )
            batch_size = batch
            if size < 0:
                self._check_strings(request, tensor, elements)
                strings += ((tensor.name, elements),)
            elif len(tensor.data) != size:
                raise InvalidArgumentError(
                    f"{request_prefix(request.id)}input byte size mismatch for input "
                    f"'{tensor.name}' for model '{self._name}'. Expected {size}, "
                    f"got {len(tensor.data)}"
                )
        if batch_size < 0 and self._needs_input:
            raise InvalidArgumentError(
                f"{request_prefix(request.id)}out of bounds index 0: request has 0 inputs, but "
                f"model '{self._name}' needs one for the size of its batch"
            )
        batch_size = max(batch_size, 0)
        if self._reshapes:
            self._apply_reshape(request)
        else:
            request.checked = Checked(self, batch_size, strings)
        return batch_size

    def check_again(self, request: InferenceRequest, proof: Checked) -> int:
        """`check` for a request of which `proof`, of this validator, holds."""
        for name, elements in proof.strings:
            self._check_strings(request, request.inputs[name], elements)
        return proof.batch_size

    def _check_names(self, request: InferenceRequest) -> None:
        for name in request.requested_outputs:
            if name not in self.outputs:
                raise InvalidArgumentError(
                    f"unexpected inference output '{name}' for model '{self._name}'"
                )
        inputs, most = request.inputs, len(self.inputs)
        if not self._required <= len(inputs) <= most or (
            self._required < most and self._missing(inputs)
        ):
            self._refuse_count(request)

    def _missing(self, inputs: dict[str, Tensor]) -> bool:
        # Differs from Triton: it checks only the number, so an optional input sent instead of a
        # required one passes there and fails in the model.
        return any(not spec.optional and name not in inputs for name, spec in self.inputs.items())

    def _refuse_count(self, request: InferenceRequest) -> None:
        given = request.inputs
        for name in given:
            if name not in self.inputs:
                self._refuse_name(name)
        expected = (
            f"expected number of inputs between {self._required} and {len(self.inputs)}"
            if self._required < len(self.inputs)
            else f"expected {len(self.inputs)} inputs"
        )
        missing = [n for n, spec in self.inputs.items() if not spec.optional and n not in given]
        raise InvalidArgumentError(
            f"{request_prefix(request.id)}{expected} but got {len(given)} inputs for model "
            f"'{self._name}'. Got input(s) [{_quoted(given)}], but missing required input(s) "
            f"[{_quoted(missing)}]. Please provide all required input(s)."
        )

    def _refuse_name(self, name: str) -> NoReturn:
        raise InvalidArgumentError(f"unexpected inference input '{name}' for model '{self._name}'")

    def _learn(
        self, request: InferenceRequest, key: tuple[str, str, tuple[int, ...]]
    ) -> tuple[int, int, int]:
        name, datatype, shape = key
        spec = self.inputs.get(name)
        if spec is None:
            self._refuse_name(name)
        prefix = request_prefix(request.id)
        batch_size = self._check_batch(prefix, name, shape)
        if datatype != spec.datatype:
            shown = datatype if datatype in ITEM_SIZE or datatype == "BYTES" else "<invalid>"
            raise InvalidArgumentError(
                f"{prefix}inference input '{name}' data-type is '{shown}', but model "
                f"'{self._name}' expects '{spec.datatype}'"
            )
        self._check_dims(prefix, spec, shape)
        elements = math.prod(shape)
        if elements > _MAX_ELEMENTS:
            raise InvalidArgumentError(
                f"{prefix}shape {_shape_text(shape)} of input '{name}' for model '{self._name}' "
                "has more elements than a tensor can have"
            )
        item_size = ITEM_SIZE.get(datatype)
        entry = (-1 if item_size is None else elements * item_size, batch_size, elements)
        if len(self._known) >= _KNOWN_SHAPES:
            self._known.clear()
        self._known[key] = entry
        return entry

    def _check_batch(self, prefix: str, name: str, shape: Sequence[int]) -> int:
        if self._max_batch_size < 1:
            return 0
        if not shape:
            raise InvalidArgumentError(
                f"{prefix}input '{name}' has no shape but model requires batch dimension for "
                f"'{self._name}'"
            )
        if shape[0] > self._max_batch_size:
            raise InvalidArgumentError(
                f"{prefix}inference request batch-size must be <= {self._max_batch_size} for "
                f"'{self._name}'"
            )
        if shape[0] < 1:
            raise InvalidArgumentError(
                f"{prefix}inference request batch-size must be >= 1 for '{self._name}', got "
                f"shape {_shape_text(shape)} for input '{name}'"
            )
        return shape[0]

    def _check_dims(self, prefix: str, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        batching = self._max_batch_size > 0
        dims = shape[1:] if batching else shape
        if any(dim < 0 for dim in shape):
            raise InvalidArgumentError(
                f"{prefix}All input dimensions should be specified for input '{spec.name}' for "
                f"model '{self._name}', got {_shape_text(shape)}"
            )
        if len(dims) == len(spec.dims) and all(
            want in (-1, got) for want, got in zip(spec.dims, dims, strict=True)
        ):
            return
        expected = (-1, *spec.dims) if batching else spec.dims
        raise InvalidArgumentError(
            f"{prefix}unexpected shape for input '{spec.name}' for model '{self._name}'. "
            f"Expected {_shape_text(expected)}, got {_shape_text(shape)}. "
            + (_BATCH_NOTE if batching else "")
        )

    def _check_strings(self, request: InferenceRequest, tensor: Tensor, expected: int) -> None:
        count, rest = tensor.scan_strings()
        if count == expected and not rest:
            return
        name, prefix = tensor.name, request_prefix(request.id)
        if count == expected:
            raise InvalidArgumentError(
                f"{prefix}unexpected number of string elements {expected + 1} for inference "
                f"input '{name}' for model '{self._name}', expecting {expected}"
            )
        if 0 < rest < _LENGTH.size:
            raise InvalidArgumentError(
                f"{prefix}incomplete string length indicator for inference input '{name}' for "
                f"model '{self._name}', expecting 4 bytes but only {rest} bytes "
                "available. Please make sure the string length indicator is in one buffer."
            )
        if rest:
            (length,) = _LENGTH.unpack_from(tensor.data, len(tensor.data) - rest)
            raise InvalidArgumentError(
                f"{prefix}incomplete string data for inference input '{name}' for model "
                f"'{self._name}', expecting string of length {length} but only "
                f"{rest - _LENGTH.size} bytes available."
            )
        raise InvalidArgumentError(
            f"{prefix}expected {expected} string elements for inference input '{name}' for "
            f"model '{self._name}', got {count}"
        )

    def _apply_reshape(self, request: InferenceRequest) -> None:
        for name, tensor in list(request.inputs.items()):
            spec = self.inputs[name]
            if spec.reshape is not None:
                request.inputs[name] = reshaped(
                    tensor, spec.dims, spec.reshape, self._max_batch_size > 0
                )


def reshaped(tensor: Tensor, dims: Sequence[int], target: Sequence[int], batching: bool) -> Tensor:
    """The same bytes under another shape.

    Args:
        dims: configured dims that `tensor` has now, -1 variable.
        target: configured dims it shall have; its k-th -1 takes the k-th variable size.
        batching: whether both have a leading batch dimension that stays.
    """
    shape = list(tensor.shape)
    head, own = (shape[:1], shape[1:]) if batching else ([], shape)
    variable = iter([size for size, dim in zip(own, dims, strict=False) if dim == -1])
    new = [next(variable, -1) if dim == -1 else dim for dim in target]
    return Tensor(tensor.name, tensor.datatype, head + new, tensor.data)


def _shape_text(shape: Sequence[int]) -> str:
    return "[" + ",".join(str(dim) for dim in shape) + "]"


def _quoted(names: Iterable[str]) -> str:
    return ",".join(f"'{name}'" for name in names)
