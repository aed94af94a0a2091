"""`--model-load-gpu-limit`: no model is loaded onto a card whose memory is fuller than allowed.

Source: Triton core src/model_lifecycle.cc and triton::common, where the limit is one of GPUs.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from npuserve.errors import UnavailableError
from npuserve.server.devices import VISIBLE_DEVICES, visible_positions
from npuserve.server.npu_metrics import CardMetrics, run_npu_smi

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from npuserve.backends.base import Placement


def check_load_limit(
    model: str,
    placements: Sequence[Placement],
    limits: Mapping[int, float],
    read: Callable[[], list[CardMetrics]] = run_npu_smi,
) -> None:
    """Refuse a load if a card it needs is too full; may run npu-smi, which takes seconds.

    Args:
        model: its name, for the error.
        placements: where its instances are to run.
        limits: fraction of the memory that may be in use, by logical card.
        read: states of the cards.

    Raises:
        UnavailableError: the limit of a card is exceeded, or its memory cannot be told.
    """
    cards = {placement.device_id for placement in placements if placement.kind == "GPU"}
    limited = sorted(cards & limits.keys())
    if not limited:
        return
    try:
        states = read()
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(
            f"can not load model '{model}': the memory of its cards cannot be told: {error}"
        ) from error
    positions = visible_positions(len(states), os.environ.get(VISIBLE_DEVICES))
    for card in limited:
        used = _used_fraction(states[positions[card]]) if card < len(positions) else None
        if used is None:
            raise UnavailableError(
                f"can not load model '{model}': the memory of card {card} cannot be told"
            )
        if used > limits[card]:
            raise UnavailableError(
                f"can not load model '{model}': memory limit set for GPU {card} has exceeded, "
                f"model loading is rejected ({used:.0%} in use, {limits[card]:.0%} allowed)."
            )


def _used_fraction(card: CardMetrics) -> float | None:
    if card.memory_used_bytes is None or not card.memory_total_bytes:
        return None
    return card.memory_used_bytes / card.memory_total_bytes
