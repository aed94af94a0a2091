"""`--model-namespacing`: models of one name in several repositories."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from npuserve.errors import InternalError, InvalidArgumentError
from npuserve.options import ServerOptions
from npuserve.server.core import InferenceServer
from tests.server.lifecycle_driver import ENSEMBLE, infer, states, write_model

if TYPE_CHECKING:
    from pathlib import Path


def serve(*repositories: Path, namespacing: bool = True) -> InferenceServer:
    return InferenceServer(
        ServerOptions(
            model_repository=tuple(str(path) for path in repositories),
            model_namespacing=namespacing,
            model_control_mode="explicit",
            load_model=("*",),
        )
    )


async def test_both_models_are_served_by_their_identifiers(tmp_path: Path) -> None:
    """The repository says which one is meant; a name in one repository needs none."""
    first, second = tmp_path / "a", tmp_path / "b"
    write_model(first, "m", width=2)
    write_model(second, "m", width=3)
    write_model(second, "only", width=4)
    async with serve(first, second) as server:
        for name, width in ((f"{first}::m", 2), (f"{second}::m", 3), ("only", 4)):
            response = await infer(server, name, width=width)
            assert response.outputs[0].shape == (1, width)
        assert server.model(f"{first}::m").namespace == str(first)
        assert server.ready()
        assert await states(server) == {
            f"{first}::m:1": "READY",
            f"{second}::m:1": "READY",
            "only:1": "READY",
        }


async def test_a_bare_ambiguous_name_is_refused_with_the_identifiers(tmp_path: Path) -> None:
    """For inference and for loading."""
    first, second = tmp_path / "a", tmp_path / "b"
    write_model(first, "m")
    write_model(second, "m")
    text = "There are 2 identifiers of model 'm' in global map"
    async with serve(first, second) as server:
        with pytest.raises(InvalidArgumentError, match=text):
            await infer(server, "m")
        with pytest.raises(InternalError, match=text):
            await server.load_model("m")
        await server.load_model(f"{first}::m")


async def test_an_ensemble_means_the_member_of_its_own_repository(tmp_path: Path) -> None:
    """Two teams bring an ensemble each, with a member of the same name."""
    repositories = [tmp_path / "a", tmp_path / "b"]
    for width, repository in enumerate(repositories, start=2):
        write_model(repository, "member", width=width)
        text = ENSEMBLE % ("member", "X", "Y")
        write_model(repository, "whole", text.replace("dims: [ 2 ]", f"dims: [ {width} ]"))
    async with serve(*repositories) as server:
        for width, repository in enumerate(repositories, start=2):
            response = await infer(server, f"{repository}::whole", "A", width)
            assert response.outputs[0].shape == (1, width)
            step = server.model(f"{repository}::whole").config.ensemble_scheduling.step[0]
            assert step.model_namespace == str(repository)


async def test_without_namespaces_neither_is_served(tmp_path: Path) -> None:
    """The index says why."""
    first, second = tmp_path / "a", tmp_path / "b"
    write_model(first, "m")
    write_model(second, "m")
    async with serve(first, second, namespacing=False) as server:
        assert await states(server) == {"m": "UNAVAILABLE"}
        assert not server.ready()
