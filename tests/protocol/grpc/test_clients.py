"""Clients that people really use: tritonclient (threads and asyncio) and Node's grpc-js."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.protocol.grpc.conftest import Rig
from tests.protocol.grpc.fakes import response_of

ROOT = Path(__file__).parents[3]


def tensor(module: Any, values: list[float]) -> Any:
    """An FP32 input."""
    item = module.InferInput("INPUT0", [len(values)], "FP32")
    item.set_data_from_numpy(np.array(values, np.float32))
    return item


def _use_sync_client(address: str) -> list[float]:
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("echo")
        assert client.get_model_config("echo").config.name == "echo"
        assert client.get_inference_statistics("echo").model_stats[0].name == "echo"
        with pytest.raises(InferenceServerException, match="unknown model"):
            client.infer("nope", [tensor(triton, [1.0])])
        result = client.infer(
            "echo",
            [tensor(triton, [1.0, 2.0])],
            outputs=[triton.InferRequestedOutput("OUTPUT0")],
            compression_algorithm="gzip",
        )
        return list(result.as_numpy("OUTPUT0"))


async def test_tritonclient(rig: Rig) -> None:
    """The stock client's calls work unchanged."""
    assert await asyncio.to_thread(_use_sync_client, rig.address) == [1.0, 2.0]


async def test_tritonclient_deadline(rig: Rig) -> None:
    """The client's own time-out ends the call and the queued request."""
    async with triton_aio.InferenceServerClient(rig.address) as client:
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            await client.infer("hold", [tensor(triton_aio, [1.0])], client_timeout=0.2)
    await rig.core.cancelled.get()


async def test_tritonclient_stream(rig: Rig) -> None:
    """The stock client's stream reads decoupled responses and the final flag."""

    async def requests() -> Any:
        yield {
            "model_name": "stream",
            "inputs": [tensor(triton_aio, [3.0])],
            "request_id": "r",
            "enable_empty_final_response": True,
        }

    async with triton_aio.InferenceServerClient(rig.address) as client:
        results = client.stream_infer(requests())
        reading = asyncio.ensure_future(anext(results))
        held = await rig.core.held.get()
        held.deliver(response_of(held), False)
        first, error = await reading
        assert error is None
        assert list(first.as_numpy("OUTPUT0")) == [3.0]
        held.deliver(response_of(held), True)
        last, error = await anext(results)
        assert last.get_response().parameters["triton_final_response"].bool_param
        with pytest.raises(StopAsyncIteration):
            await anext(results)


def _has_modules(node: str) -> bool:
    wanted = "require.resolve('@grpc/grpc-js'); require.resolve('@grpc/proto-loader')"
    found = subprocess.run([node, "-e", wanted], cwd=Path(__file__).parent, capture_output=True)
    return found.returncode == 0


async def test_node(rig: Rig) -> None:
    """A Node client made from the .proto files is served: unary, large, errors, stream."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    script = Path(__file__).with_name("client.js")
    if not _has_modules(node):
        pytest.skip("npm install @grpc/grpc-js @grpc/proto-loader, and set NODE_PATH to it")
    process = await asyncio.create_subprocess_exec(
        node, str(script), str(ROOT), rig.address, stdout=-1, stderr=-1
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert json.loads(out) == {
        "live": True,
        "small": ["n1", [1, 2, 3, 4]],
        "large": 0,
        "error": [5, "Request for unknown model: '模型' is not found"],
        "stream": ["1", "2", "3"],
    }
