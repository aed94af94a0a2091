"""What a model's file says of its inputs and outputs, against what its configuration says.

Shared by the backends whose files describe themselves (onnxruntime, pytorch, om, ge). Two pure
functions: `complete_config` fills what config.pbtxt leaves open, `check_config` refuses what
contradicts the file. Rules and texts are those of Triton's backends (backend repository:
src/backend_model.cc, src/backend_common.cc; onnxruntime_backend: src/onnxruntime.cc).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from npuserve._proto import model_config_pb2
from npuserve.errors import InvalidConfigError
from npuserve.model_config import datatype_enum

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from npuserve.model_config import ModelConfig

DEFAULT_MAX_BATCH_SIZE = 4  # Triton's, where --backend-config=default-max-batch-size is not given
_DEFAULT_SETTING = "default-max-batch-size"


def default_max_batch_size(options: Mapping[str, str]) -> int:
    """The max_batch_size of models whose configuration gives none, by the backend's options.

    Raises:
        InvalidConfigError: it is no number.
    """
    text = options.get(_DEFAULT_SETTING)
    if text is None:
        return DEFAULT_MAX_BATCH_SIZE
    if not text.isdecimal():
        raise InvalidConfigError.of_parameter(
            _DEFAULT_SETTING, f"'{_DEFAULT_SETTING}' is '{text}'; a number is expected"
        )
    return int(text)


@dataclass(frozen=True)
class ModelTensor:
    """One tensor of a model's file.

    Attributes:
        datatype: wire name, such as "FP32".
        shape: the whole shape, batch dimension included; -1 is a free dimension, `()` a scalar
            or a shape the file does not tell.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelSignature:
    """Inputs and outputs in the order of the file."""

    inputs: tuple[ModelTensor, ...]
    outputs: tuple[ModelTensor, ...]

    def unbatchable_tensor(self) -> ModelTensor | None:
        """The first tensor without a free first dimension; None if the model can batch."""
        for tensor in chain(self.inputs, self.outputs):
            if not tensor.shape or tensor.shape[0] != -1:
                return tensor
        return None


def complete_config(
    config: ModelConfig,
    signature: ModelSignature,
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
) -> None:
    """Fill max_batch_size, inputs, outputs and the scheduler of `config` from the file.

    An explicit `max_batch_size: 0` cannot be told from an absent one; so the default is taken
    only where no dims are configured either.

    Raises:
        InvalidConfigError: max_batch_size is given and the model cannot batch.
    """
    fixed = signature.unbatchable_tensor()
    if config.max_batch_size > 0 and fixed is not None:
        raise InvalidConfigError(
            f"autofill failed for model '{config.name}': model does not support batching while "
            f"non-zero max_batch_size is specified: the first dimension of tensor '{fixed.name}' "
            f"(shape {_text(fixed.shape)}) is no free batch dimension; write max_batch_size: 0 "
            "and the whole shape into dims, or export the model with a dynamic first dimension",
            "max_batch_size",
        )
    has_dims = any(entry.dims for entry in config.input) or any(
        entry.dims for entry in config.output
    )
    if config.max_batch_size == 0 and not has_dims and fixed is None:
        config.max_batch_size = max(0, default_max_batch_size)
    scheduler_inputs = scheduler_input_names(config)
    scheduler_outputs = scheduler_output_names(config)
    _complete(config.input, signature.inputs, scheduler_inputs, config.max_batch_size > 0)
    _complete(config.output, signature.outputs, scheduler_outputs, config.max_batch_size > 0)
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.preferred_batch_size.append(config.max_batch_size)


def check_config(config: ModelConfig, signature: ModelSignature) -> None:
    """Refuse a configuration that contradicts the file.

    The configuration may leave outputs out, but no input. Tensors that the scheduler adds
    (sequence controls, states, batch inputs) count as inputs and are not checked further.

    Raises:
        InvalidConfigError: naming the tensor, what is configured and what the file has.
    """
    expected = len(config.input) + len(scheduler_input_names(config))
    if expected != len(signature.inputs):
        names = ", ".join(tensor.name for tensor in signature.inputs)
        raise InvalidConfigError(
            f"unable to load model '{config.name}', configuration expects {expected} inputs, "
            f"model provides {len(signature.inputs)} ({names})",
            "input",
        )
    _check(config, "input", config.input, signature.inputs)
    _check(config, "output", config.output, signature.outputs)


