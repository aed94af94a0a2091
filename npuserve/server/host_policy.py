"""`--host-policy`: on which processor cores the instances of a policy run.

An instance group names its policy, or has the one of its device (`gpu_<id>`, `cpu`, `model`).
Source: Triton core src/numa_utils.cc. Memory follows the cores: pages are taken from the node
whose core touches them first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from npuserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SETTINGS = ("cpu-cores", "numa-node")
_NODES = Path("/sys/devices/system/node")


def policy_cores(name: str, settings: Mapping[str, str], nodes: Path = _NODES) -> frozenset[int]:
    """Cores of a policy; empty for one without settings, which may use all.

    Args:
        name: of the policy, for errors.
        settings: `cpu-cores` (`0-3,8`) wins over `numa-node` (a number).
        nodes: where the kernel lists the cores of each NUMA node.

    Raises:
        InvalidArgumentError: an unknown setting, or cores this process may not use.
    """
    for setting in settings:
        if setting not in _SETTINGS:
            raise InvalidArgumentError(
                f"unknown setting '{setting}' of host policy '{name}'; there are "
                f"{' and '.join(_SETTINGS)}"
            )
    if "cpu-cores" in settings:
        cores = _parse_cores(name, settings["cpu-cores"])
    elif "numa-node" in settings:
        cores = _node_cores(name, settings["numa-node"], nodes)
    else:
        return frozenset()
    missing = cores - os.sched_getaffinity(0)
    if missing:
        raise InvalidArgumentError(
            f"host policy '{name}' names cores that this process may not use: "
            f"{', '.join(map(str, sorted(missing)))}"
        )
    return cores


def _node_cores(name: str, node: str, nodes: Path) -> frozenset[int]:
    if not node.isdecimal():
        raise InvalidArgumentError(f"host policy '{name}': NUMA node '{node}' is no number")
    try:
        text = (nodes / f"node{node}" / "cpulist").read_text()
    except OSError as error:
        raise InvalidArgumentError(
            f"host policy '{name}': this machine has no NUMA node {node}"
        ) from error
    return _parse_cores(name, text.strip())


def _parse_cores(name: str, text: str) -> frozenset[int]:
    """`0-3,8` as numbers."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InvalidArgumentError(
                f"host policy '{name}': cores are written as '0-3,8', got '{text}'"
            )
        cores.update(range(int(first), int(last or first) + 1))
    if not cores:
        raise InvalidArgumentError(f"host policy '{name}': no core in '{text}'")
    return frozenset(cores)
