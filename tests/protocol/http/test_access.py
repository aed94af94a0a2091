"""Restricted APIs and forwarded headers."""

from __future__ import annotations

import pytest

from npuserve.protocol.http.access import HeaderForwarding
from tests.protocol.http.conftest import Start
from tests.protocol.http.fakes import get, infer_json, post

PATH = "/v2/models/echo/infer"


async def test_a_restricted_group_needs_its_header(start: Start) -> None:
    """Name in any case, value exact; other groups stay open."""
    running = await start(http_restricted_api={"inference": ("Key", "s3")})
    client = await running.connect()
    for headers in ((), ("key: wrong",), ("other: s3",)):
        reply = await client.ask(post(PATH, infer_json([1]), *headers))
        assert reply.status == 403
        assert reply.error == "This API is restricted, expecting header 'Key'"
    assert (await client.ask(post(PATH, infer_json([1]), "kEY: s3"))).status == 200
    assert (await client.ask(get("/v2"))).status == 200
    generate = "/v2/models/echo/generate"
    assert (await client.ask(post(generate, b"{}"))).status == 403


ENDPOINTS = {
    "health": get("/v2/health/live"),
    "metadata": get("/v2/models/echo"),
    "model-config": get("/v2/models/echo/config"),
    "statistics": get("/v2/models/stats"),
    "model-repository": post("/v2/repository/index"),
    "shared-memory": get("/v2/systemsharedmemory/status"),
    "trace": get("/v2/trace/setting"),
    "logging": get("/v2/logging"),
}


async def test_every_group_can_be_restricted(start: Start) -> None:
    """Its endpoints answer 403 without the header."""
    running = await start(http_restricted_api={group: (group, "s3") for group in ENDPOINTS})
    client = await running.connect()
    for group, request in ENDPOINTS.items():
        reply = await client.ask(request)
        assert reply.status == 403
        assert reply.error == f"This API is restricted, expecting header '{group}'"


async def test_matching_headers_become_parameters(start: Start) -> None:
    """Under the name as sent; the pattern matches anywhere in the name."""
    running = await start(http_header_forward_pattern="x-fwd")
    client = await running.connect()
    body = infer_json([1], parameters={"p": 1})
    assert (await client.ask(post(PATH, body, "My-X-Fwd-A: 7", "other: 1"))).status == 200
    parameters = running.server.requests[0].parameters or {}
    assert {key.lower(): value for key, value in parameters.items()} == {"p": 1, "my-x-fwd-a": "7"}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("my_h|a", ["MY_H", "my_h", "A"]),
        ("(?-i)MY_H|a", ["MY_H"]),
        ("(?s-i)my_h", ["my_h"]),
    ],
)
def test_a_pattern_ignores_case_unless_it_says_otherwise(pattern: str, names: list[str]) -> None:
    """In the form that RE2 takes, for all alternatives."""
    forwarding = HeaderForwarding(pattern)
    fields = [(name, b"") for name in (b"MY_H", b"my_h", b"A", b"B")]
    assert list(forwarding.parameters(fields)) == names


def test_reserved_names_are_not_forwarded() -> None:
    """A header cannot start a sequence."""
    forwarding = HeaderForwarding(".*")
    fields = [(b"sequence_id", b"1"), (b"triton_x", b"1"), (b"ok", b"\xe9")]
    assert forwarding.parameters(fields) == {"ok": "é"}
