"""Models of the identity backend for tests of a whole server without front ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from npuserve.options import ServerOptions
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.core import InferenceServer
from npuserve.tensor import Tensor

CONFIG = """
backend: "identity"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""


def write_model(root: Path, name: str, more: str = "") -> Path:
    """An identity model of FP32[2] from X to Y; returns its directory."""
    directory = root / name
    (directory / "1").mkdir(parents=True, exist_ok=True)
    (directory / "config.pbtxt").write_text(CONFIG + more)
    return directory


def serve(root: Path, **options: Any) -> InferenceServer:
    """A server over the repository `root`, all models loaded, explicit control."""
    options = {"model_control_mode": "explicit", "load_model": ("*",), **options}
    return InferenceServer(ServerOptions(model_repository=(str(root),), **options))


async def infer(server: InferenceServer, model: str, rows: int = 1, **request: Any) -> Any:
    """One request of ones; returns its response, whatever it says."""
    answer: asyncio.Future[InferenceResponse | None] = asyncio.get_running_loop().create_future()

    def receive(response: InferenceResponse | None, final: bool) -> None:
        assert final
        answer.set_result(response)

    tensor = Tensor.from_numpy("X", np.ones((rows, 2), np.float32))
    server.infer(InferenceRequest(model, {"X": tensor}, receive, **request))
    return await answer
