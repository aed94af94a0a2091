"""Loads, unloads and polls that meet each other, the end of the server, or a broken file system."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from npuserve.backends.identity import IdentityBackend
from npuserve.errors import NpuserveError, UnavailableError
from tests.server.lifecycle_driver import (
    CONFIG_JSON,
    ENSEMBLE,
    SLOW,
    everything_below,
    reason,
    serve,
    states,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path

    from npuserve.backends.base import Backend
    from npuserve.server.core import InferenceServer
    from npuserve.server.model import Model


async def drained(server: InferenceServer) -> None:
    """Every model that was unloaded or replaced is freed."""
    await asyncio.gather(*server.lifecycle._draining.values())


async def test_a_link_to_itself_stops_neither_the_start_nor_a_poll(tmp_path: Path) -> None:
    """The file system cannot say what it is; the models are served all the same."""
    write_model(tmp_path, "good")
    write_model(tmp_path, "odd")
    link = tmp_path / "odd" / "1" / "loop"
    link.symlink_to(link)
    async with serve(tmp_path, model_control_mode="poll") as server:
        write_model(tmp_path, "new")
        await server.lifecycle.poll_once()
        assert await states(server) == {"good:1": "READY", "new:1": "READY", "odd:1": "READY"}


async def test_a_model_that_vanishes_during_a_poll_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is listed with the reason, and loaded when it is back."""
    async with serve(tmp_path, model_control_mode="poll") as server:
        write_model(tmp_path, "gone")
        write_model(tmp_path, "other")
        factory = server.lifecycle.factory
        load_config = factory.load_config

        def remove_and_load(directory: Any, override: str | None) -> Any:
            if directory.name == "gone":
                shutil.rmtree(directory.path / "1")
            return load_config(directory, override)

        with monkeypatch.context() as patch:
            patch.setattr(factory, "load_config", remove_and_load)
            await server.lifecycle.poll_once()
        assert await states(server) == {"gone": "UNAVAILABLE", "other:1": "READY"}
        assert "gone/1" in await reason(server, "gone")
        write_model(tmp_path, "gone")
        await server.lifecycle.poll_once()
        assert (await states(server))["gone:1"] == "READY"


async def test_a_member_that_cannot_be_read_fails_all_its_ensembles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever loads it first: both have the reason, and the server starts."""
    write_model(tmp_path, "member")
    for name in ("first", "second"):
        write_model(tmp_path, name, ENSEMBLE % ("member", "X", "Y"))
    async with serve(tmp_path, load_model=()) as server:

        def fail(directory: Any) -> Any:
            raise PermissionError(13, "not for you", str(directory.path))

        monkeypatch.setattr(server.lifecycle.factory, "fingerprint", fail)
        results = await asyncio.gather(
            *map(server.load_model, ("first", "second", "member")), return_exceptions=True
        )
        for result in results:
            assert isinstance(result, NpuserveError)
            assert "not for you" in str(result)
        assert "not for you" in await reason(server, "member")


async def test_an_ensemble_that_no_longer_fits_says_why(tmp_path: Path) -> None:
    """Also after it has answered its last request."""
    write_model(tmp_path, "member")
    write_model(tmp_path, "whole", ENSEMBLE % ("member", "X", "Y"))
    async with serve(tmp_path) as server:
        write_model(tmp_path, "member", width=3)
        await server.load_model("member")
        await drained(server)
        assert await states(server) == {"member:1": "READY", "whole:1": "UNAVAILABLE"}
        assert "inconsistent shape" in await reason(server, "whole")


async def test_loads_of_a_new_name_after_one_that_failed_come_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waited for it, and one that came when it was forgotten; no file is left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "repository").mkdir()
    async with serve(tmp_path / "repository") as server:
        lifecycle = server.lifecycle
        entry = lifecycle.entry("m")
        loading: list[str] = []
        load_one = lifecycle.load_one

        async def watched(*args: Any) -> None:
            loading.append("begins")
            await load_one(*args)
            loading.append("ends")

        monkeypatch.setattr(lifecycle, "load_one", watched)
        async with asyncio.TaskGroup() as group, entry.lock:  # stands for a load that fails
            group.create_task(server.load_model("m", CONFIG_JSON, {"1/x": b"waits"}))
            await asyncio.sleep(0)  # it does
            del lifecycle.entries["m"]
            group.create_task(server.load_model("m", CONFIG_JSON, {"1/x": b"is late"}))
        assert loading == ["begins", "ends"] * 2
    assert everything_below(tmp_path) == [tmp_path / "repository"]


async def test_a_shutdown_frees_the_model_of_a_load_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is loaded afterwards."""
    write_model(tmp_path, "m")
    made: list[Model] = []
    begun, go_on = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        async with serve(tmp_path, load_model=()) as server:
            make = server.lifecycle.factory.make

            async def slowly(*args: Any) -> Model:
                begun.set()
                await go_on.wait()
                made.append(await make(*args))
                return made[-1]

            async def too_late() -> None:
                with pytest.raises(UnavailableError, match="the server is stopping"):
                    await server.load_model("m")

            monkeypatch.setattr(server.lifecycle.factory, "make", slowly)
            group.create_task(server.load_model("m"))
            await begun.wait()
            group.create_task(too_late())
            server.loop.call_soon(go_on.set)
        assert [model._drained.is_set() for model in made] == [True]


