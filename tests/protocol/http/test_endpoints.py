"""Every endpoint but infer: health, metadata, statistics, repository, regions, settings."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.protocol.http.conftest import Start
from tests.protocol.http.fakes import FakeModel, get, post


@pytest.fixture
def fast_path() -> bool:
    """These endpoints have one path only."""
    return True


async def test_health(start: Start) -> None:
    """Empty bodies; not ready is 400, stopping is 503."""
    running = await start()
    client = await running.connect()
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/echo/ready"):
        reply = await client.ask(get(path))
        assert (reply.status, reply.body) == (200, b"")
    running.server.is_ready = False
    assert (await client.ask(get("/v2/health/ready"))).status == 400
    running.server.stopping = True
    for path in ("/v2/health/live", "/v2/health/ready"):
        reply = await client.ask(get(path))
        assert (reply.status, reply.body) == (503, b"Server exiting")
    reply = await client.ask(get("/v2/models/none/ready"))
    assert (reply.status, reply.error) == (400, "Model version not ready")


async def test_metadata(start: Start) -> None:
    """Server and model, with and without a version."""
    client = await (await start()).connect()
    assert (await client.ask(get("/v2"))).json()["name"] == "triton"
    for path in ("/v2/models/echo", "/v2/models/echo/versions/1", "/v2/models/%65cho?x=1"):
        reply = (await client.ask(get(path))).json()
        assert reply["inputs"] == [{"name": "INPUT0", "datatype": "FP32", "shape": [-1]}]
    unknown = await client.ask(get("/v2/models/none"))
    assert unknown.status == 404
    assert unknown.error == "Request for unknown model: 'none' is not found"


async def test_config_and_statistics(start: Start) -> None:
    """Triton's JSON of both."""
    running = await start(FakeModel(), FakeModel("other"))
    client = await running.connect()
    assert (await client.ask(get("/v2/models/echo/config"))).json()["name"] == "echo"
    model = running.server.model("echo")
    model.statistics.own.execution(2, 1, 2, 3)
    model.statistics.own.request_success(2, 10, 4, 1, 2, 3)
    (entry,) = (await client.ask(get("/v2/models/echo/stats"))).json()["model_stats"]
    assert entry["inference_count"] == 2
    assert entry["inference_stats"]["queue"] == {"count": 1, "ns": 4}
    assert entry["batch_stats"] == [
        {
            "batch_size": 2,
            "compute_input": {"count": 1, "ns": 1},
            "compute_infer": {"count": 1, "ns": 2},
            "compute_output": {"count": 1, "ns": 3},
        }
    ]
    everything = (await client.ask(get("/v2/models/stats"))).json()["model_stats"]
    assert [each["name"] for each in everything] == ["echo", "other"]


@pytest.mark.parametrize(
    "path",
    ["/", "/v2/", "/v2/models/", "/v2/models/echo/", "//v2", "/metrics", "/v2/models/a%2Fb",
     "/v2/models/echo/versions/-1/ready", "/v2/models/echo/versions/x", "/v2/models/echo/versions",
     "/v2/models/echo/versions/%2B1", "/v2/models/echo/versions/%D9%A1"],
)  # fmt: skip
async def test_unknown_paths(start: Start, path: str) -> None:
    """404 with a JSON body, never a redirect."""
    reply = await (await (await start()).connect()).ask(get(path))
    assert (reply.status, reply.error) == (404, "Not Found")


async def test_wrong_methods(start: Start) -> None:
    """405 with a JSON body; HEAD too, without one."""
    client = await (await start()).connect()
    paths = ("/v2", "/v2/health/live", "/v2/models/echo", "/v2/models/echo/infer", "/v2/logging")
    for path in paths:
        for method in ("PUT", "DELETE", "OPTIONS"):
            reply = await client.ask(get(path, method=method))
            assert (reply.status, reply.error) == (405, "Method Not Allowed")
            known = {"/v2/models/echo/infer": "POST", "/v2/logging": "GET, POST"}.get(path, "GET")
            assert reply.headers["allow"] == known
    await client.send(get("/v2/health/live", method="HEAD"))
    assert (await client.reply(head_only=True)).status == 405
    assert (await client.ask(get("/v2/health/live"))).status == 200


