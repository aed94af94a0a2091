"""What /metrics shows, from a server without front ends."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from npuserve.errors import AlreadyExistsError
from npuserve.protocol.prometheus import exposition, format_value, render
from npuserve.request import InferenceRequest
from npuserve.server.core import InferenceServer
from npuserve.server.machine import Machine
from npuserve.server.metrics import MetricsConfig
from npuserve.server.model import Model
from npuserve.server.npu_metrics import CardMetrics, NpuMetrics
from npuserve.tensor import Tensor
from npuserve.testing.simulator import simulate
from tests.server.models import infer, serve, write_model


def samples(server: InferenceServer) -> dict[str, float]:
    """Series with their values."""
    lines = render(server).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {series: float(value) for series, value in pairs}


def watch_freed(server: InferenceServer, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """An event that happens when what the model `m` is now has been freed."""
    watched, freed = server.model("m"), asyncio.Event()
    model_unloaded = server.metrics.model_unloaded

    def note(model: Model) -> None:
        model_unloaded(model)
        if model is watched:
            freed.set()

    monkeypatch.setattr(server.metrics, "model_unloaded", note)
    return freed


async def unload(server: InferenceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unload the model `m`; returns when it has been freed."""
    freed = watch_freed(server, monkeypatch)
    await server.unload_model("m")
    await freed.wait()


async def test_counters_are_those_of_the_statistics(tmp_path: Path) -> None:
    """Three rows and one row: two requests, four inferences, two executions."""
    write_model(tmp_path, "m", 'metric_tags { key: "team" value: "a" }')
    async with serve(tmp_path) as server:
        await infer(server, "m", rows=3)
        await infer(server, "m")
        shown = samples(server)
        labels = '{_team="a",model="m",version="1"}'
        assert shown[f"nv_inference_request_success{labels}"] == 2
        assert shown[f"nv_inference_count{labels}"] == 4
        assert shown[f"nv_inference_exec_count{labels}"] == 2
        assert shown[f"nv_inference_pending_request_count{labels}"] == 0
        statistics = server.model("m").statistics
        duration = shown[f"nv_inference_request_duration_us{labels}"]
        assert duration == statistics.success.ns // 1_000


async def test_failure_series_exist_from_the_load_on(tmp_path: Path) -> None:
    """All four reasons are there with value 0."""
    write_model(tmp_path, "m")
    async with serve(tmp_path) as server:
        shown = samples(server)
        for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
            series = f'nv_inference_request_failure{{model="m",reason="{reason}",version="1"}}'
            assert shown[series] == 0


