"""instance_group configuration → where each instance runs. Pure.

"GPU" is Triton's word and stays on the wire; on a machine with NPUs a KIND_GPU instance runs on an
NPU card, and `gpus` are card numbers.

Source: Triton core src/model_config_utils.cc, SetDefaultInstanceCount, NormalizeInstanceGroup,
ValidateInstanceGroup.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from npuserve._proto.model_config_pb2 import ModelInstanceGroup
from npuserve.backends.base import Placement
from npuserve.errors import InvalidConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npuserve.model_config import ModelConfig

logger = logging.getLogger(__name__)

_KIND_TEXT = {
    ModelInstanceGroup.KIND_GPU: "GPU",
    ModelInstanceGroup.KIND_CPU: "CPU",
    ModelInstanceGroup.KIND_MODEL: "MODEL",
}
# Backends of which two CPU instances serve better than one.
_TWO_ON_CPU = frozenset({"onnxruntime", "tensorflow"})


def fill_instance_groups(config: ModelConfig, cards: Sequence[int]) -> None:
    """Complete `config.instance_group` in place, as `GET …/config` shows it, and check it.

    Args:
        config: of a model that is no ensemble.
        cards: numbers of the usable NPU cards.

    Raises:
        InvalidConfigError: a group that cannot be placed on this machine.
    """
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        if not group.name:
            group.name = f"{config.name}_{index}"
        if group.kind == ModelInstanceGroup.KIND_AUTO:
            on_cards = bool(cards) and all(card in cards for card in group.gpus)
            group.kind = ModelInstanceGroup.KIND_GPU if on_cards else ModelInstanceGroup.KIND_CPU
        if group.kind == ModelInstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(cards)
        if group.count < 1:
            on_cpu = group.kind == ModelInstanceGroup.KIND_CPU
            group.count = 2 if on_cpu and config.backend in _TWO_ON_CPU else 1
        _check(config, index, cards)


def placements(config: ModelConfig) -> list[Placement]:
    """One placement per instance of a completed configuration.

    The instances of a group are numbered card by card in turn, so that taking free instances in
    order puts the first batches on different cards.
    """
    return [
        Placement(
            name=f"{group.name}_{number}",
            kind=_KIND_TEXT[group.kind],
            device_id=device_id,
            group=group_index,
            index=index,
            host_policy=group.host_policy or _default_host_policy(group, device_id),
            profile=tuple(group.profile),
            passive=group.passive,
            rate_limiter=group.rate_limiter if group.HasField("rate_limiter") else None,
        )
        for index, (group_index, group, number, device_id) in enumerate(_instances(config))
    ]


def _instances(config: ModelConfig) -> Iterator[tuple[int, Any, int, int]]:
    """(group index, group, number in the group, card) of every instance."""
    for group_index, group in enumerate(config.instance_group):
        on_cards = group.kind == ModelInstanceGroup.KIND_GPU
        devices = list(group.gpus) if on_cards else [0]
        for number in range(group.count * len(devices)):
            yield group_index, group, number, devices[number % len(devices)]


def _default_host_policy(group: Any, device_id: int) -> str:
    if group.kind == ModelInstanceGroup.KIND_GPU:
        return f"gpu_{device_id}"
    return "cpu" if group.kind == ModelInstanceGroup.KIND_CPU else "model"


def _check(config: ModelConfig, index: int, cards: Sequence[int]) -> None:
    group, field = config.instance_group[index], f"instance_group[{index}]"
    where = f"instance group {group.name} of model {config.name}"
    if group.kind == ModelInstanceGroup.KIND_GPU:
        if not cards:
            text = (
                f"{where} has kind KIND_GPU but no GPUs are available: this machine shows no NPU "
                "card; KIND_AUTO takes the CPU then, and --npu-simulator=1 makes one to try"
            )
            raise InvalidConfigError(text, f"{field}.kind")
        for card in group.gpus:
            if card not in cards:
                known = ", ".join(str(number) for number in cards)
                raise InvalidConfigError(
                    f"{where} specifies invalid or unsupported gpu id {card}. "
                    f"NPU cards that can be used are: {known}",
                    f"{field}.gpus",
                )
    elif group.gpus:
        kind = _KIND_TEXT[group.kind]
        text = f"{where} has kind KIND_{kind} but specifies one or more GPUs"
        raise InvalidConfigError(text, f"{field}.gpus")
    if group.profile:
        raise InvalidConfigError(
            f"{where} and platform {config.platform}specifies profile field which is only "
            "supported for TensorRT models",
            f"{field}.profile",
        )
    if group.secondary_devices:
        logger.warning("%s: secondary_devices are ignored, there is no such hardware here", where)
