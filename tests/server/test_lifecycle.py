"""Load, reload, unload, poll: what is served meanwhile and what the index says."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npuserve.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    NpuserveError,
    UnavailableError,
)
from npuserve.options import ServerOptions
from npuserve.request import InferenceRequest
from npuserve.server.core import InferenceServer
from npuserve.tensor import Tensor

if TYPE_CHECKING:
    from pathlib import Path

    from npuserve.response import InferenceResponse

CONFIG = """
backend: "identity"
max_batch_size: 8
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ {width} ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ {width} ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
{more}
"""

CONFIG_JSON = '{"backend": "identity"}'

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling { step [ { model_name: "%s" model_version: -1
  input_map { key: "%s" value: "A" } output_map { key: "%s" value: "B" } } ] }
"""


SLOW = 'parameters { key: "execute_delay_ms" value { string_value: "50" } }'

TWO_STEPS = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling { step [
  { model_name: "first" model_version: -1
    input_map { key: "X" value: "A" } output_map { key: "Y" value: "t" } },
  { model_name: "second" model_version: -1
    input_map { key: "X" value: "t" } output_map { key: "Y" value: "B" } } ] }
"""


def write_model(
    root: Path, name: str, text: str = "", *, width: int = 2, more: str = "", versions: str = "1"
) -> None:
    """A model of the identity backend (or of `text`), written so that it looks modified."""
    directory = root / name
    for version in versions.split():
        (directory / version).mkdir(parents=True, exist_ok=True)
    config = directory / "config.pbtxt"
    previous = config.stat().st_mtime_ns if config.exists() else 0
    config.write_text(text or CONFIG.format(width=width, more=more))
    if previous:
        os.utime(config, ns=(previous + 10**9, previous + 10**9))


def serve(root: Path, **options: Any) -> InferenceServer:
    options.setdefault("model_control_mode", "explicit")
    options.setdefault("load_model", ("*",))
    if options["model_control_mode"] != "explicit":
        del options["load_model"]
    return InferenceServer(ServerOptions(model_repository=(str(root),), **options))


async def infer(
    server: InferenceServer, model: str, name: str = "X", width: int = 2, version: int = -1
) -> InferenceResponse:
    """One request of ones; the error of a refused or failed one is raised."""
    answer: asyncio.Future[InferenceResponse] = asyncio.get_running_loop().create_future()

    def receive(response: InferenceResponse | None, final: bool) -> None:
        assert response is not None
        assert final
        answer.set_result(response)

    tensor = Tensor.from_numpy(name, np.ones((1, width), np.float32))
    server.infer(InferenceRequest(model, {name: tensor}, receive, model_version=version))
    response = await answer
    if response.error is not None:
        raise response.error
    return response


async def states(server: InferenceServer) -> dict[str, str]:
    return {
        f"{row.name}:{row.version}" if row.version else row.name: row.state
        for row in await server.repository_index()
    }


async def reason(server: InferenceServer, name: str) -> str:
    return next(row.reason for row in await server.repository_index() if row.name == name)


async def test_start_up_serves_every_model_of_the_repository(tmp_path: Path) -> None:
    """Both models answer, and the server is ready."""
    write_model(tmp_path, "a")
    write_model(tmp_path, "b")
    async with serve(tmp_path, model_control_mode="none") as server:
        assert server.ready()
        for name in ("a", "b"):
            response = await infer(server, name)
            assert (response.model_name, response.model_version) == (name, "1")


async def test_a_model_that_fails_leaves_the_others_serving(tmp_path: Path) -> None:
    """The broken one is listed with its reason; strict readiness is false, the good one answers."""
    write_model(tmp_path, "good")
    write_model(tmp_path, "bad", 'backend: "no_such_backend" max_batch_size: 1')
    async with serve(tmp_path, model_control_mode="none") as server:
        assert server.lifecycle.failed_startup == ["bad"]
        assert not server.ready()
        assert "no_such_backend" in await reason(server, "bad")
        await infer(server, "good")


async def test_an_unreadable_configuration_is_listed_with_its_reason(tmp_path: Path) -> None:
    """The index says why, although no version could be tried."""
    write_model(tmp_path, "bad", "max_batch_size: banana")
    async with serve(tmp_path) as server:
        assert (await states(server))["bad"] == "UNAVAILABLE"
        assert "config.pbtxt" in await reason(server, "bad")


async def test_the_newest_ready_version_answers_without_a_version(tmp_path: Path) -> None:
    """-1 means the greatest number; a version that is not served is named in the error."""
    write_model(tmp_path, "m", more="version_policy { all { } }", versions="1 3 10")
    async with serve(tmp_path) as server:
        assert (await infer(server, "m")).model_version == "10"
        assert (await infer(server, "m", version=3)).model_version == "3"
        with pytest.raises(NotFoundError, match="'m' version 2 is not found"):
            await infer(server, "m", version=2)


async def test_unload_refuses_new_requests_and_load_brings_the_model_back(tmp_path: Path) -> None:
    """After an unload the model is not found; after a load it answers again."""
    write_model(tmp_path, "m")
    async with serve(tmp_path) as server:
        await server.unload_model("m")
        with pytest.raises(NpuserveError):
            await infer(server, "m")
        await server.unload_model("m")  # a second time is no error
        await server.load_model("m")
        await infer(server, "m")


async def test_unloading_answers_what_was_accepted(tmp_path: Path) -> None:
    """A request running when its model is unloaded gets its answer."""
    write_model(tmp_path, "m", more=SLOW)
    async with serve(tmp_path) as server:
        running = asyncio.ensure_future(infer(server, "m"))
        await asyncio.sleep(0)
        await server.unload_model("m")
        assert (await states(server))["m:1"] == "UNLOADING"
        assert (await running).error is None


async def test_a_shutdown_waits_for_an_unload_under_way(tmp_path: Path) -> None:
    """It ends, and what the unloaded model had accepted is answered first."""
    write_model(tmp_path, "m", more=SLOW)
    async with serve(tmp_path) as server:
        running = asyncio.ensure_future(infer(server, "m"))
        await asyncio.sleep(0)
        await server.unload_model("m")
    assert (await running).error is None


async def test_a_reload_loses_no_request(tmp_path: Path) -> None:
    """Requests sent while the model is reloaded again and again are all answered."""
    write_model(tmp_path, "m")
    async with serve(tmp_path) as server:
        stop = asyncio.Event()

        async def client() -> int:
            count = 0
            while not stop.is_set():
                await infer(server, "m")
                count += 1
            return count

        clients = [asyncio.ensure_future(client()) for _ in range(4)]
        for _ in range(10):
            write_model(tmp_path, "m")
            await server.load_model("m")
        stop.set()
        assert all(await asyncio.gather(*clients))


async def test_a_failed_reload_keeps_the_old_version(tmp_path: Path) -> None:
    """The load call reports the error; the old model goes on serving and stays READY."""
    write_model(tmp_path, "m")
    async with serve(tmp_path) as server:
        write_model(tmp_path, "m", 'backend: "no_such_backend"')
        with pytest.raises(InvalidArgumentError, match="load failed for model 'm'"):
            await server.load_model("m")
        await infer(server, "m")
        assert (await states(server))["m:1"] == "READY"


async def test_loading_an_unchanged_model_does_nothing(tmp_path: Path) -> None:
    """Statistics survive, so nothing was reloaded."""
    write_model(tmp_path, "m")
    async with serve(tmp_path) as server:
        await infer(server, "m")
        await server.load_model("m")
        assert server.model("m").statistics.success.count == 1


async def test_a_configuration_given_with_the_load_replaces_the_file(tmp_path: Path) -> None:
    """The override is served; the next plain load goes back to config.pbtxt."""
    write_model(tmp_path, "m")
    async with serve(tmp_path) as server:
        config = {
            "backend": "identity",
            "max_batch_size": 2,
            "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [3]}],
            "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [3]}],
        }
        await server.load_model("m", json.dumps(config))
        assert server.model("m").max_batch_size == 2
        await infer(server, "m", width=3)
        await server.load_model("m")
        assert server.model("m").max_batch_size == 8


async def test_files_given_with_the_load_make_a_model(tmp_path: Path) -> None:
    """A model that is in no repository is served from the files, until it is unloaded."""
    async with serve(tmp_path) as server:
        config = {"backend": "identity", "max_batch_size": 1}
        await server.load_model("new", json.dumps(config), {"1/weights.bin": b"w"})
        model_dir = server.model("new").context.model_dir
        assert (model_dir / "1" / "weights.bin").read_bytes() == b"w"
        with pytest.raises(InternalError, match="must stay within model directory"):
            await server.load_model("new", json.dumps(config), {"../../x": b""})


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"backend": "identity"}, {"1/x": b"new", "../x": b""}),
        ({"backend": "unknown"}, {"1/x": b"new"}),
        ({"backend": "identity", "max_batch_size": "many"}, {"1/x": b"new"}),
        ({"backend": "identity"}, {"no-version": b"new"}),
    ],
)
async def test_a_load_that_fails_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], files: dict[str, bytes]
) -> None:
    """Nor anything else of a new name; an old version goes on with its own files."""
    repository, temporary = tmp_path / "repository", tmp_path / "temporary"
    repository.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    async with serve(repository) as server:
        with pytest.raises(NpuserveError):
            await server.load_model("new", json.dumps(config), files)
        assert everything_below(temporary) == []
        assert server.lifecycle.entries == {}
        await server.load_model("new", CONFIG_JSON, {"1/x": b"old"})
        model_dir = server.model("new").context.model_dir
        before = everything_below(temporary)
        with pytest.raises(NpuserveError):
            await server.load_model("new", json.dumps(config), files)
        with pytest.raises(NpuserveError):  # it is in no repository
            await server.load_model("new")
        assert server.model("new").context.model_dir == model_dir
        assert everything_below(temporary) == before
        await server.load_model("new", CONFIG_JSON, {"1/x": b"newer"})
        await asyncio.gather(*server.lifecycle._draining.values())
        assert not model_dir.exists()
        assert (server.model("new").context.model_dir / "1" / "x").read_bytes() == b"newer"
    assert everything_below(temporary) == []


async def test_files_of_an_unloaded_model_are_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the next load comes before the model has finished and its files are removed."""
    repository, temporary = tmp_path / "repository", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    write_model(repository, "m")
    async with serve(repository) as server:
        await server.load_model("m", CONFIG_JSON, {"1/x": b"x"})
        overridden = server.model("m")
        await server.unload_model("m")
        await server.load_model("m", CONFIG_JSON)
        await asyncio.gather(*server.lifecycle._draining.values())
        assert not overridden.context.model_dir.exists()
        assert server.model("m").context.model_dir == repository / "m"
        assert everything_below(temporary) == []


