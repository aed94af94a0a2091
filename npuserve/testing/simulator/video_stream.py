"""The stand-in for H.264 and H.265 streams.

There is no video codec here. A stand-in stream is a well-formed Annex B byte stream whose access
units are SEI messages (user data, unregistered) with a JPEG picture each: the simulated encoder
makes them, the simulated decoder shows them again. A real stream is refused as an unsupported
feature.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.image_files import UNSUPPORTED

_START = b"\x00\x00\x00\x01"
_USER_DATA = 5
_UUID = bytes.fromhex("6e707573657276652d73746e642d696e")
_STOP = b"\x80"
# NAL header of an SEI message; H.265 is acldvppStreamFormat 0.
_H265_SEI, _H264_SEI = b"\x4e\x01", b"\x06"


def access_unit(jpeg: bytes, encoding: int) -> bytes:
    """A picture as one access unit of H.265 (encoding 0) or H.264 (1 to 3)."""
    body = _UUID + jpeg
    size = b"\xff" * (len(body) // 255) + bytes([len(body) % 255])
    message = bytes([_USER_DATA]) + size + body + _STOP
    header = _H264_SEI if encoding else _H265_SEI
    return _START + header + re.sub(rb"\x00\x00(?=[\x00-\x03])", b"\x00\x00\x03", message)


def pictures(data: bytes, encoding: int) -> list[bytes]:
    """The JPEG pictures of a piece of a stand-in stream.

    Raises:
        RefusedError: the stream is a real one, of the other encoding, or no stream at all.
    """
    return [_picture(unit, encoding) for unit in _units(data)]


def _units(data: bytes) -> Iterator[bytes]:
    starts = list(re.finditer(rb"\x00\x00\x01", data))
    if not starts:
        raise RefusedError(UNSUPPORTED, "no start code: not an Annex B stream")
    ends = [match.start() for match in starts[1:]] + [len(data)]
    for match, end in zip(starts, ends, strict=True):
        yield data[match.end() : end].rstrip(b"\x00")


def _picture(unit: bytes, encoding: int) -> bytes:
    header = _H264_SEI if encoding else _H265_SEI
    message = unit.removeprefix(header).replace(b"\x00\x00\x03", b"\x00\x00")
    body = message[1:].lstrip(b"\xff")[1:]
    if not unit.startswith(header) or message[0] != _USER_DATA or not body.startswith(_UUID):
        codec = "H.264" if encoding else "H.265"
        raise RefusedError(
            UNSUPPORTED,
            f"the simulator has no {codec} decoder; it decodes what its own encoder makes",
        )
    return body[len(_UUID) :].removesuffix(_STOP)