async def test_repository(start: Start) -> None:
    """Index, load with overrides and unload; bodies are optional."""
    running = await start()
    client = await running.connect()
    index = "/v2/repository/index"
    assert (await client.ask(post(index))).json() == [
        {"name": "never_loaded"},
        {"name": "echo", "version": "1", "state": "READY"},
    ]
    assert len((await client.ask(post(index, b'{"ready":true}'))).json()) == 1
    load = "/v2/repository/models/echo/load"
    assert (await client.ask(post(load))).status == 200
    files = base64.b64encode(b"\0\1").decode()
    parameters = {"config": "{}", "file:1/model.py": files}
    reply = await client.ask(post(load, json.dumps({"parameters": parameters}).encode()))
    assert (reply.status, reply.body) == (200, b"")
    unload = "/v2/repository/models/echo/unload"
    await client.ask(post(unload, b'{"parameters":{"unload_dependents":true}}'))
    await client.ask(post(unload, b'{"parameters":{"unload_dependents":"yes"}}'))
    assert running.server.calls == [
        ("load", "echo", None, None),
        ("load", "echo", "{}", {"1/model.py": b"\0\1"}),
        ("unload", "echo", True),
        ("unload", "echo", False),
    ]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        (
            "repository/index",
            {"ready": "yes"},
            400,
            "Unable to parse 'ready': attempt to access JSON non-boolean as boolean",
        ),
        ("repository/index", [], 400, "request body"),
        ("repository/models/m/load", {"parameters": {"x": "1"}}, 400, "load parameter 'x'"),
        ("repository/models/m/load", {"parameters": []}, 400, "'parameters': attempt to access"),
        ("repository/models/m/load", {"parameters": {"config": 1}}, 400, "non-string"),
        ("repository/models/m/load", {"parameters": {"file:a": "x"}}, 400, "base64"),
        ("repository/r/models/m/load", {}, 501, "'repository_name' specification"),
        (
            "systemsharedmemory/region/r/register",
            {"byte_size": 1},
            400,
            "'key': attempt to access non-existing object member 'key'",
        ),
        (
            "systemsharedmemory/region/r/register",
            {"key": "k", "byte_size": -1},
            400,
            "'byte_size': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        ("systemsharedmemory/region/r/register", {"key": "k", "byte_size": 0}, 400, "invalid args"),
        ("systemsharedmemory/region/r/register", {"key": 5, "byte_size": 1}, 400, "non-string"),
        ("systemsharedmemory/register", {"key": "k", "byte_size": 1}, 400, "'region name'"),
        ("cudasharedmemory/region/r/register", {}, 400, "raw_handle"),
        (
            "cudasharedmemory/region/r/register",
            {"raw_handle": {}, "device_id": 0, "byte_size": 1},
            400,
            "raw_handle.b64",
        ),
        ("trace/setting", {"trace_rate": 5}, 400, "trace_rate"),
        ("models/none/trace/setting", {}, 400, "Request for unknown model : none"),
        ("logging", {"log_info": "yes"}, 400, "log_info"),
        ("logging", {"log_file": "x"}, 501, "log file location can not be updated"),
        ("logging", {"log_file": 5}, 501, "log file location can not be updated"),
        ("logging", [], 400, "request body"),
        ("logging", {"log_format": "x"}, 400, "invalid argument for log_format, got: x"),
    ],
)
async def test_bad_bodies(start: Start, path: str, body: Any, status: int, text: str) -> None:
    """The message names the member."""
    client = await (await start()).connect()
    reply = await client.ask(post(f"/v2/{path}", json.dumps(body).encode()))
    assert reply.status == status
    assert text in reply.error


async def test_null_is_as_good_as_nothing(start: Start) -> None:
    """Some serialisers write what is not there as null."""
    client = await (await start()).connect()
    for path, body in (
        ("index", b'{"ready":null}'),
        ("models/echo/load", b'{"parameters":null}'),
        ("models/echo/unload", b'{"parameters":null}'),
        ("models/echo/unload", b'{"parameters":{"unload_dependents":null}}'),
    ):
        assert (await client.ask(post(f"/v2/repository/{path}", body))).status == 200


async def test_bodies_of_the_control_plane_have_a_limit(start: Start) -> None:
    """Too large a body is refused and the connection goes on."""
    client = await (await start(http_max_input_size=1000)).connect()
    reply = await client.ask(post("/v2/logging", b" " * 5000 + b"{}"))
    assert reply.status == 400
    assert "--http-max-input-size" in reply.error


@pytest.fixture
def shared_object() -> Iterator[str]:
    """Key of a shared-memory object of 16 bytes."""
    path = Path("/dev/shm", f"npuserve_test_{uuid.uuid4().hex}")
    path.write_bytes(bytes(16))
    yield f"/{path.name}"
    path.unlink()