def scheduler_input_names(config: ModelConfig) -> set[str]:
    """Inputs of the model that the scheduler makes, not the client."""
    sequence = config.sequence_batching
    names = {control.name for control in sequence.control_input}
    names.update(state.input_name for state in sequence.state)
    for batch_input in config.batch_input:
        names.update(batch_input.target_name)
    return names


def scheduler_output_names(config: ModelConfig) -> set[str]:
    """Outputs of the model that the scheduler keeps (states); clients may see them as well."""
    return {state.output_name for state in config.sequence_batching.state}


def _complete(
    configured: Any, tensors: Iterable[ModelTensor], left_out: set[str], batching: bool
) -> None:
    by_name = {tensor.name: tensor for tensor in configured}
    for tensor in tensors:
        if by_name:
            entry = by_name.get(tensor.name)
            if entry is None:
                continue
        elif tensor.name in left_out:
            continue
        else:
            entry = configured.add(name=tensor.name)
        if entry.data_type == model_config_pb2.TYPE_INVALID:
            entry.data_type = datatype_enum(tensor.datatype)
        if not entry.dims:
            # Triton's configuration has no scalars: one is served as a tensor of one element.
            entry.dims.extend((tensor.shape[1:] if batching else tensor.shape) or (1,))


def _check(config: ModelConfig, role: str, configured: Any, tensors: Sequence[ModelTensor]) -> None:
    by_name = {tensor.name: tensor for tensor in tensors}
    flat = _flat_tensors(config)
    for index, entry in enumerate(configured):
        field = f"{role}[{index}]"
        tensor = by_name.get(entry.name)
        if tensor is None:
            allowed = ", ".join(by_name)
            raise InvalidConfigError(
                f"unexpected inference {role} '{entry.name}', allowed {role}s are: {allowed}",
                f"{field}.name",
            )
        if entry.data_type != datatype_enum(tensor.datatype):
            configured_type = model_config_pb2.DataType.Name(entry.data_type)
            type_name = model_config_pb2.DataType.Name(datatype_enum(tensor.datatype))
            raise InvalidConfigError(
                f"unable to load model '{config.name}', configuration expects datatype "
                f"{configured_type} for {role} '{entry.name}', model provides {type_name}",
                f"{field}.data_type",
            )
        if entry.name not in flat:
            _check_shape(config, field, entry, tensor)


def _flat_tensors(config: ModelConfig) -> set[str]:
    """Tensors that the model sees as one row of all requests' elements, whatever their dims."""
    names = {entry.name for entry in config.input if entry.allow_ragged_batch}
    for batch_output in config.batch_output:
        names.update(batch_output.target_name)
    return names


def _check_shape(config: ModelConfig, field: str, entry: Any, tensor: ModelTensor) -> None:
    if entry.HasField("reshape"):
        dims, field = tuple(entry.reshape.shape), f"{field}.reshape"
    else:
        dims, field = tuple(entry.dims), f"{field}.dims"
    batching = config.max_batch_size > 0
    if not tensor.shape and dims in ((), (1,)) and not batching:
        return
    where = f"model '{config.name}', tensor '{entry.name}'"
    if batching and (not tensor.shape or tensor.shape[0] != -1):
        raise InvalidConfigError(
            f"{where}: for the model to support batching the shape should have at least 1 "
            "dimension and the first dimension must be -1; but shape expected by the model is "
            f"{_text(tensor.shape)}; use max_batch_size: 0 with the whole shape in dims",
            "max_batch_size",
        )
    full = (-1, *dims) if batching else dims
    if len(full) == len(tensor.shape) and all(
        -1 in pair or pair[0] == pair[1] for pair in zip(full, tensor.shape, strict=True)
    ):
        return
    explanation = (
        "(an initial batch dimension because max_batch_size > 0 followed by the explicit tensor "
        f"shape, making complete shape {_text(full)})"
        if batching
        else f"(shape {_text(full)})"
    )
    raise InvalidConfigError(
        f"{where}: the model expects {len(tensor.shape)} dimensions (shape {_text(tensor.shape)}) "
        f"but the model configuration specifies {len(full)} dimensions {explanation}",
        field,
    )


def _text(shape: Iterable[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
