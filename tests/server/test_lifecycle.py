"""Load, reload, unload, poll: what is served meanwhile and what the index says."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import pytest

from npuserve.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    NpuserveError,
    UnavailableError,
)
from tests.server.lifecycle_driver import (
    CONFIG_JSON,
    SLOW,
    everything_below,
    infer,
    reason,
    serve,
    states,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path


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
