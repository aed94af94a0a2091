"""Rules of the schedulers: dynamic batching and sequence batching. Pure.

Source: Triton core src/model_config_utils.cc (ValidateBatchingConfig and
ValidateSequenceBatchingConfig).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from npuserve._proto import model_config_pb2 as pb
from npuserve.model_config import enum_name
from npuserve.model_repository.problems import Problem, under

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npuserve.model_config import ModelConfig

_Control = pb.ModelSequenceBatching.Control

_PAIRS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_ANY_PAIR = "'int32_false_true', 'fp32_false_true' and 'bool_false_true'"
_EITHER_PAIR = "'int32_false_true', 'fp32_false_true' or 'bool_false_true'"

_CORRELATION_ID_TYPES = frozenset(
    {pb.TYPE_UINT64, pb.TYPE_INT64, pb.TYPE_UINT32, pb.TYPE_INT32, pb.TYPE_STRING}
)


def check_scheduling(config: ModelConfig, completed: bool) -> Iterator[Problem]:
    """Problems of whichever batcher the configuration chooses.

    Args:
        config: with defaults filled in.
        completed: max_batch_size is final; 0 may still become something else otherwise.
    """
    if config.HasField("dynamic_batching"):
        yield from _check_dynamic(config)
    if config.HasField("sequence_batching"):
        yield from _check_sequence(config)
    if config.max_batch_size > 0 or completed:
        yield from _check_preferred_sizes(config)


def _check_preferred_sizes(config: ModelConfig) -> Iterator[Problem]:
    oldest = config.sequence_batching.oldest
    for block, sizes, what in (
        (
            "dynamic_batching",
            config.dynamic_batching.preferred_batch_size,
            "dynamic batching preferred size",
        ),
        (
            "sequence_batching.oldest",
            oldest.preferred_batch_size,
            "sequence batching preferred batch size",
        ),
    ):
        field = f"{block}.preferred_batch_size"
        if any(size <= 0 for size in sizes):
            yield Problem(field, f"{what} must be positive for {config.name}")
        if any(size > config.max_batch_size for size in sizes):
            yield Problem(field, f"{what} must be <= max batch size for {config.name}")


def _check_dynamic(config: ModelConfig) -> Iterator[Problem]:
    batching = config.dynamic_batching
    if batching.priority_levels:
        yield from _check_priorities(config)
    if batching.preserve_ordering:
        yield from _check_ordering(config)


def _check_priorities(config: ModelConfig) -> Iterator[Problem]:
    batching = config.dynamic_batching
    levels = batching.priority_levels
    if not 1 <= batching.default_priority_level <= levels:
        yield Problem(
            "dynamic_batching.default_priority_level",
            f"default priority level must be in range [1, {levels}] for {config.name}",
        )
    if any(not 1 <= level <= levels for level in batching.priority_queue_policy):
        yield Problem(
            "dynamic_batching.priority_queue_policy",
            f"priority queue policy must have priority level in range [1, {levels}] for "
            f"{config.name}",
        )


def _check_ordering(config: ModelConfig) -> Iterator[Problem]:
    batching = config.dynamic_batching
    if batching.priority_levels > 1:
        yield Problem(
            "dynamic_batching.priority_levels",
            "Only one priority level is allowed when 'preserve_ordering' is true for "
            f"{config.name}",
        )
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(
        policy.timeout_action == pb.ModelQueuePolicy.DELAY and policy.default_timeout_microseconds
        for policy in policies
    ):
        yield Problem(
            "dynamic_batching.default_queue_policy.timeout_action",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true "
            f"for {config.name}",
        )


def _check_sequence(config: ModelConfig) -> Iterator[Problem]:
    batching = config.sequence_batching
    if not 0 <= batching.direct.minimum_slot_utilization <= 1:
        yield Problem(
            "sequence_batching.direct.minimum_slot_utilization",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for "
            f"{config.name}",
        )
    yield from _check_control_tensors(config)


def _check_control_tensors(config: ModelConfig) -> Iterator[Problem]:
    kinds: Counter[str] = Counter()
    names: set[str] = set()
    for index, tensor in enumerate(config.sequence_batching.control_input):
        field = f"sequence_batching.control_input[{index}]"
        if not tensor.name:
            text = f"sequence batching control tensor must have a name for {config.name}"
            yield Problem(field, text)
        if tensor.name in names:
            yield Problem(
                field,
                f"sequence batching control tensor '{tensor.name}' is specified for multiple "
                f"control kinds for {config.name}",
            )
        names.add(tensor.name)
        for number, control in enumerate(tensor.control):
            kind = enum_name(control, "kind")
            if kinds[kind] == 1:
                text = f"sequence batching specifies multiple {kind} tensors for {config.name}"
                yield Problem(f"{field}.control[{number}]", text)
            kinds[kind] += 1
            yield from under(f"{field}.control[{number}]", _check_control(config, control))


def _check_control(config: ModelConfig, control: _Control) -> Iterator[str]:
    kind = enum_name(control, "kind")
    suffix = f" for {kind} for {config.name}"
    pairs = [pair for pair in _PAIRS if getattr(control, pair)]
    if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
        if pairs:
            yield f"sequence batching must not specify either {_EITHER_PAIR}{suffix}"
        if control.data_type not in _CORRELATION_ID_TYPES:
            yield (
                f"unexpected data type for control {kind} for {config.name}. Allowed data types "
                "are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
        return
    if not pairs:
        yield f"sequence batching must specify either {_EITHER_PAIR}{suffix}"
    if len(pairs) > 1:
        yield f"sequence batching specifies more than one from {_ANY_PAIR}{suffix}"
    for pair in pairs:
        if len(getattr(control, pair)) != 2:
            yield f"sequence batching control '{pair}' must have exactly 2 entries{suffix}"
