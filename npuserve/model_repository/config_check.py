"""Every rule that makes a configuration invalid. Pure; all problems are reported at once.

Each check is a generator of problems, or of the texts of one field, worded as Triton words them.
Source: Triton core src/model_config_utils.cc (ValidateModelConfig and its helpers).
"""

from __future__ import annotations

import itertools
import math
import os
import re
from typing import TYPE_CHECKING

from npuserve._proto import model_config_pb2 as pb
from npuserve.errors import InvalidArgumentError
from npuserve.model_config import ModelConfig, enum_name
from npuserve.model_repository.batch_input_check import check_batch_io
from npuserve.model_repository.bounds_check import check_bounds
from npuserve.model_repository.defaults import ENSEMBLE, PLATFORM_BACKENDS
from npuserve.model_repository.ensemble_check import check_ensemble
from npuserve.model_repository.problems import Problem, under
from npuserve.model_repository.scheduling_check import check_scheduling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_Tensor = pb.ModelInput | pb.ModelOutput

# Any other backend, python for one, may be given with whatever platform.
_PLATFORM_BOUND_BACKENDS = frozenset(PLATFORM_BACKENDS.values())

# What may stand behind the underscore that makes a label of a metric tag.
_LABEL = re.compile(r"([a-zA-Z0-9][a-zA-Z0-9_]*)?")

_KINDS_WITHOUT_CARDS = (pb.ModelInstanceGroup.KIND_CPU, pb.ModelInstanceGroup.KIND_MODEL)


def validate(
    config: ModelConfig,
    model_dir: str | os.PathLike[str],
    *,
    completed: bool,
    where: Callable[[str], str] = lambda _field: "",
) -> None:
    """Refuse a configuration that breaks a rule.

    Args:
        config: with defaults filled in.
        model_dir: folder of the model; only its path is used.
        completed: inputs and outputs are final (the backend completed them, or may not).
        where: what to add to a problem to say where in a file its field is.

    Raises:
        InvalidArgumentError: with the texts of all broken rules.
    """
    problems = dict.fromkeys(_problems(config, os.fspath(model_dir), completed))
    problems = problems or dict.fromkeys(check_bounds(config))  # some rules speak of them, too
    if problems:
        raise InvalidArgumentError("; ".join(p.text + where(p.field) for p in problems))


def _problems(config: ModelConfig, model_dir: str, completed: bool) -> Iterator[Problem]:
    yield from under("platform" if config.platform else "backend", _check_backend(config))
    if config.max_batch_size < 0:
        text = f"'max_batch_size' must be non-negative value for {config.name}"
        yield Problem("max_batch_size", text)
    yield from check_scheduling(config, completed)
    yield from check_ensemble(config)
    yield from _check_instance_groups(config)
    yield from under("response_cache", _check_response_cache(config))
    yield from under("model_metrics", _check_metrics(config))
    yield from _check_metric_tags(config)
    yield from _check_labels(config, model_dir)
    if completed or config.platform == ENSEMBLE:
        for index, tensor in enumerate(config.input):
            yield from under(f"input[{index}]", _check_tensor(config, tensor, "model input"))
            yield from under(f"input[{index}].format", _check_format(config, tensor))
        for index, output in enumerate(config.output):
            yield from under(f"output[{index}]", _check_tensor(config, output, "model output"))
        yield from check_batch_io(config)
    yield from _check_names(config)


