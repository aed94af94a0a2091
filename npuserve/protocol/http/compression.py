"""Content-Encoding of infer requests and responses: identity, gzip and deflate (zlib). Pure."""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING

from npuserve.errors import InvalidArgumentError, UnsupportedError
from npuserve.protocol.inflate import TooLargeError, inflate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npuserve.tensor import Buffer

# zlib's window parameter: 15 bits for the zlib container, 16 more for gzip's.
_WINDOW = {"deflate": 15, "gzip": 31}
_EITHER = 47  # whichever container comes, as Triton reads both encodings
# As much of a weight as is a number counts.
_WEIGHT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)", re.ASCII | re.IGNORECASE)
_ENCODINGS = ("identity", "deflate", "gzip")


def check_encoding(encoding: str) -> None:
    """Refuse a request's Content-Encoding that is not one of the known three.

    Raises:
        UnsupportedError: anything else, lists and other spellings included.
    """
    if encoding not in _ENCODINGS:
        raise UnsupportedError("Unsupported compression type")


def decompress(data: Buffer, encoding: str, limit: int) -> Buffer:
    """The plain body of a compressed request.

    Raises:
        InvalidArgumentError: corrupt or cut off, or more than `limit` bytes.
    """
    try:
        return inflate(data, _EITHER, limit)
    except zlib.error as error:
        # Differs from Triton: it takes garbage for an empty body.
        raise InvalidArgumentError(f"failed to decompress {encoding} request: {error}") from error
    except TooLargeError as error:
        raise InvalidArgumentError(
            f"Decompressed data size exceeds the maximum allowed value of {limit} bytes. "
            "Use --http-max-input-size to increase the limit."
        ) from error


def compress(parts: Iterable[Buffer], encoding: str) -> list[Buffer]:
    """The parts of a body as one compressed stream."""
    stream = zlib.compressobj(wbits=_WINDOW[encoding])
    packed: list[Buffer] = [stream.compress(part) for part in parts]
    packed.append(stream.flush())
    return [part for part in packed if part]


def choose_encoding(accept: str) -> str:
    """The encoding of a reply to this Accept-Encoding: the highest weight, the first of equals.

    `*` and malformed entries are skipped, as Triton does. "" means identity.

    # Differs from Triton: it does not know an entry with white space around `;` or before `,`.
    """
    best, best_weight = "", 0.0
    for entry in accept.split(","):
        name, semicolon, parameter = entry.strip().partition(";")
        name = name.strip()
        if name not in _ENCODINGS:
            continue
        weight = _weight(parameter) if semicolon else 1.0
        if weight is not None and weight > best_weight:
            best, best_weight = name, weight
    return "" if best == "identity" else best


def _weight(parameter: str) -> float | None:
    key, _, value = parameter.strip().partition("=")
    number = _WEIGHT.match(value) if key.strip() == "q" else None
    return float(number[1]) if number is not None else None
