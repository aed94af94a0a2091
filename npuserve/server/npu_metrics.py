"""Gauges of the NPU cards for /metrics: refreshed in the background, read without waiting.

npu-smi takes from a tenth of a second to several, so a thread runs it every few seconds and a
scrape shows the last answer. Names are those of Triton's GPU gauges, so that dashboards work,
with a twin of its own name for each.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from prometheus_client import Metric

from npuserve.server.devices import VISIBLE_DEVICES, visible_positions

logger = logging.getLogger(__name__)

_TIMEOUT_S = 20.0
_MIB = 1 << 20


@dataclass(frozen=True)
class CardMetrics:
    """The state of one chip. None: the card does not tell.

    Attributes:
        index: position in npu-smi's list.
        uuid: stable name of the chip, from its place on the bus.
        utilization: 0 … 1.
        temperature: degrees Celsius.
    """

    index: int
    uuid: str
    name: str
    healthy: bool
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature: float | None = None


_PAIR_OR_WORD = re.compile(r"(\d+)\s*/\s*(\d+)|(\S+)", re.ASCII)
_PAIR = re.compile(r"(\d+)/(\d+)", re.ASCII)


def parse_npu_smi(table: str) -> list[CardMetrics]:
    """The chips in the table of `npu-smi info`, two rows each.

    Product lines differ in their columns (with or without HBM, with a physical id, power on the
    first die only), so values are found by the words of the header.
    """
    upper: list[str] = []  # header words of the first row's last cell
    lower: list[str] = []
    cards: list[CardMetrics] = []
    first: list[str] | None = None
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|") or len(cells) < 3:
            continue
        if "Process id" in line:
            break
        if cells[0].startswith("NPU") and "Health" in cells[1]:
            upper = cells[2].split()
        elif cells[0].startswith("Chip"):
            lower = cells[2].split()
        elif first is None:
            first = cells
        else:
            card = _card(len(cards), first, cells, upper, lower)
            if any(card.uuid == other.uuid for other in cards):
                # Chips of one card may share its place on the bus.
                card = replace(card, uuid=f"{card.uuid}-{cells[0].split()[0]}")
            cards.append(card)
            first = None
    return cards


def _card(
    index: int, first: list[str], second: list[str], upper: list[str], lower: list[str]
) -> CardMetrics:
    npu, _, name = first[0].partition(" ")
    bus = second[1]
    values = _values(upper, first[2]) | _values(lower, second[2])
    used, total = _memory(values)
    aicore = _number(values.get("AICore(%)"))
    return CardMetrics(
        index=index,
        uuid=f"NPU-{bus if ':' in bus else npu}",
        name=name.strip(),
        healthy=first[1] == "OK",
        utilization=None if aicore is None else aicore / 100,
        memory_used_bytes=used,
        memory_total_bytes=total,
        power_watts=_number(values.get("Power(W)")),
        temperature=_number(values.get("Temp(C)")),
    )


def _values(header: Sequence[str], cell: str) -> dict[str, str]:
    """Values of a cell by the header's words; a value is `used / total` or one word."""
    found = [
        f"{match[1]}/{match[2]}" if match[1] else match[3] for match in _PAIR_OR_WORD.finditer(cell)
    ]
    return dict(zip(header, found, strict=False))


def _memory(values: dict[str, str]) -> tuple[int | None, int | None]:
    """(used, total) bytes: HBM where there is any, else DDR. npu-smi's MB are MiB."""
    for column in ("HBM-Usage(MB)", "Memory-Usage(MB)"):
        pair = _PAIR.fullmatch(values.get(column, ""))
        if pair is not None and int(pair[2]) > 0:
            return int(pair[1]) * _MIB, int(pair[2]) * _MIB
    return None, None


def _number(text: str | None) -> float | None:
    """None for absent values, which read `-` or `NA`."""
    try:
        return float(text or "")
    except ValueError:
        return None


def run_npu_smi() -> list[CardMetrics]:
    """Ask npu-smi; may take seconds.

    Raises:
        OSError, subprocess.SubprocessError: it is not there, does not answer or names no card.
    """
    # subprocess starts programs by vfork, which is safe while the cards copy; a plain fork of a
    # process that uses the Ascend runtime is not.
    # Read as bytes: see machine.py.
    result = subprocess.run(
        ["npu-smi", "info"], capture_output=True, timeout=_TIMEOUT_S, check=False
    )
    cards = parse_npu_smi(result.stdout.decode("utf-8", "replace"))
    if not cards:  # its exit status says nothing of it
        said = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
        raise OSError(f"npu-smi names no card: {said[:200]}")
    return cards


