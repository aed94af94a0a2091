"""Binary tensor data behind gateways that let no header of the protocol through. Pure.

SageMaker and Vertex AI put the length of the JSON part into the content type:
`application/vnd.<platform>.binary+json;json-header-size=<bytes>`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

_HEADER_LENGTH = b"inference-header-content-length"


class BinaryMime:
    """Translates between a platform's content type and the protocol's header.

    Args:
        mime: the content type without its parameter.
    """

    def __init__(self, mime: str) -> None:
        self._mime = mime.encode()
        self._pattern = re.compile(
            rb"\s*%b\s*;\s*json-header-size\s*=\s*(\d+)\s*" % re.escape(self._mime)
        )

    def to_protocol(self, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
        """A request's headers with Inference-Header-Content-Length if the content type has it."""
        result = [field for field in headers if field[0].lower() != _HEADER_LENGTH]
        for name, value in result:
            if name.lower() == b"content-type":
                match = self._pattern.fullmatch(value)
                if match is not None:
                    return [*result, (_HEADER_LENGTH, match[1])]
        return result

    def to_platform(self, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
        """A reply's headers with the platform's content type in place of the protocol's header."""
        fields = list(headers)
        length = next((value for name, value in fields if name.lower() == _HEADER_LENGTH), None)
        if length is None:
            return fields
        mime = (b"content-type", self._mime + b";json-header-size=" + length)
        dropped = (_HEADER_LENGTH, b"content-type")
        return [mime, *(field for field in fields if field[0].lower() not in dropped)]
