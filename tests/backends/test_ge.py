"""The ge backend on the simulator: compiling, caching, placing, serving."""

from __future__ import annotations

import errno
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from npuserve.backends import atc, ge
from npuserve.backends.base import Placement
from npuserve.backends.ge import GeBackend, assign_devices, batch_gears
from npuserve.errors import InternalError, InvalidArgumentError, NpuserveError, UnavailableError
from npuserve.testing.backend_driver import BackendDriver
from npuserve.testing.check_backend import check_backend
from npuserve.testing.simulator import simulate
from npuserve.testing.simulator.om_file import OmDescription, decode
from npuserve.testing.simulator.runtime import Runtime
from tests.backends import onnx_models
from tests.backends.npu_models import affine, parameters
from tests.backends.onnx_models import config, value


@pytest.fixture(autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compiled models of one test only."""
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    return directory / "npuserve" / "ge"


def serve(model_dir: Path, text: str = "", **options: Any) -> BackendDriver:
    return BackendDriver(GeBackend(), config(f'backend: "npu_ge" {text}'), model_dir, **options)


async def load_error(model_dir: Path, text: str = "") -> NpuserveError:
    with pytest.raises(NpuserveError) as caught:
        await serve(model_dir, text).__aenter__()
    return caught.value


def compiled_files(cache_dir: Path) -> list[Path]:
    return list(cache_dir.glob("*/*.om"))


def compiled(cache_dir: Path) -> OmDescription:
    """What was compiled; there must be one file."""
    (path,) = compiled_files(cache_dir)
    return decode(path.read_bytes())[0]


async def check_affine(driver: BackendDriver, *arrays: NDArray[Any]) -> None:
    answers = await driver.infer(*({"x": array} for array in arrays))
    for array, answer in zip(arrays, answers, strict=True):
        np.testing.assert_allclose(answer.array("y"), 2 * array + 1, rtol=1e-6)


def rows(count: int, width: int = 3) -> NDArray[np.float32]:
    return np.random.default_rng(count).standard_normal((count, width), np.float32)


async def test_keeps_the_rules_of_a_backend(tmp_path: Path, machine: Runtime) -> None:
    """The conformance kit finds nothing."""

    def make_inputs(seed: int) -> dict[str, NDArray[Any]]:
        return {"x": np.random.default_rng(seed).random((1, 3), np.float32)}

    affine(tmp_path, ["n", 3])
    text = config('backend: "ge" max_batch_size: 4')
    await check_backend(GeBackend(), text, tmp_path, make_inputs)


async def test_a_batch_axis_is_compiled_into_gears(
    tmp_path: Path, machine: Runtime, cache_dir: Path
) -> None:
    """Powers of two, preferred sizes and the maximum; the rest comes from the file."""
    text = "max_batch_size: 12 dynamic_batching { preferred_batch_size: 6 }"
    async with serve(affine(tmp_path, ["n", 3]), text) as driver:
        await check_affine(driver, rows(5), rows(6))
    description = compiled(cache_dir)
    assert [gear.key for gear in description.gears] == [[1], [2], [4], [6], [8], [12]]
    assert description.soc_version == "Ascend910B3"


async def test_a_short_configuration_is_completed(tmp_path: Path, machine: Runtime) -> None:
    """Inputs, outputs and max_batch_size from the ONNX file."""
    async with serve(affine(tmp_path, ["n", 3])) as driver:
        assert driver.context.config.max_batch_size == 4
        assert list(driver.context.config.input[0].dims) == [3]


async def test_other_free_axes_make_a_dynamic_shape(
    tmp_path: Path, machine: Runtime, cache_dir: Path
) -> None:
    """Any length is served, batched as well."""
    async with serve(affine(tmp_path, ["n", "l"]), "max_batch_size: 8") as driver:
        await check_affine(driver, rows(2, 5), rows(1, 5), rows(1, 9))
    assert compiled(cache_dir).kind == "range"


async def test_static_model(tmp_path: Path, machine: Runtime, cache_dir: Path) -> None:
    """Whole dims, no max_batch_size: one shape is compiled."""
    text = parameters(static_model="1") + (
        'input { name: "x" data_type: TYPE_FP32 dims: [2, 3] }'
        'output { name: "y" data_type: TYPE_FP32 dims: [2, 3] }'
    )
    async with serve(affine(tmp_path, ["n", 3]), text) as driver:
        await check_affine(driver, rows(2))
    assert compiled(cache_dir).kind == "static"


async def test_static_model_with_a_batch_axis_is_refused(tmp_path: Path, machine: Runtime) -> None:
    """The error says what to write."""
    error = await load_error(
        affine(tmp_path, ["n", 3]), "max_batch_size: 4 " + parameters(static_model="1")
    )
    assert isinstance(error, InvalidArgumentError)
    assert "leave max_batch_size out" in str(error)


async def test_options_of_the_graph_engine_reach_atc(
    tmp_path: Path, machine: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without their scope; `atc.` takes any flag; the command line comes first."""
    seen: dict[str, str] = {}
    original = atc.compile_onnx

    def spy(onnx: Path, flags: dict[str, str], cache_dir: Path, compilers: atc.Compilers) -> Path:
        seen.update(flags)
        return original(onnx, flags, cache_dir, compilers)

    monkeypatch.setattr(ge, "compile_onnx", spy)
    text = "max_batch_size: 4 " + parameters(
        **{
            "session.ge.exec.precision_mode_v2": "origin",
            "atc.op_select_implmode": "high_precision",
            "graph.ge.inputShape": "x:-1,3", "graph.ge.dynamicDims": "1;4",
            "graph.ge.dynamicNodeType": "1",
        }
    )  # fmt: skip
    options = {"ge.aicoreNum": "12|10", "global.ge.exec.precision_mode_v2": "fp16"}
    async with serve(affine(tmp_path, ["n", 3]), text, backend_options=options) as driver:
        await check_affine(driver, rows(3))
    assert seen == {
        "precision_mode_v2": "origin", "op_select_implmode": "high_precision",
        "aicore_num": "12|10", "input_shape": "x:-1,3", "dynamic_dims": "1;4",
        "input_format": "ND", "soc_version": "Ascend910B3",
    }  # fmt: skip


async def test_unknown_parameters_are_named(
    tmp_path: Path, machine: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log; the model is served."""
    caplog.set_level(logging.WARNING)
    text = parameters(**{"ge.noSuchOption": "1", "profiling": "true"})
    async with serve(affine(tmp_path, ["n", 3]), text) as driver:
        await check_affine(driver, rows(1))
    assert "'ge.noSuchOption' is unknown" in caplog.text
    assert "'profiling' has no effect" in caplog.text


async def test_compiled_once(tmp_path: Path, machine: Runtime, cache_dir: Path) -> None:
    """The same file and options are not compiled again; other options are."""
    affine(tmp_path, ["n", 3])
    async with serve(tmp_path, "max_batch_size: 2"):
        pass
    (first,) = compiled_files(cache_dir)
    stamp = first.stat().st_mtime_ns
    async with serve(tmp_path, "max_batch_size: 2"):
        assert first.stat().st_mtime_ns == stamp
    async with serve(tmp_path, "max_batch_size: 4"):
        assert len(compiled_files(cache_dir)) == 2


async def test_a_compiled_model_on_a_read_only_file_system_is_used(
    tmp_path: Path, machine: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As part of a container's image, say."""
    affine(tmp_path, ["n", 3])
    async with serve(tmp_path):
        pass

    def read_only(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(atc, "_locked", read_only)
    async with serve(tmp_path) as driver:
        await check_affine(driver, rows(1))
    error = await load_error(tmp_path, "max_batch_size: 2")
    assert "Read-only file system; name a folder" in str(error)
    assert "XDG_CACHE_HOME" in str(error)


def test_a_user_without_account_or_home_has_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run under any user id."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert atc.default_cache_dir() == Path("/.cache/npuserve/ge")


async def test_errors_of_atc_are_shown(tmp_path: Path, machine: Runtime, cache_dir: Path) -> None:
    """Its own message is the reason; nothing is kept."""
    text = parameters(**{"session.ge.exec.precision_mode_v2": "best"})
    error = await load_error(affine(tmp_path, ["n", 3]), text)
    assert isinstance(error, InternalError)
    assert "E10001" in str(error)
    assert "[best]" in str(error)
    assert compiled_files(cache_dir) == []


async def test_any_onnx_file_is_found(tmp_path: Path, machine: Runtime) -> None:
    """A lone file of another name is the model; of two none is."""
    directory = affine(tmp_path, ["n", 3]) / "1"
    (directory / "model.onnx").rename(directory / "net.onnx")
    async with serve(tmp_path) as driver:
        await check_affine(driver, rows(1))
    (directory / "other.onnx").write_bytes(b"")
    assert "net.onnx, other.onnx" in str(await load_error(tmp_path))


async def test_a_file_that_is_no_onnx_model(tmp_path: Path, machine: Runtime) -> None:
    """Said before anything is compiled."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").write_bytes(b"\xff" * 100)
    error = await load_error(tmp_path)
    assert isinstance(error, InvalidArgumentError)
    assert "no ONNX model" in str(error)


async def test_without_cann_the_reason_names_the_backend(tmp_path: Path) -> None:
    """A repository for NPUs on an ordinary machine."""
    error = await load_error(affine(tmp_path, ["n", 3]))
    assert isinstance(error, UnavailableError)
    assert "npu_ge" in str(error)
    assert "'acl'" in str(error)


async def test_without_atc_the_reason_says_so(
    tmp_path: Path, machine: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime package without the toolkit."""
    with monkeypatch.context() as patch:  # put back before the machine is
        patch.setenv("PATH", "/usr/bin:/bin")
        error = await load_error(affine(tmp_path, ["n", 3]))
    assert isinstance(error, UnavailableError)
    assert "'atc'" in str(error)


def test_a_server_that_stops_ends_its_compiler(
    tmp_path: Path, machine: Runtime, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have worked for hours more. Nothing is compiled afterwards, or kept by halves."""
    (tmp_path / "bin").mkdir()
    started = tmp_path / "started"
    os.mkfifo(started)
    program = tmp_path / "bin" / "atc"
    program.write_text(f"#!/bin/sh\necho $$ > {started}\nsleep 1000\n")
    program.chmod(0o755)
    driver = serve(affine(tmp_path, ["n", 3]), "max_batch_size: 2")
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as thread:
        patch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
        driver.backend.auto_complete(driver.context)
        loading = thread.submit(driver.backend.load, driver.context)
        pid = int(started.read_text())
        driver.backend.stop()
        assert "the server stops" in str(loading.exception(timeout=10))
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(UnavailableError, match="the server stops"):
            driver.backend.load(driver.context)
    assert [path.suffix for path in cache_dir.iterdir()] == [".lock"]


def test_a_server_that_stops_waits_for_nobody_elses_compiler(
    tmp_path: Path, machine: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server compiles the same; it may take hours, too."""
    driver = serve(affine(tmp_path, ["n", 3]), "max_batch_size: 2")
    driver.backend.auto_complete(driver.context)
    waiting = threading.Event()
    pause = atc.Compilers.pause

    def watched(compilers: atc.Compilers) -> None:
        waiting.set()
        pause(compilers)

    monkeypatch.setattr(atc.Compilers, "pause", watched)
    monkeypatch.setattr(atc, "_try_to_lock", lambda _: False)
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(driver.backend.load, driver.context)
        assert waiting.wait(10)
        driver.backend.stop()
        assert "the server stops" in str(loading.exception(timeout=10))


async def test_without_a_visible_card_the_chip_is_unknown(tmp_path: Path) -> None:
    """CANN is there, no card is: the reason says how to compile all the same."""
    affine(tmp_path, ["n", 3])
    with simulate(cards=0):
        error = await load_error(tmp_path)
        assert isinstance(error, UnavailableError)
        assert "ge.socVersion" in str(error)


# Cards.


def placed(count: int) -> list[Placement]:
    return [Placement(f"m_{index}", "CPU", index % 2, 0, index) for index in range(count)]


@pytest.mark.parametrize(
    ("instances", "given", "cards"),
    [
        (2, {}, [[0], [1]]),
        (2, {"device_ids": "0,1"}, [[0], [1]]),
        (1, {"device_ids": "4,5"}, [[4, 5]]),
        (1, {"device_ids": "2"}, [[2]]),
        (2, {"device_ids": "0,1", "device_exec_blocks": "2"}, [[0, 1], [0, 1]]),
        (1, {"device_ids": "0", "device_exec_blocks": "3"}, [[0, 0, 0]]),
        (4, {"device_ids": "0,1"}, [[0], [1], [0], [1]]),
        (2, {"instance_exec_blocks": "2"}, [[0, 0], [1, 1]]),
    ],
)
def test_assignment_of_cards(instances: int, given: dict[str, str], cards: list[list[int]]) -> None:
    """Loads are dealt over the cards in turn."""
    assert assign_devices(placed(instances), given) == cards


def test_card_lists_are_numbers() -> None:
    """The error says what to write."""
    with pytest.raises(InvalidArgumentError, match="0,1"):
        assign_devices(placed(1), {"device_ids": "zero"})


def test_batch_gears_as_asked() -> None:
    """The parameter replaces what would be compiled."""
    model = config("max_batch_size: 100")
    assert batch_gears(model, "8,1,8") == [1, 8]
    assert batch_gears(config("max_batch_size: 1"), None) == [1]
    with pytest.raises(InvalidArgumentError):
        batch_gears(model, "few")


async def test_one_instance_on_two_cards(tmp_path: Path) -> None:
    """Executions go to the least busy card."""
    affine(tmp_path, ["n", 3])
    text = "max_batch_size: 2 " + parameters(device_ids="0,1", dynamic_batch_size="1,2")
    with simulate(cards=2, time="modelled") as machine:
        async with serve(tmp_path, text) as driver:
            await check_affine(driver, rows(2), rows(2), rows(2), rows(2))
            counts = [sum(s.engine == "compute" for s in card.trace) for card in machine.cards]
            assert counts == [2, 2]
        assert machine.leaks() == []


async def test_an_absent_card_is_named(tmp_path: Path, machine: Runtime) -> None:
    """With the cards there are."""
    text = "max_batch_size: 2 " + parameters(device_ids="5")
    error = await load_error(affine(tmp_path, ["n", 3]), text)
    assert "no NPU 5; cards there are: 0, 1" in str(error)


async def test_scalars_and_several_inputs(tmp_path: Path, machine: Runtime) -> None:
    """A scalar input is configured as one element."""
    onnx_models.save(
        tmp_path, [helper.make_node("Mul", ["x", "s"], ["y"])],
        [value("x", TensorProto.FLOAT, [3]), value("s", TensorProto.FLOAT, [1])],
        [value("y", TensorProto.FLOAT, [3])],
    )  # fmt: skip
    async with serve(tmp_path) as driver:
        x = np.array([1, 2, 3], np.float32)
        (answer,) = await driver.infer({"x": x, "s": np.array([2], np.float32)})
        np.testing.assert_array_equal(answer.array("y"), 2 * x)
