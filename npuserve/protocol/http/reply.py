"""What an endpoint answers, before anybody writes it to a connection. Pure."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from npuserve.protocol.http.json_text import dump_json
from npuserve.protocol.status import http_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npuserve.errors import NpuserveError
    from npuserve.tensor import Buffer

JSON = b"application/json"
BINARY = b"application/octet-stream"

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


class Reply:
    """Status, headers and the parts of the body, which follow each other on the wire.

    Attributes:
        parts: views are sent as they are; they must not change until the socket took them.
        headers: besides content type and length; names as on the wire.

    Args:
        known_head: what `head` gives for a connection that is kept, if it is known.
    """

    __slots__ = ("_known_head", "content_type", "headers", "parts", "status")

    def __init__(
        self,
        status: int,
        parts: Sequence[Buffer] = (),
        content_type: bytes = JSON,
        headers: Sequence[tuple[bytes, bytes]] = (),
        *,
        known_head: bytes = b"",
    ) -> None:
        self._known_head = known_head
        self.status = status
        self.parts = parts
        self.content_type = content_type
        self.headers = headers

    @classmethod
    def from_error(cls, error: NpuserveError, *headers: tuple[bytes, bytes]) -> Reply:
        """The reply that tells a client of an error."""
        return cls(http_status(error.code), [error_body(str(error))], JSON, headers)

    def head(self, keep_alive: bool) -> bytes:
        """Status line and headers as bytes, the empty line included."""
        if self._known_head and keep_alive:
            return self._known_head
        length = sum(map(len, self.parts))
        lines = [
            _STATUS_LINES[self.status],
            b"Content-Type: %b\r\nContent-Length: %d\r\n" % (self.content_type, length),
        ]
        lines += [b"%b: %b\r\n" % header for header in self.headers]
        lines.append(b"\r\n" if keep_alive else b"Connection: close\r\n\r\n")
        return b"".join(lines)


def error_body(text: str) -> bytes:
    """The one form an error has over HTTP."""
    return dump_json({"error": text})
