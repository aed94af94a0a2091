"""Which cards there are."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from npuserve.server import devices
from npuserve.server.devices import count_logical_ids, visible_cards, visible_positions
from npuserve.testing.simulator import simulate

MAP = """
\tNPU ID          Chip ID         Chip Logic ID   Chip Name
\t96              0               0               Ascend 310P3
\t96              1               1               Ascend 310P3
\t96              2               -               Mcu
"""


def test_controllers_are_no_cards() -> None:
    """The Mcu row has no logical id."""
    assert count_logical_ids(MAP) == 2


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend310P3"])
def test_npu_smi_is_asked(soc: str) -> None:
    """Both product lines."""
    with simulate(cards=3, soc_name=soc):
        assert visible_cards() == [0, 1, 2]


def test_visible_devices_are_renumbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three cards are 0 and 1."""
    with simulate(cards=3):
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,2")
        assert visible_cards() == [0, 1]


@pytest.mark.parametrize(
    ("visible", "positions"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        ("0,2", [0, 2]),
        ("2,1", [2]),
        ("0,9,1", [0]),
        ("²", []),
        ("", []),
    ],
)
def test_what_the_variable_leaves(
    visible: str | None, positions: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Parsing stops at the first bad entry, and says so."""
    caplog.set_level(logging.WARNING)
    visible_positions.cache_clear()
    assert list(visible_positions(3, visible)) == positions
    if visible in ("2,1", "0,9,1"):
        assert "ASCEND_RT_VISIBLE_DEVICES" in caplog.text


def test_no_cards_without_npu_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An ordinary machine."""
    monkeypatch.setenv("PATH", str(tmp_path))
    devices.forget()
    try:
        assert visible_cards() == []
    finally:
        devices.forget()


def test_a_broken_npu_smi_is_no_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container without the driver's mounts: the text is in the log."""
    program = tmp_path / "npu-smi"
    text = b"dcmi module initialize failed: \\261\\273"  # in the encoding of the operator
    program.write_bytes(b"#!/bin/sh\nprintf '" + text + b"'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    devices.forget()
    try:
        assert visible_cards() == []
        assert "dcmi module initialize failed" in caplog.text
    finally:
        devices.forget()