async def test_system_shared_memory(start: Start, shared_object: str) -> None:
    """Registered regions are listed until they are unregistered."""
    client = await (await start()).connect()
    base = "/v2/systemsharedmemory"
    body = {"key": shared_object, "byte_size": 16}
    reply = await client.ask(post(f"{base}/region/r/register", json.dumps(body).encode()))
    assert reply.status == 200
    expected = [{"name": "r", "key": shared_object, "offset": 0, "byte_size": 16}]
    assert (await client.ask(get(f"{base}/status"))).json() == expected
    assert (await client.ask(get(f"{base}/region/r/status"))).json() == expected
    assert (await client.ask(get(f"{base}/region/x/status"))).status == 404
    assert (await client.ask(post(f"{base}/region/r/unregister"))).status == 200
    assert (await client.ask(get(f"{base}/status"))).json() == []
    assert (await client.ask(post(f"{base}/unregister"))).status == 200


async def test_tensors_in_shared_memory(start: Start, shared_object: str) -> None:
    """An input is read from a region and an output written to it; its entry has no data."""
    client = await (await start()).connect()
    body = {"key": shared_object, "byte_size": 16}
    await client.ask(post("/v2/systemsharedmemory/region/r/register", json.dumps(body).encode()))
    path = Path("/dev/shm", shared_object.lstrip("/"))
    await asyncio.to_thread(path.write_bytes, bytes(range(16)))
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    source = {"name": "INPUT0", "datatype": "FP32", "shape": [2], "parameters": region}
    target: dict[str, Any] = {
        "name": "OUTPUT0",
        "parameters": {**region, "shared_memory_offset": 8},
    }
    document = json.dumps({"inputs": [source], "outputs": [target]}).encode()
    reply = await client.ask(post("/v2/models/echo/infer", document))
    assert reply.json()["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [2]}]
    assert await asyncio.to_thread(path.read_bytes) == bytes(range(8)) * 2
    target["parameters"]["shared_memory_byte_size"] = 4
    document = json.dumps({"inputs": [source], "outputs": [target]}).encode()
    reply = await client.ask(post("/v2/models/echo/infer", document))
    assert reply.status == 500
    assert "(4 bytes) should be at least 8 bytes" in reply.error


async def test_cuda_shared_memory(start: Start) -> None:
    """There is none: an empty list, refused registrations."""
    client = await (await start()).connect()
    base = "/v2/cudasharedmemory"
    assert (await client.ask(get(f"{base}/status"))).json() == []
    handle = base64.b64encode(bytes(64)).decode()
    body = {"raw_handle": {"b64": handle}, "device_id": 0, "byte_size": 4}
    reply = await client.ask(post(f"{base}/region/r/register", json.dumps(body).encode()))
    assert (reply.status, "GPUs not supported" in reply.error) == (400, True)
    assert (await client.ask(post(f"{base}/unregister"))).status == 200


async def test_settings(start: Start) -> None:
    """A POST changes what it names and replies with all."""
    client = await (await start()).connect()
    reply = await client.ask(post("/v2/logging", b'{"log_info":false,"log_file":null}'))
    assert reply.json()["log_info"] is False
    assert (await client.ask(get("/v2/logging"))).json()["log_info"] is False
    reply = await client.ask(post("/v2/trace/setting", b'{"trace_rate":"5"}'))
    assert reply.json()["trace_rate"] == "5"
    assert (await client.ask(get("/v2/models/echo/trace/setting"))).json()["trace_rate"] == "5"
    assert (await client.ask(post("/v2/trace/setting"))).status == 400


async def test_openapi_describes_every_endpoint(start: Start) -> None:
    """All references resolve, path parameters are declared, operation ids are unique."""
    client = await (await start()).connect()
    document = (await client.ask(get("/openapi.json"))).json()
    schemas = document["components"]["schemas"]
    references = set(_references(document))
    assert {name.rsplit("/", 1)[1] for name in references} <= schemas.keys()
    infer = document["paths"]["/v2/models/{model}/versions/{version}/infer"]["post"]
    assert [each["name"] for each in infer["parameters"]] == ["model", "version"]
    assert "application/octet-stream" in infer["requestBody"]["content"]
    assert not infer["requestBody"]["required"]
    assert document["paths"]["/v2/logging"]["post"]["requestBody"]["required"]
    operations = [each for path in document["paths"].values() for each in path.values()]
    assert len({each["operationId"] for each in operations}) == len(operations)
    assert len(operations) == 42


def _references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [each for item in value for each in _references(item)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if "$ref" in value else []
    return own + [each for item in value.values() for each in _references(item)]
