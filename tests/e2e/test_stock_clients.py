"""tritonclient in its four forms against a whole server: every datatype, both ways."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from npuserve.testing.serve import RunningServer, serve

VALUES: dict[str, NDArray[Any]] = {
    "BOOL": np.array([[True, False, True]]),
    "UINT8": np.array([[0, 1, 255]], np.uint8),
    "UINT16": np.array([[0, 1, 65535]], np.uint16),
    "UINT32": np.array([[0, 1, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 1, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, 0, 127]], np.int8),
    "INT16": np.array([[-(2**15), 0, 2**15 - 1]], np.int16),
    "INT32": np.array([[-(2**31), 0, 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), 0, 2**63 - 1]], np.int64),
    "FP16": np.array([[-1.5, 0, 65504]], np.float16),
    "FP32": np.array([[-1.5, np.inf, 3e38]], np.float32),
    "FP64": np.array([[-1.5, 0, 1e308]], np.float64),
    "BYTES": np.array([["文字".encode(), b"", b"\x00\xff"]], np.object_),
    "BF16": np.array([[-1.5, 0, 2]], np.float32),
}
CLIENTS = ["http", "http.aio", "grpc", "grpc.aio"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One identity model for each datatype."""
    repository = tmp_path_factory.mktemp("repository")
    for datatype in VALUES:
        add_identity(repository, datatype)
    with serve(repository) as running:
        yield running


def add_identity(repository: Path, datatype: str) -> None:
    """A model named after the datatype that answers its input."""
    configured = "STRING" if datatype == "BYTES" else datatype
    (repository / datatype / "1").mkdir(parents=True)
    (repository / datatype / "config.pbtxt").write_text(
        f"""
        backend: "identity" max_batch_size: 8
        input {{ name: "IN" data_type: TYPE_{configured} dims: -1 }}
        output {{ name: "OUT" data_type: TYPE_{configured} dims: -1 }}
        dynamic_batching {{ }}
        """
    )


async def echo(
    kind: str,
    server: RunningServer,
    model: str,
    array: NDArray[Any],
    datatype: str = "",
    **options: Any,
) -> Any:
    """The client's result object for one request; models are named after their datatype."""
    module = tritonclient.http if kind.startswith("http") else tritonclient.grpc
    url = server.http_url if kind.startswith("http") else server.grpc_url
    datatype = datatype or model
    if datatype == "BF16" and takes_ml_dtypes():
        array = array.astype(ml_dtypes.bfloat16)
    tensor = module.InferInput("IN", list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    if kind.endswith(".aio"):
        async with module.aio.InferenceServerClient(url) as client:
            return await client.infer(model, [tensor], **options)
    with module.InferenceServerClient(url) as client:
        return client.infer(model, [tensor], **options)


def takes_ml_dtypes() -> bool:
    """Whether this tritonclient wants BF16 as bfloat16 (since r26.06), not as float32."""
    major, minor = version("tritonclient").split(".")[:2]
    return (int(major), int(minor)) >= (2, 70)


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("datatype", VALUES)
async def test_every_datatype_comes_back(server: RunningServer, kind: str, datatype: str) -> None:
    """Bit for bit."""
    array = VALUES[datatype]
    result = await echo(kind, server, datatype, array)
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)


@pytest.mark.parametrize("kind", ["http", "http.aio"])
@pytest.mark.parametrize("datatype", sorted(set(VALUES) - {"BF16", "FP16"}))
async def test_json_tensors_come_back(server: RunningServer, kind: str, datatype: str) -> None:
    """With `binary_data` off on both ways; text must be UTF-8 then."""
    array = VALUES[datatype]
    if datatype == "BYTES":
        array = array[:, :2]
    elif datatype == "FP32":
        array = array[:, ::2]
    tensor = tritonclient.http.InferInput("IN", list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=False)
    output = tritonclient.http.InferRequestedOutput("OUT", binary_data=False)
    if kind == "http":
        with tritonclient.http.InferenceServerClient(server.http_url) as client:
            result = client.infer(datatype, [tensor], outputs=[output])
    else:
        async with tritonclient.http.aio.InferenceServerClient(server.http_url) as client:
            result = await client.infer(datatype, [tensor], outputs=[output])
    expected = array if datatype != "BYTES" else np.array([["文字", ""]], np.object_)
    np.testing.assert_array_equal(result.as_numpy("OUT"), expected)


@pytest.mark.parametrize("kind", CLIENTS)
async def test_the_request_id_comes_back(server: RunningServer, kind: str) -> None:
    """As it was sent."""
    result = await echo(kind, server, "FP32", VALUES["FP32"], request_id="r-17")
    response = result.get_response()
    assert (response["id"] if kind.startswith("http") else response.id) == "r-17"


@pytest.mark.parametrize("kind", CLIENTS)
async def test_an_unknown_model_is_an_error(server: RunningServer, kind: str) -> None:
    """With Triton's text, and the next request is served."""
    with pytest.raises(InferenceServerException, match="unknown model: 'FP32x'"):
        await echo(kind, server, "FP32x", VALUES["FP32"], datatype="FP32")
    await echo(kind, server, "FP32", VALUES["FP32"])
