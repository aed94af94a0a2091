"""Whether the members of an ensemble fit together: what a load asks. Pure.

The rules that need nothing but the ensemble's own configuration (a tensor written twice, an output
never written) were checked when the configuration was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npuserve.errors import InvalidConfigError
from npuserve.model_config import datatype_name
from npuserve.server.ensemble_graph import EnsembleGraph, fits, member_configs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npuserve._proto.model_config_pb2 import ModelInput, ModelOutput
    from npuserve.model_config import ModelConfig
    from npuserve.server.ensemble_graph import ConfigLookup


def check_ensemble(config: ModelConfig, lookup_config: ConfigLookup) -> bool:
    """Check an ensemble against the configurations of its members.

    Returns:
        Whether a member is decoupled, which makes the ensemble decoupled too.

    Raises:
        InvalidConfigError: with Triton's text, followed by the number of the step from 0.

    Source: Triton core src/ensemble_scheduler/ensemble_utils.cc, ValidateEnsembleConfig.
    """
    members = member_configs(config, lookup_config)
    for index, member in enumerate(members):
        _check_batch_size(config, index, member)
        _check_mapping(config, index, member)
    _check_consistency(config, members)
    return EnsembleGraph(config, lookup_config).decoupled


def _check_batch_size(config: ModelConfig, index: int, member: ModelConfig) -> None:
    # A member without a batch dimension is fine as long as the shapes agree.
    if 0 < member.max_batch_size < config.max_batch_size:
        raise InvalidConfigError(
            f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it "
            f"contains model {member.name} which only allows maximum batch size to be "
            f"{member.max_batch_size} (step {index})",
            "max_batch_size",
        )


def _check_mapping(config: ModelConfig, index: int, member: ModelConfig) -> None:
    """Names of one step against those of its member."""
    step = config.ensemble_scheduling.step[index]
    inputs = {entry.name: entry for entry in member.input}
    outputs = {entry.name for entry in member.output}
    for name, tensor in sorted(step.input_map.items()):
        if name not in inputs:
            raise _step_error(
                config, index,
                f"ensemble tensor {tensor} is mapping to non-existing input {name} in model "
                f"{step.model_name}", f'input_map["{name}"]',
            )  # fmt: skip
    for name, entry in inputs.items():
        if name not in step.input_map and not entry.optional:
            raise _step_error(
                config, index,
                f"input {name} in model {step.model_name} is not mapped to any ensemble tensors",
            )  # fmt: skip
    written: set[str] = set()
    for name, tensor in sorted(step.output_map.items()):
        if name not in outputs:
            raise _step_error(
                config, index,
                f"ensemble tensor {tensor} is mapped from non-existing output {name} in model "
                f"{step.model_name}", f'output_map["{name}"]',
            )  # fmt: skip
        if tensor in written:
            raise _step_error(
                config, index,
                f"multiple outputs in model {step.model_name} are mapped to the same ensemble "
                f"tensor {tensor}", f'output_map["{name}"]',
            )  # fmt: skip
        written.add(tensor)


@dataclass(frozen=True)
class _Use:
    """What one model says about an ensemble tensor."""

    model: str
    data_type: int
    dims: tuple[int, ...]
    batching: bool

    @property
    def datatype(self) -> str:
        name = datatype_name(self.data_type)
        return "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"

    @property
    def full_dims(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.batching else self.dims

    def agrees_with(self, other: _Use) -> bool:
        if fits(self.full_dims, other.full_dims):
            return True
        # One batches and the other does not: the batch dimension is added or taken away.
        return self.batching != other.batching and fits(self.dims, other.dims)


def _check_consistency(config: ModelConfig, members: Sequence[ModelConfig]) -> None:
    """Every model that touches an ensemble tensor must mean the same datatype and shape."""
    uses: dict[str, _Use] = {}
    batching = config.max_batch_size > 0
    own_entries: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    for own in own_entries:
        uses[own.name] = _Use(config.name, own.data_type, tuple(own.dims), batching)
    for index, (step, member) in enumerate(
        zip(config.ensemble_scheduling.step, members, strict=True)
    ):
        mapped: list[tuple[str, ModelInput | ModelOutput]] = [
            *((step.input_map[i.name], i) for i in member.input if i.name in step.input_map),
            *((step.output_map[o.name], o) for o in member.output if o.name in step.output_map),
        ]
        for tensor, entry in mapped:
            use = _Use(
                step.model_name, entry.data_type, tuple(entry.dims), member.max_batch_size > 0
            )
            _check_use(config, index, tensor, uses.setdefault(tensor, use), use)


def _check_use(config: ModelConfig, index: int, tensor: str, known: _Use, use: _Use) -> None:
    if known.data_type != use.data_type:
        raise _step_error(
            config, index,
            f"ensemble tensor {tensor}: inconsistent data type: {known.datatype} is inferred "
            f"from model {known.model} while {use.datatype} is inferred from model {use.model}",
        )  # fmt: skip
    if not known.agrees_with(use):
        raise _step_error(
            config, index,
            f"ensemble tensor {tensor}: inconsistent shape: {_text(known.full_dims)} is inferred "
            f"from model {known.model} while {_text(use.full_dims)} is inferred from model "
            f"{use.model}",
        )  # fmt: skip


def _step_error(config: ModelConfig, index: int, text: str, entry: str = "") -> InvalidConfigError:
    """An error in one step; `entry` is one of its maps with a key."""
    step = f"ensemble_scheduling.step[{index}]"
    field = f"{step}.{entry}" if entry else step
    return InvalidConfigError(f"in ensemble {config.name}, {text} (step {index})", field)


def _text(dims: Sequence[int]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"
