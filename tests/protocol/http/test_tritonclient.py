"""The stock client libraries against the front end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
import tritonclient.http.aio as aioclient
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from npuserve.tensor import Tensor
from tests.protocol.http.conftest import Running, Start
from tests.protocol.http.fakes import FakeModel

ARRAYS: dict[str, NDArray[Any]] = {
    "FP32": np.array([[1.5, np.nan, np.inf]], np.float32),
    "FP16": np.array([[1.5, -2.0]], np.float16),
    "INT64": np.array([[-(2**63), 2**63 - 1]], np.int64),
    "UINT64": np.array([[2**64 - 1]], np.uint64),
    "BOOL": np.array([[True, False]]),
    "BYTES": np.array([["", "héllo", "中文"]], np.object_),
}


def model(datatype: str = "FP32") -> FakeModel:
    return FakeModel(inputs={"INPUT0": (datatype, [-1])}, max_batch_size=8)


async def call(running: Running, function: Callable[[Any], Any], **options: Any) -> Any:
    """Run the blocking client in a thread."""

    def run() -> Any:
        with httpclient.InferenceServerClient(
            f"127.0.0.1:{running.http.port}", **options
        ) as client:
            return function(client)

    return await asyncio.to_thread(run)


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("datatype", ARRAYS)
async def test_arrays_come_back(start: Start, datatype: str, binary: bool) -> None:
    """Every kind of datatype, in both forms."""
    if datatype == "FP16" and not binary:
        pytest.skip("JSON has no FP16")
    array = ARRAYS[datatype]
    running = await start(model(datatype))

    def infer(client: httpclient.InferenceServerClient) -> Any:
        tensor = httpclient.InferInput("INPUT0", list(array.shape), datatype)
        tensor.set_data_from_numpy(array, binary_data=binary)
        output = httpclient.InferRequestedOutput("OUTPUT0", binary_data=binary)
        return client.infer("echo", [tensor], outputs=[output], request_id="r").as_numpy("OUTPUT0")

    result = await call(running, infer)
    if datatype == "BYTES":
        result = np.array(
            [[e if isinstance(e, str) else e.decode() for e in result[0]]], np.object_
        )
    np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_compression(start: Start, algorithm: str) -> None:
    """The client's own options."""
    array = np.arange(1000, dtype=np.float32).reshape(1, -1)
    running = await start(model())

    def infer(client: httpclient.InferenceServerClient) -> Any:
        tensor = httpclient.InferInput("INPUT0", list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        return client.infer(
            "echo",
            [tensor],
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        ).as_numpy("OUTPUT0")

    np.testing.assert_array_equal(await call(running, infer), array)


async def test_classification(start: Start) -> None:
    """With labels, per batch element."""
    classifier = model()
    classifier._labels = ["cat", "dog"]
    running = await start(classifier)

    def infer(client: httpclient.InferenceServerClient) -> Any:
        tensor = httpclient.InferInput("INPUT0", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.array([[1, 3]], np.float32))
        output = httpclient.InferRequestedOutput("OUTPUT0", class_count=1)
        return client.infer("echo", [tensor], outputs=[output]).as_numpy("OUTPUT0")

    assert (await call(running, infer)).tolist() == [[b"3.000000:1:dog"]]


async def test_errors_and_control(start: Start) -> None:
    """Health, metadata, settings and an error text."""
    running = await start(model())

    def use(client: httpclient.InferenceServerClient) -> None:
        assert client.is_server_live()
        assert client.is_model_ready("echo")
        assert not client.is_model_ready("none")
        assert client.get_model_metadata("echo")["inputs"][0]["shape"] == [-1, -1]
        assert client.get_model_config("echo")["name"] == "echo"
        assert client.get_model_repository_index()[1]["state"] == "READY"
        client.load_model("echo", config="{}", files={"file:1/model.py": b"x"})
        client.unload_model("echo", unload_dependents=True)
        assert client.get_inference_statistics()["model_stats"][0]["name"] == "echo"
        assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
        assert client.update_trace_settings(settings={"trace_rate": "7"})["trace_rate"] == "7"
        tensor = httpclient.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
        with pytest.raises(InferenceServerException, match="'none' is not found"):
            client.infer("none", [tensor])

    await call(running, use)
    assert running.server.calls == [
        ("load", "echo", "{}", {"1/model.py": b"x"}),
        ("unload", "echo", True),
    ]


async def test_many_clients_at_once(start: Start) -> None:
    """The aio client's connections are independent."""
    running = await start(model())
    async with aioclient.InferenceServerClient(f"127.0.0.1:{running.http.port}") as client:

        async def one(value: int) -> float:
            tensor = aioclient.InferInput("INPUT0", [1, 4], "FP32")
            tensor.set_data_from_numpy(np.full((1, 4), value, np.float32))
            result = await client.infer("echo", [tensor])
            return float(result.as_numpy("OUTPUT0")[0, 0])

        assert await asyncio.gather(*map(one, range(50))) == list(range(50))


async def test_tensor_of_a_request_is_what_was_sent(start: Start) -> None:
    """Names, datatype, shape and id reach the core unchanged."""
    running = await start(model())

    def infer(client: httpclient.InferenceServerClient) -> None:
        tensor = httpclient.InferInput("INPUT0", [2, 3], "FP32")
        tensor.set_data_from_numpy(np.ones((2, 3), np.float32))
        client.infer("echo", [tensor], request_id="abc", sequence_id=5, sequence_start=True)

    await call(running, infer)
    (request,) = running.server.requests
    (tensor,) = request.inputs.values()
    assert isinstance(tensor, Tensor)
    assert (tensor.datatype, list(tensor.shape)) == ("FP32", [2, 3])
    assert (request.id, request.correlation_id, request.flags) == ("abc", 5, 1)
