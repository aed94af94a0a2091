"""Every call of the runtime made to fail in turn: a clear error, no leak, and life goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from npuserve.backends.acl.library import AclCallError
from npuserve.backends.npu_batch import OutputWriter
from npuserve.backends.npu_instance import NpuInstance
from npuserve.backends.om import OmBackend
from npuserve.errors import InternalError, NpuserveError
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.tensor import Tensor
from npuserve.testing.backend_driver import BackendDriver
from npuserve.testing.simulator import simulate
from npuserve.testing.simulator.faults import Fault
from npuserve.testing.simulator.runtime import Runtime
from tests.backends.npu_models import (
    affine,
    aipp_om,
    batch_om,
    compile_om,
    make_config,
    parameters,
)

X = np.arange(9, dtype=np.float32).reshape(3, 3)
IMAGE = np.arange(3 * 8 * 6 * 3, dtype=np.uint8).reshape(3, 8, 6, 3)


def dynamic_om(model_dir: Path) -> Path:
    return compile_om(affine(model_dir, ["n", "l"]))


class Case(NamedTuple):
    """A model, its configuration, and an input with what comes of it."""

    make: Callable[[Path], Path]
    x: NDArray[Any] = X
    y: NDArray[Any] = 2 * X + 1
    parameters: str = ""


MODELS = {
    "gears": Case(batch_om),
    "dynamic": Case(dynamic_om),
    "aipp": Case(
        aipp_om,
        IMAGE,
        IMAGE.transpose(0, 3, 1, 2) * np.float32(0.5),
        parameters(
            aipp_input_format="RGB888_U8", aipp_src_image_size="6,8", aipp_var_reci="0.5,0.5,0.5"
        ),
    ),
}


def driver_for(case: Case, model_dir: Path) -> BackendDriver:
    config = make_config(f"max_batch_size: 4 {case.parameters}")
    return BackendDriver(OmBackend(), config, model_dir)


async def infer(case: Case, driver: BackendDriver) -> NpuserveError | None:
    """Run one batch; its error, or None when the result is right."""
    (answer,) = await driver.infer({"x": case.x})
    assert answer.finals == 1
    if answer.error is not None:
        assert isinstance(answer.error, NpuserveError)
        return answer.error
    np.testing.assert_array_equal(answer.array("y"), case.y)
    return None


async def load(driver: BackendDriver) -> NpuserveError | None:
    """Load; the error, or None when it worked."""
    try:
        await driver.__aenter__()
    except NpuserveError as error:
        return error
    return None


async def cycle(machine: Runtime, case: Case, model_dir: Path) -> dict[str, int]:
    """Load, run twice, unload; the number of calls made by the end of each phase."""
    marks: dict[str, int] = {}
    start = len(machine.log)
    async with driver_for(case, model_dir) as driver:
        marks["load"] = len(machine.log) - start
        assert await infer(case, driver) is None
        assert await infer(case, driver) is None
        marks["run"] = len(machine.log) - start
    marks["unload"] = len(machine.log) - start
    return marks


def is_clear(error: Exception) -> bool:
    """Names the call; a code is named where the call has one."""
    return isinstance(error, AclCallError) and error.call in str(error)


CANNOT_FAIL = ("acl.destroy_tensor_desc", "acl.get_recent_err_msg")


def is_retried(call: str) -> bool:
    """Whether the wrapper makes a failed call again, or does without."""
    without_code = (
        "get_num_", "_name_by_index", "_data_type", "_format", "_size_by_index", "_num_dims",
        "_buffer_addr", "get_soc_name",
    )  # fmt: skip
    only_for_statistics = ("query_size",)
    gives_back = ("destroy_", "free", "unload", "reset_", "set_context")
    kinds = without_code + only_for_statistics + gives_back + CANNOT_FAIL
    return any(part in call for part in kinds)


@pytest.mark.parametrize("kind", sorted(MODELS))
async def test_each_call_of_a_load_may_fail(tmp_path: Path, machine: Runtime, kind: str) -> None:
    """The load fails with the call's name, everything is given back, and the next load works."""
    case = MODELS[kind]
    model_dir = case.make(tmp_path)
    await cycle(machine, case, model_dir)
    calls = (await cycle(machine, case, model_dir))["load"]
    survived = set()
    for index in range(calls):
        machine.faults[:] = [Fault(skip=index)]
        start = len(machine.log)
        driver = driver_for(case, model_dir)
        error = await load(driver)
        machine.faults.clear()
        if error is None:
            survived.add(machine.log[start + index])
            await driver.__aexit__(None, None, None)
        else:
            assert is_clear(error), error
        assert machine.leaks() == [], machine.log[start + index]
    # These are made a second time: values without a code, and what gives something back.
    assert {call for call in survived if not is_retried(call)} == set()
    await cycle(machine, case, model_dir)


