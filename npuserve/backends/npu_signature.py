"""A compiled NPU model's description as the signature that a configuration is checked against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npuserve.backends.acl.model import ModelKind
from npuserve.backends.model_signature import ModelSignature, ModelTensor
from npuserve.errors import InvalidArgumentError
from npuserve.model_config import datatype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npuserve.backends.acl.model import ModelDescription, TensorSpec
    from npuserve.backends.acl.runner import ModelRunner
    from npuserve.model_config import ModelConfig


def signature_of(runner: ModelRunner, config: ModelConfig) -> ModelSignature:
    """Names, datatypes and shapes, -1 where a request is free.

    A static model counts as able to batch if max_batch_size is configured and all its tensors
    share their first axis: batches are padded up to it, and larger ones are split.
    """
    description = runner.description
    shapes = [spec.dims for spec in description.inputs]
    output_shapes = runner.output_shapes()
    if description.kind is ModelKind.STATIC and config.max_batch_size > 0:
        leading = {shape[:1] for shape in (*shapes, *output_shapes)}
        if len(leading) == 1 and leading != {()}:
            shapes = [(-1, *shape[1:]) for shape in shapes]
            output_shapes = [(-1, *shape[1:]) for shape in output_shapes]
    names = output_names(description.outputs, config)
    return ModelSignature(
        tuple(
            ModelTensor(spec.name, spec.datatype, shape)
            for spec, shape in zip(description.inputs, shapes, strict=True)
        ),
        tuple(
            ModelTensor(name, spec.datatype, shape)
            for name, spec, shape in zip(names, description.outputs, output_shapes, strict=True)
        ),
    )


def default_batch(runner: ModelRunner, default: int) -> int:
    """max_batch_size of a model whose configuration gives none."""
    if runner.description.kind is ModelKind.BATCH_GEARS:
        return max(gear.key[0] for gear in runner.description.gears)
    return default


def output_names(outputs: Sequence[TensorSpec], config: ModelConfig) -> list[str]:
    """The names under which the outputs are served.

    The file says `node:0:tensor`. A configuration may use that, or the tensor's name alone, which
    is also what is served where nothing is configured (unless two outputs share it). Where no
    configured name is known and the number is right, the order decides.
    """
    configured = [output.name for output in config.output]
    tails = [spec.tensor_name for spec in outputs]
    names = [
        spec.name if spec.name in configured or tails.count(tail) > 1 else tail
        for spec, tail in zip(outputs, tails, strict=True)
    ]
    if configured and len(configured) == len(names) and not set(configured) & set(names):
        return configured
    return names


def batch_tensor_settings(config: ModelConfig) -> list[str]:
    """The settings by which a configuration asks for tensors of the whole batch."""
    settings = {
        "batch_input": bool(config.batch_input),
        "batch_output": bool(config.batch_output),
        "allow_ragged_batch": any(entry.allow_ragged_batch for entry in config.input),
    }
    return [name for name, is_set in settings.items() if is_set]


def refuse_batch_tensors(config: ModelConfig, where: str) -> None:
    """Equal shapes run together there: there is no flat row of ragged requests.

    Raises:
        InvalidArgumentError: the configuration asks for one.
    """
    for name in batch_tensor_settings(config):
        raise InvalidArgumentError(
            f"unable to load model '{config.name}', {name} is not supported for {where}; models "
            "compiled for dynamic shapes and backends pytorch, onnxruntime and python support it"
        )


def check_batch_tensors(config: ModelConfig, description: ModelDescription) -> None:
    """Only a model of dynamic shape takes rows of any length.

    To the length of a gear they would have to be padded, and counts and ends with them: what that
    means only the model knows.

    Raises:
        InvalidArgumentError: the model has compiled shapes, or a batch input another datatype.
    """
    if description.kind is not ModelKind.RANGES:
        refuse_batch_tensors(config, f"a model of {description.kind.value} shape")
    datatypes = {spec.name: spec.datatype for spec in description.inputs}
    for entry in config.batch_input:
        for name in entry.target_name:
            made, wanted = datatype_name(entry.data_type), datatypes.get(name)
            if made != wanted:
                raise InvalidArgumentError(
                    f"unable to load model '{config.name}', batch_input '{name}' is {made}, the "
                    f"model's input is {wanted or 'not there'}"
                )


def is_complete(config: ModelConfig) -> bool:
    """Whether the configuration leaves nothing to fill from the file."""
    tensors: list[Any] = [*config.input, *config.output]
    return bool(config.input and config.output) and all(
        tensor.data_type and (tensor.dims or tensor.HasField("reshape")) for tensor in tensors
    )


def complete_scheduler(config: ModelConfig) -> None:
    """Batch dynamically if the model can and nothing else is said, as `complete_config` does."""
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.preferred_batch_size.append(config.max_batch_size)
