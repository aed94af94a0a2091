"""What the simulated machine is like, and how worker processes learn of it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

VARIABLE = "NPUSERVE_SIMULATOR"


@dataclass(frozen=True)
class SimulatorOptions:
    """The simulated machine.

    Attributes:
        cards: number of cards.
        soc_name: chip, as `acl.get_soc_name` says it; 310P parts have no HBM.
        memory_bytes: device memory of a card.
        time: "real" waits for modelled durations; "modelled" only counts them: the clock of a
            thread advances by the CPU time it spends outside the simulator and by what it waits
            for, so results do not depend on how busy the machine is.
        device_ms: time of one execution, unless the model file says another one.
        op_us: time of one single operator.
        pcie_gb_s: copy speed of one direction, 10^9 bytes a second.
        copy_us: fixed time of a copy.
        faults: see `faults.parse`.
        state_dir: where processes share what npu-smi shows; "" for nowhere.
        report_dir: where a process writes what it leaked, at exit; "" prints only.
        trace_file: where a process writes its trace at exit ("{pid}" is replaced); "" for none.
    """

    cards: int = 1
    soc_name: str = "Ascend910B3"
    memory_bytes: int = 64 << 30
    time: str = "real"
    device_ms: float = 1.0
    op_us: float = 20.0
    pcie_gb_s: float = 12.0
    copy_us: float = 10.0
    faults: str = ""
    state_dir: str = ""
    report_dir: str = ""
    trace_file: str = ""

    def to_environment(self) -> str:
        """Value of the environment variable for child processes."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> SimulatorOptions:
        """As set by `install` in this process or in a parent."""
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))

    @property
    def has_hbm(self) -> bool:
        """Whether device memory is HBM."""
        return "310" not in self.soc_name

    @property
    def visible_cards(self) -> list[int]:
        """Physical cards that the runtime shows, in order of their logical ids.

        Source: `ASCEND_RT_VISIBLE_DEVICES`; parsing stops at the first bad entry, and ids must
        ascend.
        """
        text = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        if text is None:
            return list(range(self.cards))
        visible: list[int] = []
        for entry in text.split(","):
            if not entry.isdigit() or int(entry) >= self.cards:
                break
            if visible and int(entry) <= visible[-1]:
                break
            visible.append(int(entry))
        return visible