def _check_names(config: ModelConfig) -> Iterator[Problem]:
    """No two tensors of one name; an output written twice in the same words does no harm.

    # Differs from Triton: it loads all such models. Of two outputs that differ one is lost, and
    # two inputs can never be sent.
    """
    repeated = [*_repeated("input", config.input), *_repeated("output", config.output)]
    for field, tensor, first in repeated:
        if isinstance(tensor, pb.ModelInput) or tensor != first:
            text = f"{field.partition('[')[0]} '{tensor.name}' is specified more than once"
            yield Problem(field, f"{text} for {config.name}")
    inputs = {tensor.name for tensor in config.input}
    for index, control in enumerate(config.sequence_batching.control_input):
        if control.name in inputs:
            yield Problem(
                f"sequence_batching.control_input[{index}]",
                f"sequence batching control tensor '{control.name}' is an input already for "
                f"{config.name}",
            )
    for index, state in enumerate(config.sequence_batching.state):
        if state.input_name in inputs:
            yield Problem(
                f"sequence_batching.state[{index}].input_name",
                f"state input '{state.input_name}' is an input already for {config.name}",
            )


def _repeated(what: str, tensors: Sequence[_Tensor]) -> Iterator[tuple[str, _Tensor, _Tensor]]:
    """(field, tensor, the first of its name) of tensors whose name was there before."""
    seen: dict[str, _Tensor] = {}
    for index, tensor in enumerate(tensors):
        first = seen.setdefault(tensor.name, tensor)
        if tensor.name and first is not tensor:
            yield f"{what}[{index}]", tensor, first


def _check_backend(config: ModelConfig) -> Iterator[str]:
    name, platform, backend = config.name, config.platform, config.backend
    if platform == ENSEMBLE:
        if backend:
            yield (
                f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type"
            )
    elif not platform and not backend:
        if not config.HasField("ensemble_scheduling"):
            yield f"must specify 'platform' or 'backend' for '{name}'"
    elif platform and not backend:
        yield f"unexpected platform type '{platform}' for {name}"
    elif (
        backend in _PLATFORM_BOUND_BACKENDS and PLATFORM_BACKENDS.get(platform, backend) != backend
    ):
        yield f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}"


def _check_tensor(config: ModelConfig, tensor: _Tensor, what: str) -> Iterator[str]:
    """Name, type and dimensions of one input or output; `what` begins the texts."""
    suffix = f" for {config.name}"
    if not tensor.name:
        yield f"{what} must specify 'name'{suffix}"
        return
    subject = f"{what} '{tensor.name}'"
    if tensor.data_type == pb.TYPE_INVALID or tensor.data_type not in pb.DataType.values():
        yield f"{subject} must specify 'data_type'{suffix}"
    if not tensor.dims:
        yield f"{subject} must specify 'dims'{suffix}"
    if any(dim < 1 and dim != -1 for dim in tensor.dims):
        yield (
            f"{subject} dimension must be integer >= 1, or -1 to indicate a variable-size "
            f"dimension{suffix}"
        )
    if tensor.is_shape_tensor and config.platform != "tensorrt_plan":
        yield f"shape tensors are only supported for TensorRT platform{suffix}"
    if tensor.is_non_linear_format_io and config.platform != "tensorrt_plan":
        yield f"Non-linear IO format is only supported for the TensorRT platform{suffix}"
    if tensor.HasField("reshape"):
        for problem in _reshape_problems(config, tensor.dims, tensor.reshape.shape):
            yield f"{subject} {problem}{suffix}"


def _reshape_problems(
    config: ModelConfig, dims: Sequence[int], reshape: Sequence[int]
) -> Iterator[str]:
    if not reshape:
        if config.max_batch_size == 0:
            yield (
                "cannot have empty reshape for non-batching model as scalar tensors are not "
                "supported"
            )
        elif list(dims) != [1] and math.prod(dims) != 1:
            yield "has different size for dims and reshape"
        return
    if any(dim < 1 and dim != -1 for dim in reshape):
        yield (
            "reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"
        )
        return
    before, after = _fixed_products(dims), _fixed_products(reshape)
    if len(before) != len(after) and len(before) > 1 and len(after) > 1:
        yield "has different number of variable-size dimensions for dims and reshape"
    elif before != after:
        yield "has different size for dims and reshape"


