"""The one table from npuserve's status codes to the two wires.

Source: `HttpCodeFromError` and `CodeToStatus` of Triton's front ends. gRPC codes are plain
integers here, so that nothing but `protocol/grpc` imports grpc.
"""

from __future__ import annotations

from typing import NamedTuple

from npuserve.errors import StatusCode


class WireStatus(NamedTuple):
    """What a status code is called on each wire."""

    http: int
    grpc: int


WIRE_STATUS: dict[StatusCode, WireStatus] = {
    StatusCode.UNKNOWN: WireStatus(400, 2),
    StatusCode.INTERNAL: WireStatus(500, 13),
    StatusCode.NOT_FOUND: WireStatus(404, 5),
    StatusCode.INVALID_ARGUMENT: WireStatus(400, 3),
    StatusCode.UNAVAILABLE: WireStatus(503, 14),
    StatusCode.UNSUPPORTED: WireStatus(501, 12),
    StatusCode.ALREADY_EXISTS: WireStatus(400, 6),
    StatusCode.CANCELLED: WireStatus(400, 1),
}


def http_status(code: StatusCode) -> int:
    """HTTP status of an error with this code."""
    return WIRE_STATUS[code].http


def grpc_status(code: StatusCode) -> int:
    """Number of the gRPC status of an error with this code."""
    return WIRE_STATUS[code].grpc