class NpuMetrics:
    """Keeps the last state of the cards that `ASCEND_RT_VISIBLE_DEVICES` leaves to this process.

    Args:
        interval_s: between two readings.
        read: where states come from; may block.
        on_names: called in the thread that reads when the names of the cards have become known.
    """

    def __init__(
        self,
        interval_s: float = 2.0,
        read: Callable[[], list[CardMetrics]] = run_npu_smi,
        on_names: Callable[[], None] = lambda: None,
    ) -> None:
        self._interval_s = interval_s
        self._read = read
        self._on_names = on_names
        self._cards: list[CardMetrics] = []
        self._names: list[str] = []  # kept while npu-smi does not answer
        self._has_read = threading.Event()
        self._energy_joules: dict[str, float] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to refresh; does nothing on a machine without npu-smi."""
        if self._thread is None and (self._read is not run_npu_smi or shutil.which("npu-smi")):
            self._thread = threading.Thread(target=self._run, name="npu-metrics", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop refreshing. Does not wait for a reading that is under way."""
        self._stopping.set()

    def name_of(self, card: int) -> str:
        """The uuid of a card that this process sees, "" if it is not known. May block.

        Waits for the first reading; without `start` there is none.
        """
        if self._thread is not None:
            self._has_read.wait(_TIMEOUT_S)
        return self.known_name(card)

    def known_name(self, card: int) -> str:
        """The same as far as it is known now. Never blocks."""
        names = self._names
        return names[card] if card < len(names) else ""

    def refresh(self, elapsed_s: float = 0.0) -> None:
        """Read once; `elapsed_s` since the reading before, for the energy."""
        cards = self._read()
        positions = visible_positions(len(cards), os.environ.get(VISIBLE_DEVICES))
        self._cards = [cards[position] for position in positions]
        names = [card.uuid for card in self._cards]
        if names and names != self._names:
            self._names = names
            self._on_names()
        for card in self._cards:
            joules = self._energy_joules.get(card.uuid, 0.0)
            self._energy_joules[card.uuid] = joules + (card.power_watts or 0.0) * elapsed_s

    def _run(self) -> None:
        former = time.monotonic()
        reported = False
        while not self._stopping.is_set():
            now = time.monotonic()
            try:
                self.refresh(now - former)
                reported = False
            except Exception as error:  # of the program; or its table is like no other
                self._cards = []
                if not reported:
                    logger.warning("npu-smi does not answer, NPU metrics are off: %r", error)
                reported = True
            finally:
                self._has_read.set()
            former = now
            self._stopping.wait(self._interval_s)

    def collect(self) -> Iterator[Metric]:
        """The metric families; none without cards."""
        cards = self._cards
        if not cards:
            return
        for suffix, help_text, value in _GAUGES:
            values = [(card, value(card)) for card in cards]
            known = [(card, number) for card, number in values if number is not None]
            yield _family(f"nv_gpu_{suffix}", f"GPU {help_text}", "gauge", "gpu_uuid", known)
            yield _family(f"nv_npu_{suffix}", f"NPU {help_text}", "gauge", "npu_uuid", known)
        for suffix, help_text, value in _NPU_GAUGES:
            values = [(card, value(card)) for card in cards]
            known = [(card, number) for card, number in values if number is not None]
            yield _family(f"nv_npu_{suffix}", f"NPU {help_text}", "gauge", "npu_uuid", known)
        energy = [(card, self._energy_joules.get(card.uuid, 0.0)) for card in cards]
        help_text = "energy consumption in joules since the server started"
        yield _family("nv_energy_consumption", f"GPU {help_text}", "counter", "gpu_uuid", energy)


_Value = Callable[[CardMetrics], float | None]

_GAUGES: tuple[tuple[str, str, _Value], ...] = (
    ("utilization", "utilization rate [0.0 - 1.0)", lambda card: card.utilization),
    ("memory_total_bytes", "total memory, in bytes", lambda card: card.memory_total_bytes),
    ("memory_used_bytes", "used memory, in bytes", lambda card: card.memory_used_bytes),
    ("power_usage", "power usage in watts", lambda card: card.power_watts),
)
_NPU_GAUGES: tuple[tuple[str, str, _Value], ...] = (
    ("temperature_celsius", "temperature in degrees Celsius", lambda card: card.temperature),
    ("healthy", "health, 1 for OK", lambda card: float(card.healthy)),
)


def _family(
    name: str, help_text: str, kind: str, label: str, values: Sequence[tuple[CardMetrics, float]]
) -> Metric:
    metric = Metric(name, help_text, kind)
    for card, value in values:
        metric.add_sample(name, {label: card.uuid}, value)
    return metric
