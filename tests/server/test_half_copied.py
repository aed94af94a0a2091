"""Polling while somebody copies a model into the repository."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.server.lifecycle_driver import CONFIG, serve, states, write_model

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_half_copied_model_freezes_nobody_and_is_served_when_complete(
    tmp_path: Path,
) -> None:
    """First the folder, then a piece of the configuration, then all of it, then the version."""
    write_model(tmp_path, "good")
    text = CONFIG.format(width=2, more="")
    async with serve(tmp_path, model_control_mode="poll") as server:
        folder = tmp_path / "copied"
        config = folder / "config.pbtxt"
        folder.mkdir()
        await server.lifecycle.poll_once()
        assert await states(server) == {"good:1": "READY"}

        config.write_text(text[: len(text) // 2])
        write_model(tmp_path, "other")
        await server.lifecycle.poll_once()
        assert await states(server) == {
            "copied": "UNAVAILABLE",
            "good:1": "READY",
            "other:1": "READY",
        }

        config.write_text(text)
        await server.lifecycle.poll_once()
        (folder / "1").mkdir()
        await server.lifecycle.poll_once()
        assert (await states(server))["copied:1"] == "READY"


async def test_a_configuration_broken_for_a_moment_keeps_the_old_version(tmp_path: Path) -> None:
    """The old version serves on, and the repaired file is loaded."""
    write_model(tmp_path, "m")
    async with serve(tmp_path, model_control_mode="poll") as server:
        old = server.model("m")
        write_model(tmp_path, "m", text="backend: 'iden")
        await server.lifecycle.poll_once()
        assert server.model("m") is old
        write_model(tmp_path, "m", width=3)
        await server.lifecycle.poll_once()
        assert server.model("m").input_specs["X"][1] == (3,)