async def test_counters_survive_a_reload_and_vanish_with_an_unload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload goes on counting, a load after an unload starts at 0."""
    directory = write_model(tmp_path, "m")
    series = 'nv_inference_count{model="m",version="1"}'
    async with serve(tmp_path) as server:
        await infer(server, "m")
        replaced_freed = watch_freed(server, monkeypatch)
        (directory / "config.pbtxt").write_text(
            (directory / "config.pbtxt").read_text() + 'parameters { key: "k" value { } }'
        )
        await server.load_model("m")
        await infer(server, "m", rows=2)
        assert samples(server)[series] == 3
        assert server.model("m").statistics.inference_count == 2
        await replaced_freed.wait()  # until then the series is its as well
        await unload(server, monkeypatch)
        assert series not in samples(server)
        await server.load_model("m")
        assert samples(server)[series] == 0


async def test_every_family_has_help_and_type_without_models(tmp_path: Path) -> None:
    """An empty repository shows the families of Triton, in their order."""
    async with serve(tmp_path) as server:
        text = render(server).decode()
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert types[:5] == [
        "nv_inference_request_success",
        "nv_inference_request_failure",
        "nv_inference_count",
        "nv_inference_exec_count",
        "nv_inference_request_duration_us",
    ]
    assert "# TYPE nv_inference_request_success counter\n" in text
    assert (
        "# HELP nv_inference_count Number of inferences performed (does not include cached "
        "requests)\n" in text
    )
    assert not any("summary" in name or "histogram" in name for name in types)


async def test_latency_counters_can_be_replaced_by_summaries(tmp_path: Path) -> None:
    """counter_latencies=false drops only the durations; summaries have quantiles, sum and count."""
    write_model(tmp_path, "m")
    config = {
        "counter_latencies": "false",
        "summary_latencies": "true",
        "histogram_latencies": "true",
        "summary_quantiles": "0.5:0.05,0.9:0.01",
    }
    async with serve(tmp_path, metrics_config=config) as server:
        await infer(server, "m")
        shown = samples(server)
    labels = 'model="m",version="1"'
    assert f"nv_inference_request_duration_us{{{labels}}}" not in shown
    assert shown[f"nv_inference_count{{{labels}}}"] == 1
    name = "nv_inference_request_summary_us"
    assert shown[f"{name}_count{{{labels}}}"] == 1
    assert shown[f'{name}{{{labels},quantile="0.9"}}'] == shown[f"{name}_sum{{{labels}}}"]
    assert f'{name}{{{labels},quantile="0.99"}}' not in shown
    name = "nv_inference_first_response_histogram_ms_bucket"
    assert shown[f'{name}{{{labels},le="+Inf"}}'] == 1
    assert f'{name}{{{labels},le="2000"}}' in shown


async def test_the_first_response_of_every_request_is_observed(tmp_path: Path) -> None:
    """Of an ensemble, of a cache, and an error: it does not matter who answers."""
    write_model(tmp_path, "member", "response_cache { enable: true }")
    (tmp_path / "whole" / "1").mkdir(parents=True)
    (tmp_path / "whole" / "config.pbtxt").write_text("""
        platform: "ensemble" max_batch_size: 8
        input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
        output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
        ensemble_scheduling { step [ { model_name: "member" model_version: -1
          input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } ] }""")
    options = {
        "metrics_config": {"histogram_latencies": "true"},
        "cache_config": {"local": {"size": "100000"}},
    }
    async with serve(tmp_path, **options) as server:
        for model in ("whole", "member"):  # the second one is a hit
            await infer(server, model)
        request = InferenceRequest(
            "member", {"X": Tensor.from_numpy("X", np.ones((1, 2), np.float32))}, lambda *_: None
        )
        request.cancel()
        server.infer(request)
        shown = samples(server)
    name = "nv_inference_first_response_histogram_ms_count"
    assert shown[f'{name}{{model="whole",version="1"}}'] == 1
    assert shown[f'{name}{{model="member",version="1"}}'] == 3


async def test_cache_families_belong_to_models_that_use_it(tmp_path: Path) -> None:
    """Hits and misses by model, and the state of the local cache."""
    write_model(tmp_path, "plain")
    write_model(tmp_path, "cached", "response_cache { enable: true }")
    options = {"cache_config": {"local": {"size": "100000"}}}
    async with serve(tmp_path, **options) as server:
        for model in ("plain", "cached", "cached"):
            await infer(server, model)
        shown = samples(server)
    assert shown['nv_cache_num_hits_per_model{model="cached",version="1"}'] == 1
    assert shown['nv_cache_num_misses_per_model{model="cached",version="1"}'] == 1
    assert 'nv_cache_num_hits_per_model{model="plain",version="1"}' not in shown
    assert shown["nv_cache_num_entries"] == 1
    assert 0 < shown["nv_cache_util"] < 1


CARDS = ("NPU-0000:C0:00.0", "NPU-0000:C1:00.0")


def on_cards(directory: Path, groups: str) -> None:
    """Give the model of `write_model` other instance groups."""
    path = directory / "config.pbtxt"
    group = next(line for line in path.read_text().splitlines() if "instance_group" in line)
    path.write_text(path.read_text().replace(group, f"instance_group [ {groups} ]"))


def by_card(shown: dict[str, float], family: str, more: str = "") -> list[float | None]:
    """Values of the model `m`: on no card, then on each of the two."""
    labels = f'model="m",{more}version="1"'
    return [
        shown.get(f"{family}{{{uuid}{labels}}}")
        for uuid in ("", *(f'gpu_uuid="{card}",' for card in CARDS))
    ]


async def test_executions_are_shown_by_card(tmp_path: Path) -> None:
    """Two cards and the CPU in turn: each shows its own, and all make what the statistics say."""
    on_cards(write_model(tmp_path, "m"), "{ kind: KIND_NPU }, { kind: KIND_CPU }")
    options = {"metrics_config": {"summary_latencies": "true", "histogram_latencies": "true"}}
    with simulate(cards=2):
        async with serve(tmp_path, **options) as server:
            for rows in (1, 2, 3, 4):
                await infer(server, "m", rows=rows)
            shown = samples(server)
            statistics = server.model("m").statistics
    assert by_card(shown, "nv_inference_count") == [3, 1 + 4, 2]
    assert by_card(shown, "nv_inference_exec_count") == [1, 2, 1]
    assert by_card(shown, "nv_inference_request_success") == [1, 2, 1]
    assert by_card(shown, "nv_inference_request_failure", 'reason="BACKEND",') == [0, 0, 0]
    assert by_card(shown, "nv_inference_request_summary_us_count") == [1, 2, 1]
    assert by_card(shown, "nv_inference_first_response_histogram_ms_count") == [4, None, None]
    assert by_card(shown, "nv_inference_pending_request_count") == [0, None, None]
    assert (statistics.inference_count, statistics.execution_count) == (10, 4)
    assert statistics.success.count == 4


async def test_a_card_goes_on_counting_over_reloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one the model has left; with the model all its series end."""
    directory = write_model(tmp_path, "m")
    on_cards(directory, "{ kind: KIND_GPU }")
    with simulate(cards=2):
        async with serve(tmp_path) as server:
            for _ in CARDS:
                await infer(server, "m")
            on_cards(directory, "{ kind: KIND_GPU gpus: 1 }")
            former = watch_freed(server, monkeypatch)
            await server.load_model("m")
            await infer(server, "m", rows=5)
            await former.wait()
            assert by_card(samples(server), "nv_inference_count") == [0, 1, 6]
            await unload(server, monkeypatch)
            assert by_card(samples(server), "nv_inference_count") == [None] * 3


