"""What the head of an infer request says: the model of its path, and its headers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class InferTarget(NamedTuple):
    """Model and version ("" for the newest) that a path names."""

    model: str
    version: str


class InferHeaders:
    """The headers of an infer request that mean something; all of them for the rest.

    Attributes:
        fields: all, as sent.
        content_length: declared length of the body; 0 for none and for chunks.
        json_length: Inference-Header-Content-Length as sent, None without one.
    """

    __slots__ = (
        "accept_encoding", "content_encoding", "content_length", "expects_continue", "fields",
        "json_length",
    )  # fmt: skip

    def __init__(self, fields: Sequence[tuple[bytes, bytes]]) -> None:
        self.fields = fields
        self.content_length = 0
        self.json_length: bytes | None = None
        self.content_encoding: bytes | None = None
        self.accept_encoding: bytes | None = None
        self.expects_continue = False
        for name, value in fields:
            # Of a header that comes twice the first counts, as in Triton.
            # By length first, which tells most headers apart without a lower-case copy.
            match len(name):
                case 14 if name.lower() == b"content-length":
                    self.content_length = int(value)  # the parser accepted it
                case 31 if (
                    self.json_length is None and name.lower() == b"inference-header-content-length"
                ):
                    self.json_length = value
                case 15 if self.accept_encoding is None and name.lower() == b"accept-encoding":
                    self.accept_encoding = value
                case 16 if self.content_encoding is None and name.lower() == b"content-encoding":
                    self.content_encoding = value
                case 6 if name.lower() == b"expect":
                    self.expects_continue = value.lower() == b"100-continue"
