"""Infer requests over a socket, on both paths."""

from __future__ import annotations

import struct

import pytest

from tests.protocol.http.conftest import Start
from tests.protocol.http.fakes import infer_binary, infer_json, post, post_binary

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
