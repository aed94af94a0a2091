"""Custom batching hooks of a model."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
from google.protobuf import text_format

from npuserve.errors import InvalidArgumentError
from npuserve.model_config import ModelConfig
from npuserve.request import InferenceRequest
from npuserve.server.batch_strategy import load_strategy
from npuserve.server.schedulers.dynamic_batcher import DynamicBatcher
from npuserve.testing.clock import FakeClock
from npuserve.testing.instances import FakePool, context_of
from tests.server.models import serve, write_model

# Requests share a batch as long as their priorities add up to no more than the parameter says.
HOOKS = """
log = []
def model_batcher_initialize(model_config):
    log.append(model_config["parameters"].get("file", {}).get("string_value"))
    return int(model_config["parameters"]["limit"]["string_value"])
def model_batcher_finalize(batcher):
    open(log[0], "w").close()
def batch_initialize(batcher):
    return {"left": batcher}
def batch_include_request(request, state):
    state["left"] -= request.priority
    return state["left"] >= 0
def batch_finalize(state):
    log.append(state["left"])
"""


def config(text: str = "") -> ModelConfig:
    message = ModelConfig()
    text_format.Parse(
        'name: "m" max_batch_size: 8 dynamic_batching { } '
        'parameters { key: "limit" value { string_value: "10" } } ' + text,
        message,
    )
    return message


def named(path: str) -> str:
    key = "TRITON_BATCH_STRATEGY_PATH"
    return f'parameters {{ key: "{key}" value {{ string_value: "{path}" }} }}'


def test_the_hooks_cut_batches(tmp_path: Path) -> None:
    """A request that the hook refuses begins the next batch, in order; the end is told too."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "batchstrategy.py").write_text(HOOKS)
    clock = FakeClock()
    pool = FakePool(clock)
    file = f'parameters {{ key: "file" value {{ string_value: "{tmp_path}/closed" }} }}'
    scheduler = DynamicBatcher(context_of(config(file), pool, model_dir=tmp_path / "m"))
    for volume in (4, 5, 2, 20, 1, 1):
        request = InferenceRequest("m", {}, lambda *_: None, priority=volume)
        pool.statistics.pending += 1
        scheduler.enqueue(request)
    clock.run()
    assert pool.sizes == [2, 1, 1, 2]
    scheduler.stop()
    scheduler.close()
    assert (tmp_path / "closed").exists()


async def test_the_end_is_told_if_the_model_is_never_served(tmp_path: Path) -> None:
    """The hooks are loaded before the warm-up that fails."""
    text = (
        f'parameters {{ key: "file" value {{ string_value: "{tmp_path}/closed" }} }} '
        'parameters { key: "limit" value { string_value: "10" } } dynamic_batching { } '
        'model_warmup { name: "w" batch_size: 1 inputs { key: "X" '
        'value { data_type: TYPE_FP32 dims: [ 2 ] input_data_file: "missing" } } }'
    )
    directory = write_model(tmp_path / "models", "m", text)
    (directory / "batchstrategy.py").write_text(HOOKS)
    async with serve(tmp_path / "models") as server:
        assert server.lifecycle.failed_startup == ["m"]
        assert (tmp_path / "closed").exists()


async def test_hooks_that_take_long_to_load_hold_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may import anything; the event loop goes on meanwhile."""
    gate = threading.Event()
    monkeypatch.setitem(sys.modules, "a_gate", cast("ModuleType", SimpleNamespace(gate=gate)))
    directory = write_model(tmp_path, "m", "dynamic_batching { }")
    (directory / "batchstrategy.py").write_text("import a_gate\nassert a_gate.gate.wait(5)\n")
    async with serve(tmp_path, load_model=()) as server:
        server.loop.call_later(0.01, gate.set)
        await server.load_model("m")


def test_the_version_folder_comes_before_the_model_folder(tmp_path: Path) -> None:
    """Two files: that of the version counts."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "batchstrategy.py").write_text("raise RuntimeError('not me')")
    (tmp_path / "m" / "1" / "batchstrategy.py").write_text(HOOKS)
    strategy = load_strategy(config(), tmp_path / "m", 1)
    assert strategy is not None
    assert strategy.begin() == {"left": 10}


def test_a_hook_that_raises_ends_the_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug in batch_include_request is logged; every request still runs."""
    (tmp_path / "batchstrategy.py").write_text("def batch_include_request(r, s): return 1 / 0")
    strategy = load_strategy(config(), tmp_path, 1)
    assert strategy is not None
    assert not strategy.includes(InferenceRequest("m", {}, lambda *_: None), None)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("hook", ["batch_initialize", "batch_finalize", "model_batcher_finalize"])
def test_no_hook_that_raises_stops_the_queue(tmp_path: Path, hook: str) -> None:
    """Whichever it is, all requests are executed and the model can be unloaded."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "batchstrategy.py").write_text(f"def {hook}(_): return 1 / 0")
    clock = FakeClock()
    pool = FakePool(clock)
    scheduler = DynamicBatcher(context_of(config(), pool, model_dir=tmp_path / "m"))
    for _ in range(3):
        pool.statistics.pending += 1
        scheduler.enqueue(InferenceRequest("m", {}, lambda *_: None))
    clock.run()
    assert sum(pool.sizes) == 3
    scheduler.stop()


def test_models_without_hooks_have_no_strategy(tmp_path: Path) -> None:
    """No file, no parameter: the rules of the configuration alone."""
    assert load_strategy(config(), tmp_path, 1) is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../../elsewhere.py", "Batching library path escapes model repository."),
        ("none.py", "Batching library path not found: "),
        ("lib.so", "write its hooks in Python"),
        ("broken.py", "failed: SyntaxError"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, path: str, message: str) -> None:
    """The load fails with what is wrong."""
    model_dir = tmp_path / "repository" / "m"
    model_dir.mkdir(parents=True)
    (model_dir / "lib.so").write_text("")
    (model_dir / "broken.py").write_text("def")
    (tmp_path / "elsewhere.py").write_text("")
    with pytest.raises(InvalidArgumentError, match=message):
        load_strategy(config(named(path)), model_dir, 1)
