"""Infer requests over a socket, on both paths."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest

from npuserve.protocol.http import infer
from npuserve.tensor import Tensor, pack_strings
from tests.protocol.http.conftest import Start
from tests.protocol.http.fakes import (
    FakeModel,
    get,
    infer_binary,
    infer_json,
    post,
    post_binary,
)

PATH = "/v2/models/echo/infer"


async def test_json_in_and_out(start: Start) -> None:
    """The reply has the members of the protocol, in its order."""
    client = await (await start()).connect()
    reply = await client.ask(post(PATH, infer_json([1.5, 2], id="r1")))
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert list(reply.json()) == ["id", "model_name", "model_version", "outputs"]
    assert reply.json()["outputs"] == [
        {"name": "OUTPUT0", "datatype": "FP32", "shape": [2], "data": [1.5, 2.0]}
    ]


@pytest.mark.parametrize("size", [4, 40_000, 5_000_000])
async def test_binary_in_and_out(start: Start, size: int) -> None:
    """Small and large tensors come back bit by bit; the next request works."""
    client = await (await start()).connect()
    blob = struct.pack("<I", 7) * (size // 4)
    for _ in range(2):
        reply = await client.ask(post_binary(*infer_binary(blob)))
        assert reply.status == 200
        assert reply.headers["content-type"] == "application/octet-stream"
        length = int(reply.headers["inference-header-content-length"])
        assert reply.body[length:] == blob


async def test_large_json_both_ways(start: Start) -> None:
    """Documents that are parsed and written in a thread."""
    client = await (await start()).connect()
    values = [float(number) for number in range(100_000)]
    reply = await client.ask(post(PATH, infer_json(values, id="big")))
    assert reply.status == 200
    assert reply.json()["id"] == "big"
    assert reply.json()["outputs"][0]["data"] == values


@pytest.mark.parametrize("binary", [False, True])
async def test_many_strings_do_not_hold_up_the_loop(
    start: Start, monkeypatch: pytest.MonkeyPatch, binary: bool
) -> None:
    """A thread decodes or walks through them: probes are answered meanwhile."""
    loop, reached, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    owner, name = (Tensor, "scan_strings") if binary else (infer, "decode_infer")
    original = getattr(owner, name)

    def wait(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(reached.set)
        go_on.wait()
        return original(*arguments)

    monkeypatch.setattr(owner, name, wait)
    running = await start()
    client, probe = await running.connect(), await running.connect()
    texts = [str(number) for number in range(50_000)]
    blob = bytes(pack_strings(text.encode() for text in texts))
    if binary:
        await client.send(post_binary(*infer_binary(blob, "BYTES", [50_000])))
    else:
        await client.send(post(PATH, infer_json(texts, "BYTES")))
    await reached.wait()
    assert (await probe.ask(get("/v2/health/ready"))).status == 200
    go_on.set()
    reply = await client.reply()
    if binary:
        assert reply.body[int(reply.headers["inference-header-content-length"]) :] == blob
    else:
        assert reply.json()["outputs"][0]["data"] == texts


async def test_a_large_document_may_have_inputs_in_shared_memory(start: Start) -> None:
    """The thread that decodes it asks the loop for them."""
    inputs = {"INPUT0": ("BYTES", [-1]), "INPUT1": ("FP32", [-1])}
    client = await (await start(FakeModel(inputs=inputs))).connect()
    memory = SharedMemory(create=True, size=8)
    try:
        assert memory.buf is not None
        memory.buf[:8] = struct.pack("<2f", 1.5, 2)
        register = json.dumps({"key": f"/{memory.name}", "byte_size": 8}).encode()
        await client.ask(post("/v2/systemsharedmemory/region/r/register", register))
        document = json.loads(infer_json(["text"] * 50_000, "BYTES"))
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
        entry = {"name": "INPUT1", "datatype": "FP32", "shape": [2], "parameters": place}
        document["inputs"].append(entry)
        reply = await client.ask(post(PATH, json.dumps(document).encode()))
        assert reply.json()["outputs"][1]["data"] == [1.5, 2]
    finally:
        memory.close()
        memory.unlink()


async def test_a_large_document_of_wrong_values_is_refused(start: Start) -> None:
    """By the thread, with the same text."""
    client = await (await start()).connect()
    reply = await client.ask(post(PATH, infer_json(["text"] * 50_000, "INT32")))
    assert reply.status == 400
    assert "non-integer as integer for 'INPUT0'" in reply.error
