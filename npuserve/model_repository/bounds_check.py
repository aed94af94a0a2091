"""Values that no rule of Triton's forbids and that no server can live with. Pure.

A number of slots, queues, instances or requests is made for real when the model is loaded, so a
slip of the keyboard would take all memory and hold up every other model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npuserve.model_repository.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

    from npuserve.model_config import ModelConfig

_MAX_INSTANCES = 4096
_MAX_SEQUENCES = 100_000
_MAX_WARMUP = 65_536

# A rule of their own speaks of these.
_CHECKED = frozenset({"inference.ModelInput.data_type", "inference.ModelOutput.data_type"})


def check_bounds(config: ModelConfig) -> Iterator[Problem]:
    """Numbers that are too large, and numbers that stand for no name of an enumeration."""
    # Differs from Triton: it makes what it is told to, until the memory is full.
    for field, value, most in _bounded(config):
        if value > most:
            text = f"'{field}' is {value} for {config.name}, more than {most} is not supported"
            yield Problem(field, text)
    for field, number in _unknown_names(config, ""):
        yield Problem(field, f"'{field}' has the unknown value {number} for {config.name}")


def _bounded(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """(field, its value, the most it may be)."""
    for index, group in enumerate(config.instance_group):
        yield f"instance_group[{index}].count", group.count, _MAX_INSTANCES
    if config.HasField("sequence_batching"):
        most = config.sequence_batching.oldest.max_candidate_sequences
        yield "sequence_batching.oldest.max_candidate_sequences", most, _MAX_SEQUENCES
        yield "max_batch_size", config.max_batch_size, _MAX_SEQUENCES  # one slot each
    for index, sample in enumerate(config.model_warmup):
        yield f"model_warmup[{index}].batch_size", sample.batch_size, _MAX_WARMUP
        yield f"model_warmup[{index}].count", sample.count, _MAX_WARMUP


def _unknown_names(message: Message, prefix: str) -> Iterator[tuple[str, int]]:
    """(field, number) of enumerations; protobuf keeps any number."""
    for field, value in message.ListFields():
        for suffix, item in _items(field, value):
            path = f"{prefix}{field.name}{suffix}"
            if field.message_type:
                yield from _unknown_names(item, f"{path}.")
            elif (
                field.enum_type
                and item not in field.enum_type.values_by_number
                and field.full_name not in _CHECKED
            ):
                yield path, item


def _items(field: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """The values of a field, each with its index; of a map, its messages."""
    if field.message_type and field.message_type.GetOptions().map_entry:
        if field.message_type.fields_by_name["value"].message_type:
            yield from (("", value[key]) for key in value)
    elif field.is_repeated:
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    else:
        yield "", value