class LateNpuSmi:
    """Fails at first, then answers when it is told to.

    Attributes:
        may_answer: set by the test.
        has_answered: the loop has been told of the answer; set.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_answer, self.has_answered = threading.Event(), threading.Event()
        self._readings = 0
        late = partial(NpuMetrics, 0.001, self._read)
        monkeypatch.setattr("npuserve.server.metrics.NpuMetrics", late)

    def _read(self) -> list[CardMetrics]:
        self._readings += 1
        if self._readings == 1:
            raise subprocess.TimeoutExpired("npu-smi", 1)
        if self._readings == 2:
            assert self.may_answer.wait(5)
        else:
            self.has_answered.set()
        return [CardMetrics(index, card, "910B", True) for index, card in enumerate(CARDS)]


async def test_cards_that_become_known_later_have_series_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ran before stays where it was: no counter goes back, and the sums are right."""
    directory = write_model(tmp_path, "m")
    on_cards(directory, "{ kind: KIND_GPU }")
    npu_smi = LateNpuSmi(monkeypatch)
    options = {"metrics_config": {"summary_latencies": "true"}}
    with simulate(cards=2):
        async with serve(tmp_path, **options) as server:
            await infer(server, "m")
            assert by_card(samples(server), "nv_inference_count") == [1, None, None]
            npu_smi.may_answer.set()
            await asyncio.to_thread(npu_smi.has_answered.wait)
            assert by_card(samples(server), "nv_inference_count") == [1, 0, 0]
            for _ in CARDS:
                await infer(server, "m", rows=2)
            assert by_card(samples(server), "nv_inference_count") == [1, 2, 2]
            assert by_card(samples(server), "nv_inference_request_summary_us_count") == [1, 1, 1]
            assert server.model("m").statistics.inference_count == 5
            on_cards(directory, "{ kind: KIND_GPU gpus: 0 }")
            await server.load_model("m")
            await infer(server, "m", rows=4)
            assert by_card(samples(server), "nv_inference_count") == [1, 6, 2]


