"""What processes tell the simulated npu-smi: memory in use and time computed, per card."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

_CARD = struct.Struct("<QQ")  # used bytes, busy ns


class SharedState:
    """This process's part: a small mapped file named after the process id.

    Args:
        directory: "" to tell nobody.
    """

    def __init__(self, directory: str, cards: int) -> None:
        self._map: mmap.mmap | None = None
        self._path = Path(directory, f"{os.getpid()}.state") if directory else None
        if self._path is not None and cards:
            self._path.write_bytes(bytes(_CARD.size * cards))
            with self._path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _CARD.size * cards)

    def publish(self, card: int, used_bytes: int, busy_ns: int) -> None:
        """Tell the present numbers of one card (by logical id)."""
        if self._map is not None:
            _CARD.pack_into(self._map, card * _CARD.size, used_bytes, busy_ns)

    def close(self) -> None:
        """Take the numbers back."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def read(directory: str, cards: int) -> list[tuple[int, int]]:
    """(used bytes, busy ns) of each card, summed over the living processes."""
    totals = [[0, 0] for _ in range(cards)]
    for path in Path(directory).glob("*.state") if directory else ():
        if not Path(f"/proc/{path.stem}").exists():
            continue
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # the process ended just now
            continue
        for card in range(min(cards, len(data) // _CARD.size)):
            used, busy = _CARD.unpack_from(data, card * _CARD.size)
            totals[card][0] += used
            totals[card][1] += busy
    return [(used, busy) for used, busy in totals]