def everything_below(folder: Path) -> list[Path]:
    """All files and folders."""
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("name", ["", ".", "..", "/", "/x", "a/b", "../m", "a\0b"])
async def test_a_name_that_is_a_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nothing outside the model's own temporary folder is ever written or removed."""
    repository, temporary = tmp_path / "repository", tmp_path / "temporary"
    write_model(repository, "m")
    (temporary / "of-others").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    async with serve(repository) as server:
        before = everything_below(tmp_path)
        with pytest.raises(InvalidArgumentError, match=r"[Mm]odel name"):
            await server.load_model(name, '{"backend": "identity"}', {"1/x": b"x"})
        assert name not in server.lifecycle.entries
    assert everything_below(tmp_path) == before


async def test_files_without_a_configuration_are_refused(tmp_path: Path) -> None:
    """The text says that 'config' is needed."""
    async with serve(tmp_path) as server:
        with pytest.raises(InternalError, match="'config' must be specified"):
            await server.load_model("new", None, {"1/x": b""})


async def test_an_unknown_model_cannot_be_loaded_but_unloaded(tmp_path: Path) -> None:
    """Loading names the model and the cause; unloading is no error."""
    async with serve(tmp_path) as server:
        with pytest.raises(InternalError, match="failed to load 'ghost'"):
            await server.load_model("ghost")
        await server.unload_model("ghost")


