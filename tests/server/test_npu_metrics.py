"""Gauges of the cards from npu-smi's tables."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest
from prometheus_client import Metric

from npuserve.server.npu_metrics import CardMetrics, NpuMetrics, parse_npu_smi, run_npu_smi
from npuserve.testing.simulator import simulate

DUAL_DIE = """
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 171.4       37                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 3           0    / 0          3158 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | Alarm         | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 40          0    / 0          2894/65536           |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 21817         | python                   | 18133                   |
+===========================+===============+====================================================+
"""

NO_HBM = """
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 96      310P3                 | OK              | NA           52                14    / 14            |
| 0       0                     | 0000:03:00.0    | 8            35552/ 44278                            |
+-------------------------------+-----------------+------------------------------------------------------+
| 96      310P3                 | OK              | NA           50                0     / 0             |
| 1       1                     | NA              | 0            1470 / 43757                            |
"""  # noqa: E501 - as npu-smi prints it


def test_cards_with_hbm() -> None:
    """Two dies: power of the first only, health, HBM in MiB; the process table is left alone."""
    first, second = parse_npu_smi(DUAL_DIE)
    assert first == CardMetrics(
        0, "NPU-0000:9D:00.0", "Ascend910", True, 0.03, 3158 << 20, 65536 << 20, 171.4, 37.0
    )
    assert second.power_watts is None
    assert second.healthy is False
    assert second.utilization == 0.4
    assert second.memory_used_bytes == 2894 << 20


def test_cards_without_hbm() -> None:
    """DDR counts; two chips of one card are told apart; NA is no value."""
    first, second = parse_npu_smi(NO_HBM)
    assert (first.memory_used_bytes, first.memory_total_bytes) == (35552 << 20, 44278 << 20)
    assert first.power_watts is None
    assert first.uuid == "NPU-0000:03:00.0"
    assert second.uuid == "NPU-96"


def test_an_error_text_is_no_card() -> None:
    """What npu-smi prints in a container without the driver."""
    assert parse_npu_smi("DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\ndcmi failed") == []


def families(metrics: NpuMetrics) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics.collect()}


def test_gauges_have_gpu_and_npu_names() -> None:
    """The same values under both names; a card without a value has no sample."""
    metrics = NpuMetrics(read=lambda: parse_npu_smi(DUAL_DIE))
    assert families(metrics) == {}
    metrics.refresh()
    metrics.refresh(elapsed_s=2.0)
    found = families(metrics)
    gpu = found["nv_gpu_utilization"].samples
    assert [(s.labels, s.value) for s in gpu] == [
        ({"gpu_uuid": "NPU-0000:9D:00.0"}, 0.03), ({"gpu_uuid": "NPU-0000:9F:00.0"}, 0.4)
    ]  # fmt: skip
    assert found["nv_npu_utilization"].samples[0].labels == {"npu_uuid": "NPU-0000:9D:00.0"}
    assert len(found["nv_gpu_power_usage"].samples) == 1
    assert found["nv_npu_temperature_celsius"].samples[0].value == 37.0
    assert [s.value for s in found["nv_npu_healthy"].samples] == [1.0, 0.0]
    assert found["nv_energy_consumption"].samples[0].value == pytest.approx(342.8)


def test_cards_of_other_processes_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the runtime, the gauges know the visible cards only."""
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    metrics = NpuMetrics(read=lambda: parse_npu_smi(DUAL_DIE))
    metrics.refresh()
    assert [metrics.known_name(card) for card in (0, 1)] == ["NPU-0000:9F:00.0", ""]


def test_reading_happens_in_the_background() -> None:
    """A slow npu-smi delays nobody: the last state is there at once."""
    reading, release = threading.Event(), threading.Event()

    def read() -> list[CardMetrics]:
        reading.set()
        assert release.wait(5)
        return parse_npu_smi(NO_HBM)

    metrics = NpuMetrics(interval_s=0.001, read=read)
    metrics.start()
    assert reading.wait(5)
    assert list(metrics.collect()) == []
    release.set()
    assert metrics.name_of(0) == "NPU-0000:03:00.0"
    metrics.stop()


def test_the_name_of_a_card_waits_for_the_first_reading() -> None:
    """And outlives an npu-smi that does not answer any more; other cards have none."""
    asked, silent = threading.Event(), threading.Event()
    answers = [parse_npu_smi(DUAL_DIE)]

    def read() -> list[CardMetrics]:
        if not answers:
            silent.set()
            return []
        assert asked.wait(5)
        return answers.pop()

    metrics = NpuMetrics(interval_s=0.001, read=read)
    assert metrics.name_of(1) == ""  # not started
    metrics.start()
    threading.Timer(0, asked.set).start()
    assert metrics.name_of(1) == "NPU-0000:9F:00.0"
    assert silent.wait(5)
    assert [metrics.name_of(card) for card in (0, 2)] == ["NPU-0000:9D:00.0", ""]
    metrics.stop()


@pytest.mark.parametrize("failure", [subprocess.TimeoutExpired("npu-smi", 1), IndexError("row")])
def test_a_failing_npu_smi_is_survived(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Metrics go away and come back, also after a table like no other; it is said once."""
    answers: list[Exception | list[CardMetrics]] = [failure, failure, parse_npu_smi(NO_HBM)]
    done = threading.Event()

    def read() -> list[CardMetrics]:
        if not answers:
            done.set()
            return []
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    metrics = NpuMetrics(interval_s=0.001, read=read)
    metrics.start()
    assert done.wait(5)
    metrics.stop()
    assert metrics.known_name(0) == "NPU-0000:03:00.0"
    assert len(caplog.records) == 1
    assert repr(failure) in caplog.text


def test_an_npu_smi_that_names_no_card_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it says instead reaches the log, whatever its bytes are."""
    program = tmp_path / "npu-smi"
    program.write_bytes(b"#!/bin/sh\nprintf 'dcmi module \\377 failed'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(OSError, match="names no card: dcmi module . failed"):
        run_npu_smi()


@pytest.mark.parametrize("cell", ["NA / NA", "NA/NA", "-/-", "- / 65536"])
def test_memory_that_a_card_does_not_tell_is_none(cell: str) -> None:
    """Whatever stands in its place."""
    table = DUAL_DIE.replace("2894/65536   ", cell)
    assert table != DUAL_DIE
    second = parse_npu_smi(table)[1]
    assert (second.memory_used_bytes, second.utilization) == (None, 0.4)


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend310P3"])
def test_the_simulator_prints_such_tables(soc: str) -> None:
    """Memory of this process shows; both layouts are understood."""
    with simulate(cards=2, soc_name=soc):
        acl = __import__("acl")
        acl.init()
        acl.rt.set_device(1)
        pointer, _ = acl.rt.malloc(8 << 20, 0)
        cards = run_npu_smi()
        assert [card.memory_used_bytes for card in cards] == [0, 8 << 20]
        assert len({card.uuid for card in cards}) == 2
        acl.rt.free(pointer)
        acl.rt.reset_device(1)
        acl.finalize()