async def test_cards_that_become_known_while_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its placements and its being ready."""
    on_cards(write_model(tmp_path, "m"), "{ kind: KIND_GPU gpus: 1 }, { kind: KIND_CPU }")
    npu_smi = LateNpuSmi(monkeypatch)
    with simulate(cards=2):
        async with serve(tmp_path, load_model=()) as server:
            card_name = server.metrics.card_name

            def known_right_after(card: int) -> str:
                name = card_name(card)
                npu_smi.may_answer.set()
                assert npu_smi.has_answered.wait(5)
                return name

            monkeypatch.setattr(server.metrics, "card_name", known_right_after)
            await server.load_model("m")
            for rows in (1, 2):
                await infer(server, "m", rows=rows)
            assert by_card(samples(server), "nv_inference_count") == [2, None, 1]


async def test_without_metrics_of_cards_executions_have_no_card(tmp_path: Path) -> None:
    """allow_gpu_metrics=false: no `gpu_uuid` anywhere, as in Triton."""
    on_cards(write_model(tmp_path, "m"), "{ kind: KIND_GPU }")
    with simulate(cards=2):
        async with serve(tmp_path, allow_gpu_metrics=False) as server:
            await infer(server, "m")
            assert by_card(samples(server), "nv_inference_count") == [1, None, None]


async def test_machine_families_can_be_switched_off(tmp_path: Path) -> None:
    """allow_cpu_metrics=false: no nv_cpu families."""
    async with serve(tmp_path) as server:
        assert samples(server)["nv_cpu_memory_total_bytes"] > 0
    async with serve(tmp_path, allow_cpu_metrics=False) as server:
        assert "nv_cpu" not in render(server).decode()


def test_utilisation_is_the_share_of_busy_ticks(tmp_path: Path) -> None:
    """Of 100 new ticks 25 were not idle."""
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 60 kB\n")
    (tmp_path / "stat").write_text("cpu 10 0 10 70 10 0 0 0 0 0\n")
    machine = Machine(interval_ns=0, proc=tmp_path)
    machine.refresh()
    (tmp_path / "stat").write_text("cpu 30 0 15 140 15 0 0 0 0 0\n")
    shown = exposition(machine.collect()).decode()
    assert "\nnv_cpu_utilization 0.25\n" in shown
    assert "\nnv_cpu_memory_used_bytes 40960\n" in shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.0, "3"),
        (0.1, "0.1"),
        (float("nan"), "Nan"),
        (float("inf"), "+Inf"),
        (-float("inf"), "-Inf"),
        (2**53 - 1, "9007199254740991"),
    ],
)
def test_values_are_written_as_triton_does(value: float, text: str) -> None:
    """Whole numbers have no fraction."""
    assert format_value(value) == text


async def test_a_model_may_add_series_to_a_family_of_the_server(tmp_path: Path) -> None:
    """They are shown in the one family there is of the name; another kind is refused."""
    write_model(tmp_path, "m")
    async with serve(tmp_path) as server:
        family = server.custom_metrics.create_family("nv_inference_count", "mine", "COUNTER")
        metric = server.custom_metrics.create_metric(family, {"own": "yes"})
        server.custom_metrics.increment(metric, 3)
        (shown,) = [each for each in server.metrics.collect() if each.name == "nv_inference_count"]
        assert [(s.labels, s.value) for s in shown.samples] == [
            ({"model": "m", "version": "1"}, 0),
            ({"own": "yes"}, 3),
        ]
        with pytest.raises(AlreadyExistsError, match="with kind COUNTER"):
            server.custom_metrics.create_family("nv_inference_exec_count", "mine", "GAUGE")


@pytest.mark.parametrize("quantile", ["high", "", "1.5", "-0.5", "nan"])
def test_a_quantile_that_is_none_is_logged(quantile: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is left out, and the server starts."""
    settings = {"summary_quantiles": f"0:0.1,.5:0.05,{quantile}:0.1,0.999:0.001,1.0:0"}
    assert MetricsConfig.from_settings(settings).quantiles == (0, 0.5, 0.999, 1)
    assert f"Invalid option: [{quantile}:0.1]" in caplog.text


def test_an_unknown_metrics_setting_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A slip in its name would look like a dashboard that stays empty."""
    assert MetricsConfig.from_settings({"sumary_latencies": "true"}).summary_latencies is False
    assert "--metrics-config sumary_latencies is not known" in caplog.text
    assert "summary_latencies" in caplog.text.partition("known:")[2]


def test_a_bad_quantile_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A pair without colon is left out with Triton's text."""
    config = MetricsConfig.from_settings({"summary_quantiles": "0.5:0.05,0.9"})
    assert config.quantiles == (0.5,)
    assert "Invalid option: [0.9]. No ':' delimiter found." in caplog.text
