"""Repositories that change while a server serves them, and what it says of them."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import numpy as np

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


def everything_below(folder: Path) -> list[Path]:
    """All files and folders."""
    return sorted(folder.rglob("*"))
