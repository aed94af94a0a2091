"""Which NPU cards this process may use.

Ids are logical, as `acl` counts them: 0 … n-1 over the cards that `ASCEND_RT_VISIBLE_DEVICES`
leaves. Nothing here initialises the runtime: on a machine without cards the answer costs two
look-ups, on others one run of npu-smi.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"

_NPU_SMI_TIMEOUT_S = 30
_DEVICE_NODE = re.compile(r"davinci(\d+)$")


def visible_cards() -> list[int]:
    """Logical ids of the usable cards, [] on a machine without NPUs. Cheap after the first call.

    May run a program the first time: not to be called on the event loop then.
    """
    return list(range(len(visible_positions(_card_count(), os.environ.get(VISIBLE_DEVICES)))))


@lru_cache(maxsize=8)  # also, so that a bad value is said once
def visible_positions(count: int, visible: str | None) -> tuple[int, ...]:
    """Positions (without a filter) of the cards the runtime shows.

    Args:
        count: cards there are.
        visible: value of `ASCEND_RT_VISIBLE_DEVICES`, such as "1,3"; None when not set.

    Source: CANN, environment variables: entries ascend, and what follows the first bad one is
    not read.
    """
    if visible is None:
        return tuple(range(count))
    positions: list[int] = []
    for entry in visible.split(","):
        if not entry.isdecimal() or int(entry) >= count:
            logger.warning(
                "%s=%s: '%s' is no card (there are %d); it and what follows is not used",
                VISIBLE_DEVICES, visible, entry, count,
            )  # fmt: skip
            break
        if positions and int(entry) <= positions[-1]:
            logger.warning("%s=%s: cards must ascend", VISIBLE_DEVICES, visible)
            break
        positions.append(int(entry))
    return tuple(positions)


def forget() -> None:
    """Look again at the next call; for tests that change the machine."""
    _card_count.cache_clear()


@lru_cache(maxsize=1)
def _card_count() -> int:
    program = shutil.which("npu-smi")
    if program is not None:
        count = _count_by_npu_smi(program)
        if count is not None:
            return count
    nodes = Path("/dev").glob("davinci*")
    return sum(bool(_DEVICE_NODE.match(node.name)) for node in nodes)


def _count_by_npu_smi(program: str) -> int | None:
    """Number of chips with a logical id; None when the program does not tell."""
    try:
        result = subprocess.run(
            [program, "info", "-m"], capture_output=True, text=True, errors="replace",
            timeout=_NPU_SMI_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("npu-smi does not answer: %s", error)
        return None
    count = count_logical_ids(result.stdout)
    if count == 0:
        logger.warning("npu-smi names no card: %s", (result.stdout + result.stderr).strip()[:200])
        return None
    return count


def count_logical_ids(table: str) -> int:
    """Chips in the table of `npu-smi info -m`; controllers (`Mcu`) have no logical id.

    The columns are NPU ID, Chip ID, Chip Logic ID and Chip Name.
    """
    rows = (line.split() for line in table.splitlines())
    return sum(len(row) >= 4 and all(cell.isdigit() for cell in row[:3]) for row in rows)
