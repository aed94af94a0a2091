"""Stand-in for `npu-smi`: `info`, `info -m`, `info -l`.

Two layouts, as on the products: 910B (HBM column, power) and 310P (several chips of one card, no
HBM column, power NA). Memory and utilisation are those of the simulator's processes.
"""

from __future__ import annotations

import sys
import time

from npuserve.testing.simulator.options import SimulatorOptions
from npuserve.testing.simulator.telemetry import read

_SAMPLE_S = 0.05
_MIB = 1 << 20
_310P_CARD = 96  # both chips of a card share its id


def _sample(options: SimulatorOptions) -> list[tuple[int, int]]:
    """(MiB in use, percent busy) of each card."""
    first = read(options.state_dir, options.cards)
    started = time.monotonic()
    time.sleep(_SAMPLE_S)
    second = read(options.state_dir, options.cards)
    elapsed_ns = (time.monotonic() - started) * 1e9
    return [
        (used // _MIB, min(100, max(0, round(100 * (busy - before) / elapsed_ns))))
        for (_, before), (used, busy) in zip(first, second, strict=True)
    ]


def _row(*cells: tuple[str, int]) -> str:
    return "| " + "| ".join(text.ljust(width) for text, width in cells) + "|"


def info_910b(options: SimulatorOptions) -> list[str]:
    """The table of a machine with HBM cards."""
    name = options.soc_name.removeprefix("Ascend")
    total = options.memory_bytes // _MIB
    line = "+" + "=" * 27 + "+" + "=" * 15 + "+" + "=" * 52 + "+"
    lines = [
        "+" + "-" * 96 + "+",
        "| npu-smi 25.2.0                   Version: 25.2.0" + " " * 47 + "|",
        line.replace("=", "-"),
        _row(("NPU   Name", 26), ("Health", 14),
             ("Power(W)    Temp(C)           Hugepages-Usage(page)", 51)),
        _row(("Chip", 26), ("Bus-Id", 14),
             ("AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)", 51)),
        line,
    ]  # fmt: skip
    for card, (used, busy) in enumerate(_sample(options)):
        lines += [
            _row((f"{card}     {name}", 26), ("OK", 14),
                 (f"{90 + card}.5        {40 + card}                0    / 0", 51)),
            _row(("0", 26), (f"0000:C{card:X}:00.0", 14),
                 (f"{busy:<12}0    / 0          {used}/ {total}", 51)),
            line,
        ]  # fmt: skip
    return lines


def info_310p(options: SimulatorOptions) -> list[str]:
    """The table of a machine with 310P chips."""
    name = options.soc_name.removeprefix("Ascend")
    total = options.memory_bytes // _MIB
    line = "+" + "=" * 31 + "+" + "=" * 17 + "+" + "=" * 54 + "+"
    lines = [
        "+" + "-" * 104 + "+",
        "| npu-smi 25.0.rc1                                 Version: 25.0.rc1" + " " * 37 + "|",
        line.replace("=", "-"),
        _row(("NPU     Name", 30), ("Health", 16),
             ("Power(W)     Temp(C)           Hugepages-Usage(page)", 53)),
        _row(("Chip    Device", 30), ("Bus-Id", 16),
             ("AICore(%)    Memory-Usage(MB)", 53)),
        line,
    ]  # fmt: skip
    for chip, (used, busy) in enumerate(_sample(options)):
        card = _310P_CARD + chip // 2
        lines += [
            _row((f"{card}      {name}", 30), ("OK", 16),
                 (f"NA           {50 + chip}                14    / 14", 53)),
            _row((f"{chip % 2}       {chip}", 30), (f"0000:0{3 + chip // 2}:00.0", 16),
                 (f"{busy:<13}{used} / {total}", 53)),
            line,
        ]  # fmt: skip
    return lines


def info_map(options: SimulatorOptions) -> list[str]:
    """`info -m`: logical ids."""
    name = options.soc_name.replace("Ascend", "Ascend ")
    lines = ["\tNPU ID                         Chip ID                        Chip Logic ID"
             "                  Chip Name"]  # fmt: skip
    for card in range(options.cards):
        npu, chip = (card, 0) if options.has_hbm else (_310P_CARD + card // 2, card % 2)
        lines.append(f"\t{npu:<31}{chip:<31}{card:<31}{name}")
        if options.has_hbm or chip == 1 or card == options.cards - 1:
            lines.append(f"\t{npu:<31}{chip + 1:<31}{'-':<31}Mcu")
    return lines


def info_list(options: SimulatorOptions) -> list[str]:
    """`info -l`: cards."""
    lines = [f"\tTotal Count                    : {options.cards}"]
    for card in range(options.cards):
        lines += ["", f"\tNPU ID                         : {card}",
                  "\tChip Count                     : 1"]  # fmt: skip
    return lines


def main() -> None:
    """The command."""
    options = SimulatorOptions.from_environment()
    arguments = sys.argv[1:]
    if arguments == ["info"]:
        lines = info_910b(options) if options.has_hbm else info_310p(options)
    elif arguments == ["info", "-m"]:
        lines = info_map(options)
    elif arguments == ["info", "-l"]:
        lines = info_list(options)
    else:
        sys.exit(f"Error parameter of {' '.join(arguments)}")
    print("\n".join(lines))  # noqa: T201 - it is a command


if __name__ == "__main__":
    main()
