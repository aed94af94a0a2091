"""Ensembles and their members: loaded, held and unloaded together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from npuserve.errors import NpuserveError
from tests.server.lifecycle_driver import (
    ENSEMBLE,
    SLOW,
    TWO_STEPS,
    infer,
    reason,
    serve,
    states,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path


async def test_an_ensemble_loads_its_members(tmp_path: Path) -> None:
    """Loading the ensemble alone makes both ready, and it answers."""
    write_model(tmp_path, "m")
    write_model(tmp_path, "e", ENSEMBLE % ("m", "X", "Y"))
    async with serve(tmp_path, load_model=("e",)) as server:
        assert await states(server) == {"e:1": "READY", "m:1": "READY"}
        assert (await infer(server, "e", name="A")).outputs[0].name == "B"


async def test_unloading_a_member_unloads_its_ensemble(tmp_path: Path) -> None:
    """Neither answers any more."""
    write_model(tmp_path, "m")
    write_model(tmp_path, "e", ENSEMBLE % ("m", "X", "Y"))
    async with serve(tmp_path) as server:
        await server.unload_model("m")
        with pytest.raises(NpuserveError):
            await infer(server, "e", name="A")


@pytest.mark.parametrize("operation", ["unload", "reload", "shutdown"])
async def test_a_running_ensemble_request_keeps_its_members(tmp_path: Path, operation: str) -> None:
    """A step not started when its model is unloaded or replaced runs on the former one."""
    write_model(tmp_path, "first", more=SLOW)
    write_model(tmp_path, "second")
    write_model(tmp_path, "e", TWO_STEPS)
    async with serve(tmp_path) as server:
        former = server.model("second")
        running = asyncio.ensure_future(infer(server, "e", name="A"))
        await asyncio.sleep(0)
        if operation == "unload":
            await server.unload_model("second")
            with pytest.raises(NpuserveError):
                server.model("second")
        elif operation == "reload":
            write_model(tmp_path, "second")
            await server.load_model("second")
            assert server.model("second") is not former
        assert not running.done()
    assert (await running).error is None
    assert former.statistics.inference_count == 1


@pytest.mark.parametrize("operation", ["unload inner", "unload m", "reload inner", "reload m"])
async def test_a_running_request_keeps_the_members_of_ensembles_inside(
    tmp_path: Path, operation: str
) -> None:
    """A step two ensembles below that has not started runs on the model of the beginning."""
    write_model(tmp_path, "first", more=SLOW)
    write_model(tmp_path, "m")
    write_model(tmp_path, "inner", ENSEMBLE % ("m", "X", "Y"))
    write_model(tmp_path, "second", ENSEMBLE % ("inner", "A", "B"))
    outer = TWO_STEPS.replace('key: "X" value: "t"', 'key: "A" value: "t"')
    write_model(tmp_path, "e", outer.replace('key: "Y" value: "B"', 'key: "B" value: "B"'))
    async with serve(tmp_path) as server:
        former = server.model("m")
        running = asyncio.ensure_future(infer(server, "e", name="A"))
        await asyncio.sleep(0)
        verb, name = operation.split()
        if verb == "unload":
            await server.unload_model(name)
        else:
            text = (tmp_path / name / "config.pbtxt").read_text()
            (tmp_path / name / "config.pbtxt").write_text(f"{text}\n# changed")
            await server.load_model(name)
        assert (await running).error is None
    assert former.statistics.inference_count == 1


async def test_unloading_a_member_unloads_all_ensembles_above_it(tmp_path: Path) -> None:
    """Also those that only contain an ensemble that contains it."""
    write_model(tmp_path, "m")
    write_model(tmp_path, "inner", ENSEMBLE % ("m", "X", "Y"))
    write_model(tmp_path, "outer", ENSEMBLE % ("inner", "A", "B"))
    write_model(tmp_path, "other")
    async with serve(tmp_path) as server:
        await server.unload_model("m")
        assert [model.name for model in server.models] == ["other"]


async def test_unload_dependents_takes_members_nobody_else_needs(tmp_path: Path) -> None:
    """Members loaded only for the ensemble go with it."""
    write_model(tmp_path, "m")
    write_model(tmp_path, "e", ENSEMBLE % ("m", "X", "Y"))
    async with serve(tmp_path, load_model=("e",)) as server:
        await server.unload_model("e", unload_dependents=True)
        with pytest.raises(NpuserveError):
            await infer(server, "m")


async def test_ensembles_that_need_each_other_are_refused_by_name(tmp_path: Path) -> None:
    """A cycle is reported, not waited for."""
    write_model(tmp_path, "e1", ENSEMBLE % ("e2", "A", "B"))
    write_model(tmp_path, "e2", ENSEMBLE % ("e1", "A", "B"))
    async with serve(tmp_path) as server:
        assert "circular dependency between ensembles: e1 -> e2 -> e1" in await reason(server, "e1")
        assert sorted(server.lifecycle.failed_startup) == ["e1", "e2"]


async def test_an_ensemble_of_a_broken_member_says_which(tmp_path: Path) -> None:
    """The reason names the member and its own failure."""
    write_model(tmp_path, "m", 'backend: "no_such_backend"')
    write_model(tmp_path, "e", ENSEMBLE % ("m", "X", "Y"))
    async with serve(tmp_path) as server:
        text = await reason(server, "e")
        assert "'m'" in text
        assert "no_such_backend" in text
