"""The table of status codes."""

from __future__ import annotations

import pytest

from npuserve.errors import StatusCode
from npuserve.protocol.status import grpc_status, http_status


@pytest.mark.parametrize(
    ("code", "http", "grpc"),
    [
        (StatusCode.UNKNOWN, 400, 2),
        (StatusCode.INTERNAL, 500, 13),
        (StatusCode.NOT_FOUND, 404, 5),
        (StatusCode.INVALID_ARGUMENT, 400, 3),
        (StatusCode.UNAVAILABLE, 503, 14),
        (StatusCode.UNSUPPORTED, 501, 12),
        (StatusCode.ALREADY_EXISTS, 400, 6),
        (StatusCode.CANCELLED, 400, 1),
    ],
)
def test_every_code_has_tritons_numbers(code: StatusCode, http: int, grpc: int) -> None:
    """HTTP status and gRPC code are those of Triton's front ends."""
    assert http_status(code) == http
    assert grpc_status(code) == grpc


def test_no_code_is_missing() -> None:
    """Each member of StatusCode has a place in the table."""
    for code in StatusCode:
        assert http_status(code) >= 400