@pytest.mark.parametrize("mode", ["none", "poll"])
async def test_control_calls_need_the_explicit_mode(tmp_path: Path, mode: str) -> None:
    """The refusal names the mode that allows it."""
    write_model(tmp_path, "m")
    async with serve(tmp_path, model_control_mode=mode) as server:
        with pytest.raises(UnavailableError, match="explicit"):
            await server.load_model("m")
        with pytest.raises(UnavailableError, match="explicit"):
            await server.unload_model("m")


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


async def test_concurrent_loads_and_unloads_end_in_a_clear_state(tmp_path: Path) -> None:
    """Every call returns; a final load makes the model answer."""
    write_model(tmp_path, "m")
    async with serve(tmp_path) as server:
        calls = [
            server.load_model("m") if index % 2 else server.unload_model("m") for index in range(20)
        ]
        await asyncio.gather(*calls)
        await server.load_model("m")
        await infer(server, "m")


async def test_polling_follows_the_repository(tmp_path: Path) -> None:
    """New models are loaded, changed ones reloaded, removed ones unloaded; a bad one is alone."""
    write_model(tmp_path, "keep")
    async with serve(tmp_path, model_control_mode="poll", repository_poll_secs=3600) as server:
        write_model(tmp_path, "new")
        write_model(tmp_path, "bad", "max_batch_size: banana")
        write_model(tmp_path, "keep", width=3)
        await server.lifecycle.poll_once()
        await infer(server, "new")
        await infer(server, "keep", width=3)
        (tmp_path / "new" / "config.pbtxt").unlink()
        (tmp_path / "new" / "1").rmdir()
        (tmp_path / "new").rmdir()
        await server.lifecycle.poll_once()
        with pytest.raises(NpuserveError):
            await infer(server, "new")


async def test_nothing_is_left_after_many_loads(tmp_path: Path) -> None:
    """The threads of all instances are gone when the server is."""
    write_model(tmp_path, "m")
    async with serve(tmp_path) as server:
        for _ in range(20):
            await server.unload_model("m")
            await server.load_model("m")
        assert instance_threads()
    assert not instance_threads()


def instance_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("instance-")]


async def test_a_slip_in_a_load_call_does_not_make_the_server_unready(tmp_path: Path) -> None:
    """Loading a name that exists nowhere fails and leaves strict readiness as it was."""
    write_model(tmp_path, "m")
    async with serve(tmp_path) as server:
        with pytest.raises(InternalError):
            await server.load_model("mm")
        assert server.ready()
        assert "mm" not in await states(server)


async def test_a_model_whose_reload_failed_counts_as_ready(tmp_path: Path) -> None:
    """The old version serves, so traffic may come."""
    write_model(tmp_path, "m")
    async with serve(tmp_path) as server:
        write_model(tmp_path, "m", "max_batch_size: banana")
        with pytest.raises(NpuserveError):
            await server.load_model("m")
        assert server.ready()
        await server.unload_model("m")
        assert server.ready()