@pytest.mark.parametrize("code", [500000, 507015])
@pytest.mark.parametrize("kind", sorted(MODELS))
async def test_each_call_of_an_execution_may_fail(
    tmp_path: Path, machine: Runtime, kind: str, code: int
) -> None:
    """The batch gets the error and the next one is right, in the same instance."""
    case = MODELS[kind]
    model_dir = case.make(tmp_path)
    await cycle(machine, case, model_dir)
    marks = await cycle(machine, case, model_dir)
    calls = (marks["run"] - marks["load"]) // 2
    async with driver_for(case, model_dir) as driver:
        assert await infer(case, driver) is None
        survived = set()
        for index in range(calls):
            machine.faults[:] = [Fault(skip=index, code=code)]
            start = len(machine.log)
            error = await infer(case, driver)
            machine.faults.clear()
            if error is None:
                survived.add(machine.log[start + index])
            else:
                assert is_clear(error), error
            assert await infer(case, driver) is None
        assert {call for call in survived if not is_retried(call)} == set()
    assert machine.leaks() == []


@pytest.mark.parametrize("kind", sorted(MODELS))
async def test_each_call_of_an_unload_may_fail(
    tmp_path: Path, machine: Runtime, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What fails to be given back is tried again, and said in the log."""
    caplog.set_level(logging.WARNING)
    case = MODELS[kind]
    model_dir = case.make(tmp_path)
    await cycle(machine, case, model_dir)
    marks = await cycle(machine, case, model_dir)
    for index in range(marks["unload"] - marks["run"]):
        driver = driver_for(case, model_dir)
        await driver.__aenter__()
        assert await infer(case, driver) is None
        caplog.clear()
        machine.faults[:] = [Fault(skip=index)]
        start = len(machine.log)
        await driver.__aexit__(None, None, None)
        machine.faults.clear()
        assert machine.leaks() == [], machine.log[start + index]
        call = machine.log[start + index]
        assert call in caplog.text or call in CANNOT_FAIL
    await cycle(machine, case, model_dir)


class RecordedBatch:
    """An `ExecutionBatch` that keeps what is sent."""

    def __init__(self, x: NDArray[Any]) -> None:
        request = InferenceRequest("m", {"x": Tensor.from_numpy("x", x)}, lambda *_: None)
        request.batch_size = x.shape[0]
        self.requests = [request]
        self.batch_size = x.shape[0]
        self.sent: list[InferenceResponse | None] = []

    def input_ready(self) -> None:
        """Nothing is measured."""

    def output_ready(self) -> None:
        """Nothing is measured."""

    def send(self, request: Any, response: InferenceResponse | None, final: bool = True) -> None:
        """Keep it."""
        self.sent.append(response)


def test_a_failure_belongs_to_the_batch_whose_outputs_it_lost(
    tmp_path: Path, machine: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that runs out while the next batch is submitted leaves no half answer."""
    context = driver_for(MODELS["gears"], batch_om(tmp_path)).context
    OmBackend().auto_complete(context)
    (instance,) = OmBackend().load(context)
    assert isinstance(instance, NpuInstance)
    instance.initialize()
    long, short = RecordedBatch(np.ones((8, 3), np.float32)), RecordedBatch(X)

    def no_memory(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        instance.submit(cast("Any", long))  # has all slots of the card
        patch.setattr(OutputWriter, "take", no_memory)
        instance.submit(cast("Any", short))
    for batch in (long, short):
        instance.collect(cast("Any", batch))
    (lost,), (answer,) = long.sent, short.sent
    assert lost is not None
    assert isinstance(lost.error, InternalError)
    assert answer is not None
    np.testing.assert_array_equal(answer.outputs[0].as_numpy(), 2 * X + 1)
    instance.finalize()
    assert machine.leaks() == []


async def test_device_memory_runs_out(tmp_path: Path) -> None:
    """Too large a model is unavailable, with the code's name and what to do; nothing stays."""
    with simulate(cards=1, time="modelled", memory_bytes=1 << 16) as machine:
        with pytest.raises(AclCallError) as caught:
            await driver_for(MODELS["gears"], batch_om(tmp_path)).__aenter__()
        assert caught.value.code.value == "Unavailable"
        assert "free device memory" in str(caught.value)
        assert machine.leaks() == []


async def test_an_absent_card_names_the_cards_there_are(tmp_path: Path, machine: Runtime) -> None:
    """Card 7 of two."""
    driver = driver_for(MODELS["gears"], batch_om(tmp_path))
    placement = driver.context.placements[0]
    object.__setattr__(placement, "device_id", 7)
    with pytest.raises(NpuserveError, match="no NPU 7; cards there are: 0, 1"):
        await driver.__aenter__()


async def test_500_loads_and_unloads_end_where_they_began(tmp_path: Path, machine: Runtime) -> None:
    """Device memory in use, and every other handle, return to what they were."""
    model_dir = batch_om(tmp_path)
    config = make_config("max_batch_size: 4 " + parameters(pipeline_depth="1"))
    used = []
    for count in range(500):
        async with BackendDriver(OmBackend(), config, model_dir) as driver:
            used.append(machine.cards[0].memory.used)
            if count % 100 == 0:
                assert await infer(MODELS["gears"], driver) is None
    assert len(set(used)) == 1
    assert machine.cards[0].memory.used == 0
    assert machine.leaks() == []
