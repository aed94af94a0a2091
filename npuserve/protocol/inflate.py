"""Unpacking of compressed requests, within a limit. Pure.

A megabyte may stand for a gigabyte. zlib collects what it unpacks in one go in pieces and joins
them, which takes the memory twice; here it goes piece by piece into one buffer, which the
allocator lets grow where it is.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npuserve.tensor import Buffer

# Small pieces of input: zlib copies what it has not used of one, each time.
_INPUT_BYTES = 64 * 1024
_OUTPUT_BYTES = 1024 * 1024


class TooLargeError(Exception):
    """There are more plain bytes than the limit."""


def inflate(data: Buffer, window_bits: int, limit: int) -> Buffer:
    """The plain bytes of one zlib or gzip stream; what follows it is ignored.

    Args:
        data: the whole stream.
        window_bits: of `zlib.decompressobj`.
        limit: of the plain bytes; hardly more is ever unpacked.

    Raises:
        TooLargeError: more than `limit` bytes.
        zlib.error: damaged or cut off.
    """
    stream = zlib.decompressobj(window_bits)
    packed = memoryview(data)
    plain = bytearray()
    for start in range(0, len(packed), _INPUT_BYTES):
        piece: Buffer = packed[start : start + _INPUT_BYTES]
        more = True
        while more:
            room = min(_OUTPUT_BYTES, limit + 1 - len(plain))
            part = stream.decompress(piece, room)
            if stream.eof and not plain and len(part) <= limit:
                return part  # all there is: the usual, small request
            plain += part
            if len(plain) > limit:
                raise TooLargeError
            piece = stream.unconsumed_tail
            # A full part may be followed by more from the same input.
            more = len(part) == room and not stream.eof
        if stream.eof:
            return plain
    raise zlib.error("data are cut off")
