"""Runs a program on the simulated machine, with the stand-ins for `acl`, `atc` and `npu-smi`.

    python -m npuserve.testing.simulator [--cards=N] program.py [argument …]
    python -m npuserve.testing.simulator [--cards=N] atc|npu-smi|command [argument …]

NPUSERVE_SIMULATOR says more about the machine, see `SimulatorOptions`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from npuserve.testing.simulator import install


def main() -> int:
    """The program's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m npuserve.testing.simulator",
        description="Runs a program on a machine with simulated Ascend cards.",
    )
    parser.add_argument("--cards", type=int, default=1, help="how many there are (1)")
    parser.add_argument("program", help="a Python file, atc, npu-smi or another command")
    parser.add_argument("argument", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    install(given.cards)
    command = [given.program, *given.argument]
    if given.program.endswith(".py"):
        command.insert(0, sys.executable)
    try:
        return subprocess.call(command)
    except OSError as error:
        parser.error(f"{given.program} cannot be started: {error.strerror}")


if __name__ == "__main__":
    sys.exit(main())
