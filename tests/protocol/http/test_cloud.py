"""The endpoints of SageMaker and Vertex AI, over real cores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.errors import InvalidArgumentError
from npuserve.options import ServerOptions
from npuserve.protocol.http import sagemaker_models
from npuserve.protocol.http.cloud_mime import BinaryMime
from npuserve.protocol.http.sagemaker import SageMakerServer
from npuserve.protocol.http.vertex import VertexAiServer
from npuserve.protocol.shared_memory import SharedMemoryRegistry
from npuserve.server.core import InferenceServer
from tests.protocol.http.fakes import Client, get, infer_binary, infer_json, post

CONFIG = """
backend: "identity"
max_batch_size: 0
input { name: "INPUT0" data_type: TYPE_FP32 dims: -1 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: -1 }
"""
ROUTES = {"AIP_HEALTH_ROUTE": "/health", "AIP_PREDICT_ROUTE": "/predict"}


def add_model(folder: Path, config: str = CONFIG) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)


@asynccontextmanager
async def serving(
    front: Any, repository: Path, environ: Mapping[str, str], **settings: Any
) -> AsyncIterator[tuple[Client, Any]]:
    """A connection to the front end of a core with this repository."""
    await asyncio.to_thread(repository.mkdir, exist_ok=True)
    options = ServerOptions(
        **{
            "model_repository": (str(repository),),
            "http_address": "127.0.0.1",
            "sagemaker_port": 0,
            "vertex_ai_port": 0,
            **settings,
        }
    )
    async with InferenceServer(options) as server:
        service = front(server, options, SharedMemoryRegistry(), environ)
        await service.start()
        client = await Client.connect(service.port)
        try:
            yield client, service
        finally:
            await client.close()
            await service.stop(1)


@given(st.integers(0, 2**63), st.lists(st.tuples(st.binary(), st.binary())))
def test_the_length_moves_between_type_and_header(
    length: int, others: list[tuple[bytes, bytes]]
) -> None:
    """There and back the content type is the same; other headers are kept."""
    mime = BinaryMime("application/vnd.x+json")
    others = [field for field in others if field[0].lower() != b"content-type"]
    sent = [*others, (b"Content-Type", b"application/vnd.x+json;json-header-size=%d" % length)]
    inside = mime.to_protocol(sent)
    assert (b"inference-header-content-length", b"%d" % length) in inside
    back = mime.to_platform(inside)
    assert back[0] == (b"content-type", sent[-1][1])


def test_a_plain_content_type_changes_nothing() -> None:
    """JSON goes through as it is."""
    mime = BinaryMime("application/vnd.x+json")
    fields = [(b"content-type", b"application/json")]
    assert mime.to_protocol(fields) == mime.to_platform(fields) == fields


async def test_vertex_routes(tmp_path: Path) -> None:
    """Health, predict with JSON and binary bodies, and redirects."""
    add_model(tmp_path / "only")
    async with serving(VertexAiServer, tmp_path, ROUTES) as (client, _):
        assert (await client.ask(get("/health"))).status == 200
        assert (await client.ask(post("/health"))).status == 405
        assert (await client.ask(get("/predict"))).status == 405
        assert (await client.ask(get("/v2"))).status == 400
        reply = await client.ask(post("/predict", infer_json([1.5])))
        assert reply.json()["outputs"][0]["data"] == [1.5]
        head, blob = infer_binary(b"\0\0\0\0" * 3)
        mime = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
        reply = await client.ask(post("/predict", head + blob, f"Content-Type: {mime}{len(head)}"))
        assert reply.headers["content-type"].startswith(mime)
        assert reply.body.endswith(blob)


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("v2/models/only/infer", 200),
        ("v2/models/only", 200),
        ("v2/models/stats", 200),
        ("v2/health/live", 200),
        ("metrics", 200),
        ("v2/models/none/infer", 404),
        ("v2/repository/models/only/unload", 403),
        ("v2/systemsharedmemory/region/r/register", 403),
        ("elsewhere", 400),
    ],
)
async def test_vertex_redirects(tmp_path: Path, target: str, status: int) -> None:
    """Models and metadata are reachable, management is not."""
    add_model(tmp_path / "only")
    async with serving(VertexAiServer, tmp_path, ROUTES) as (client, _):
        header = f"X-Vertex-Ai-Triton-Redirect: {target}"
        assert (await client.ask(post("/predict", infer_json([1]), header))).status == status


@pytest.mark.parametrize(
    ("environ", "settings", "text"),
    [
        ({}, {}, "AIP_HEALTH_ROUTE is not defined for Vertex AI endpoint"),
        ({"AIP_HEALTH_ROUTE": "/h"}, {}, "AIP_PREDICT_ROUTE is not defined"),
        (ROUTES, {}, "--vertex-ai-default-model"),
        (ROUTES, {"vertex_ai_default_model": "none"}, "default model 'none'"),
    ],
)
async def test_vertex_refuses_to_start(
    tmp_path: Path, environ: dict[str, str], settings: dict[str, Any], text: str
) -> None:
    """Without routes, or when it is not clear what to run."""
    add_model(tmp_path / "one")
    add_model(tmp_path / "two")
    with pytest.raises(InvalidArgumentError, match=text):
        async with serving(VertexAiServer, tmp_path, environ, **settings):
            pass


async def test_sagemaker_single_model(tmp_path: Path) -> None:
    """Ping and invocations; anything else is 400."""
    add_model(tmp_path / "only")
    async with serving(SageMakerServer, tmp_path, {}) as (client, _):
        assert (await client.ask(get("/ping"))).status == 200
        reply = await client.ask(post("/invocations", infer_json([2])))
        assert reply.json()["model_name"] == "only"
        head, blob = infer_binary(b"\0\0\0\0")
        mime = "application/vnd.sagemaker-triton.binary+json;json-header-size="
        reply = await client.ask(
            post("/invocations", head + blob, f"Content-Type: {mime}{len(head)}")
        )
        assert reply.headers["content-type"].startswith(mime)
        assert (await client.ask(get("/v2"))).status == 400
        assert (await client.ask(get("/models"))).json() == {"models": []}


async def test_sagemaker_generates_when_told(tmp_path: Path) -> None:
    """The environment chooses the kind of inference; unknown kinds stop the start."""
    add_model(tmp_path / "only")
    environ = {"SAGEMAKER_TRITON_INFERENCE_TYPE": "generate"}
    async with serving(SageMakerServer, tmp_path, environ) as (client, _):
        reply = await client.ask(post("/invocations", b'{"INPUT0":[1,2]}'))
        assert reply.json()["OUTPUT0"] == [1.0, 2.0]
    with pytest.raises(InvalidArgumentError, match="SAGEMAKER_TRITON_INFERENCE_TYPE"):
        async with serving(SageMakerServer, tmp_path, {"SAGEMAKER_TRITON_INFERENCE_TYPE": "guess"}):
            pass


async def test_sagemaker_many_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load, list, invoke and unload by SageMaker's names."""
    add_model(tmp_path / "opt/ml/models/h1/model/inner", CONFIG + 'name: "inner"\n')
    monkeypatch.setattr(sagemaker_models, "ROOT", str(tmp_path))
    settings = {"model_control_mode": "explicit"}
    environ = {"SAGEMAKER_TRITON_PING_MODE": "live"}
    async with serving(SageMakerServer, tmp_path / "empty", environ, **settings) as (client, _):
        url = "/opt/ml/models/h1/model"
        body = json.dumps({"model_name": "hash1", "url": url}).encode()
        assert (await client.ask(post("/models", body))).status == 200
        assert (await client.ask(post("/models", body))).status == 409
        entry = {"modelName": "hash1", "modelUrl": url}
        assert (await client.ask(get("/models"))).json() == {"models": [entry]}
        assert (await client.ask(get("/models/hash1"))).json() == entry
        reply = await client.ask(post("/models/hash1/invoke", infer_json([3])))
        assert reply.json()["outputs"][0]["data"] == [3.0]
        assert (await client.ask(get("/models/hash1", method="DELETE"))).status == 200
        for request in (
            get("/models/hash1"),
            get("/models/hash1", method="DELETE"),
            post("/models/hash1/invoke", infer_json([3])),
        ):
            assert (await client.ask(request)).status == 404
        assert (await client.ask(post("/models", body))).status == 200


@pytest.mark.parametrize(
    "url", ["/dev/shm", "/proc/self", "/opt/ml/models/h/other", "/opt/ml/models/../x/model", ""]
)
async def test_sagemaker_loads_from_its_own_folder_only(tmp_path: Path, url: str) -> None:
    """Any other url is 400."""
    settings = {"model_control_mode": "explicit"}
    async with serving(SageMakerServer, tmp_path, {}, **settings) as (client, _):
        body = json.dumps({"model_name": "m", "url": url}).encode()
        assert (await client.ask(post("/models", body))).status == 400