def _fixed_products(dims: Sequence[int]) -> list[int]:
    """Products of the fixed dimensions before, between and after the variable ones."""
    products = [1]
    for dim in dims:
        if dim == -1:
            products.append(1)
        else:
            products[-1] *= dim
    return products


def _check_format(config: ModelConfig, tensor: pb.ModelInput) -> Iterator[str]:
    if tensor.format != pb.ModelInput.FORMAT_NONE and len(tensor.dims) != 3:
        yield f"model input NHWC/NCHW require 3 dims for {config.name}"


def _check_labels(config: ModelConfig, model_dir: str) -> Iterator[Problem]:
    for index, output in enumerate(config.output):
        path = os.path.normpath(output.label_filename)
        if os.path.isabs(path) or path.split(os.sep)[0] == os.pardir:
            yield Problem(
                f"output[{index}].label_filename",
                f"label file path '{os.path.normpath(os.path.join(model_dir, path))}' for output "
                f"'{output.name}' in model '{config.name}' is outside model directory",
            )


def _check_instance_groups(config: ModelConfig) -> Iterator[Problem]:
    """Rules that need no knowledge of the machine; the others are checked at placement."""
    for index, group in enumerate(config.instance_group):
        name = group.name or f"{config.name}_{index}"
        block, subject = f"instance_group[{index}]", f"instance group {name} of model {config.name}"
        if group.gpus and group.kind in _KINDS_WITHOUT_CARDS:
            yield Problem(
                f"{block}.gpus",
                f"{subject} has kind {enum_name(group, 'kind')} but specifies one or more GPUs",
            )
        if group.profile and config.platform != "tensorrt_plan":
            yield Problem(
                f"{block}.profile",
                f"{subject} and platform {config.platform}specifies profile field which is only "
                "supported for TensorRT models",
            )
        if group.count < 0:
            # Differs from Triton: it takes a negative count for 1.
            yield Problem(f"{block}.count", f"{subject} has a negative count")
    if config.instance_group and all(group.passive for group in config.instance_group):
        # Differs from Triton: it crashes at the first request.
        yield Problem(
            "instance_group",
            f"all instance groups of model {config.name} are passive, so that no instance would "
            "ever be given a request",
        )


def _check_response_cache(config: ModelConfig) -> Iterator[str]:
    if not config.response_cache.enable:
        return
    obstacles = (
        (config.HasField("sequence_batching"), "sequence batching scheduler"),
        (config.model_transaction_policy.decoupled, "'decoupled' transaction policy"),
    )
    for present, obstacle in obstacles:
        if present:
            yield (
                f"Response Cache does not currently support model {config.name} with {obstacle}. "
                "Please disable the response cache."
            )


def _check_metrics(config: ModelConfig) -> Iterator[str]:
    for control in config.model_metrics.metric_control:
        if not control.HasField("metric_identifier"):
            yield "metric control must specify 'metric_identifier'"
        elif not control.metric_identifier.family:
            yield "metric identifier must specify non-empty 'family'"
        if not control.HasField("histogram_options"):
            yield "metric control must specify 'histogram_options'"
        elif not control.histogram_options.buckets:
            yield "histogram options must specify non-empty 'buckets'"
        # Differs from Triton: it wants no more than that there are some.
        elif not _is_increasing(control.histogram_options.buckets):
            yield "histogram options must specify strictly increasing 'buckets'"


def _is_increasing(numbers: Sequence[float]) -> bool:
    pairs = itertools.pairwise(numbers)
    return all(low < high for low, high in pairs) and not math.isnan(numbers[0])


def _check_metric_tags(config: ModelConfig) -> Iterator[Problem]:
    """Names that make labels: the metrics of all models would be unreadable.

    # Differs from Triton: it crashes.
    """
    for name in config.metric_tags:
        if not _LABEL.fullmatch(name):
            yield Problem(
                f'metric_tags["{name}"]',
                f"metric tag '{name}' of model {config.name} makes no label: write letters, digits "
                "and underscores, which are not the first",
            )