async def test_a_model_keeps_its_files_until_it_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a load call are removed when the last user of the replaced model lets it go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "repository").mkdir()
    async with serve(tmp_path / "repository") as server:
        await server.load_model("m", CONFIG_JSON, {"1/x": b"old"})
        model = server.model("m")
        model.hold()  # as an ensemble's request does
        await server.load_model("m", CONFIG_JSON, {"1/x": b"new"})
        assert server.model("m") is not model
        assert (model.context.model_dir / "1" / "x").read_bytes() == b"old"
        model.let_go()
        await drained(server)
        assert not model.context.model_dir.exists()


async def test_a_model_that_left_the_repository_is_unloaded_once_and_forgotten(
    tmp_path: Path,
) -> None:
    """Later polls have nothing to do for it."""
    write_model(tmp_path, "gone", more=SLOW)
    write_model(tmp_path, "stays")
    async with serve(tmp_path, model_control_mode="poll") as server:
        shutil.rmtree(tmp_path / "gone")
        await server.lifecycle.poll_once()
        await drained(server)
        await server.lifecycle.poll_once()
        assert list(server.lifecycle.entries) == ["stays"]
        before = server._serving_changes
        await server.lifecycle.poll_once()
        assert server._serving_changes == before


async def test_labels_that_are_not_there_are_named(tmp_path: Path) -> None:
    """With the output that wants them."""
    write_model(tmp_path, "m")
    config = tmp_path / "m" / "config.pbtxt"
    config.write_text(config.read_text().replace('"Y"', '"Y" label_filename: "labels.txt"'))
    async with serve(tmp_path) as server:
        text = await reason(server, "m")
        assert "failed to read the labels of output 'Y'" in text
        assert f"{tmp_path}/m/labels.txt: No such file" in text


async def test_a_backend_that_makes_the_wrong_number_of_instances_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many it made, and how many there should be."""
    write_model(tmp_path, "m")
    monkeypatch.setattr(IdentityBackend, "load", lambda backend, context: [])
    async with serve(tmp_path) as server:
        assert "made 0 instances, expected 1" in await reason(server, "m")


async def test_a_backend_that_cannot_unload_does_not_hide_why_the_load_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first error is the reason; the other one is in the log."""

    def fail(text: str) -> None:
        raise ValueError(text)

    write_model(tmp_path, "m")
    monkeypatch.setattr(IdentityBackend, "load", lambda backend, context: fail("the cause"))
    monkeypatch.setattr(IdentityBackend, "unload", lambda backend, context: fail("the effect"))
    async with serve(tmp_path) as server:
        assert "the cause" in await reason(server, "m")
        assert "the effect" in caplog.text


async def test_backends_are_told_that_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it waits for the loads that have begun, which they may give up."""
    told: list[Backend] = []
    monkeypatch.setattr(IdentityBackend, "stop", lambda backend: told.append(backend))
    write_model(tmp_path, "m")
    async with serve(tmp_path):
        assert not told
    assert told
