"""gRPC over HTTP/2, the parts that are bytes and text only: message framing, header values. Pure.

Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

from npuserve.buffer_pool import LARGE_TENSOR_BYTES
from npuserve.protocol.grpc.codec import MAX_MESSAGE_BYTES, Parts
from npuserve.protocol.inflate import TooLargeError, inflate

if TYPE_CHECKING:
    from npuserve.tensor import Buffer

_PREFIX = struct.Struct(">BI")  # compressed flag, length of the message
PREFIX_BYTES = _PREFIX.size
_TIMEOUT_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
# Of a large message this much must be there before its buffer is laid out: a head of model,
# input and output names fits.
_LAYOUT_BYTES = 4096


class GrpcStatus(IntEnum):
    """The status codes a transport itself gives; the others come from `protocol.status`."""

    OK = 0
    CANCELLED = 1
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class FramingError(Exception):
    """The peer broke gRPC's framing; the call ends with this status."""

    def __init__(self, status: GrpcStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


def frame_prefix(size: int, compressed: bool = False) -> bytes:
    """What stands before every message."""
    return _PREFIX.pack(compressed, size)


def join(parts: Parts) -> bytes:
    """The parts of a message as one bytes object."""
    if len(parts) == 1 and isinstance(parts[0], bytes):
        return parts[0]
    return b"".join(parts)


class LargeMessage:
    """A message that is being received.

    Attributes:
        target: where it goes.
        size: its bytes.
        filled: how many of them are in place.
    """

    __slots__ = ("compressed", "filled", "size", "target")

    def __init__(self, target: memoryview, compressed: bool) -> None:
        self.target = target
        self.compressed = compressed
        self.size = len(target)
        self.filled = 0


class MessageReader:
    """Cuts the data of one HTTP/2 stream into messages.

    Small messages are views of the chunk they came in or joined in a bytearray. A large one is
    collected in a leased buffer, so that a worker process can map it, with its first large
    tensor aligned.

    Args:
        lease: gives a writable buffer of a size; see `BufferPool.lease`.
        padding: bytes to leave free before a message, told from its beginning.
        max_bytes: size of the largest message taken.

    Attributes:
        large: the large message that is being received; whoever knows it may put bytes there,
            all but the last.
    """

    __slots__ = ("_held", "_lease", "_max_bytes", "_padding", "large")

    def __init__(
        self,
        lease: Callable[[int], memoryview],
        padding: Callable[[memoryview], int],
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._max_bytes = max_bytes
        self._lease = lease
        self._padding = padding
        self._held: bytearray | None = None  # a prefix, or the beginning of a message
        self.large: LargeMessage | None = None

    @property
    def idle(self) -> bool:
        """Whether the data so far ended with a whole message."""
        return self.large is None and not self._held

    def feed(self, chunk: Buffer) -> list[tuple[bool, Buffer]]:
        """The (compressed, message) pairs that `chunk` completes.

        Raises:
            FramingError: a reserved flag, or a message larger than gRPC's limit.
        """
        messages: list[tuple[bool, Buffer]] = []
        data = memoryview(chunk)
        if self._held is not None:
            self._held += data
            data = memoryview(bytes(self._held))
            self._held = None
        if self.large is not None:
            data = self._fill(self.large, data, messages)
        while data:
            if len(data) < PREFIX_BYTES:
                break
            flag, size = _PREFIX.unpack_from(data)
            self._check_prefix(flag, size)
            end = PREFIX_BYTES + size
            if len(data) >= end:
                messages.append((flag == 1, data[PREFIX_BYTES:end]))
                data = data[end:]
            elif size < LARGE_TENSOR_BYTES or len(data) < _LAYOUT_BYTES:
                break
            else:
                data = data[PREFIX_BYTES:]
                self.large = self._start_large(flag == 1, size, data)
                data = self._fill(self.large, data, messages)
        if data:
            self._held = bytearray(data)
        return messages

    def _start_large(self, compressed: bool, size: int, beginning: memoryview) -> LargeMessage:
        padding = self._padding(beginning)
        try:
            return LargeMessage(self._lease(size + padding)[padding:], compressed)
        except (OSError, ValueError, MemoryError) as error:
            raise FramingError(
                GrpcStatus.RESOURCE_EXHAUSTED, f"no memory for a message of {size} bytes: {error}"
            ) from error

    def _fill(
        self, large: LargeMessage, data: memoryview, messages: list[tuple[bool, Buffer]]
    ) -> memoryview:
        filled = large.filled
        take = min(len(data), large.size - filled)
        large.target[filled : filled + take] = data[:take]
        large.filled += take
        if large.filled == large.size:
            messages.append((large.compressed, large.target))
            self.large = None
        return data[take:]

    def _check_prefix(self, flag: int, size: int) -> None:
        if flag > 1:
            raise FramingError(GrpcStatus.INTERNAL, f"Received a message with the bad flag {flag}")
        if size > self._max_bytes:
            raise FramingError(
                GrpcStatus.RESOURCE_EXHAUSTED,
                f"Received message larger than max ({size} vs. {self._max_bytes})",
            )


def decompress(data: Buffer, encoding: str, max_bytes: int = MAX_MESSAGE_BYTES) -> Buffer:
    """A message as it was before `grpc-encoding`.

    Raises:
        FramingError: unknown encoding, damaged data, or more than gRPC's limit when unpacked.
    """
    if encoding not in _WINDOW_BITS:
        raise FramingError(
            GrpcStatus.UNIMPLEMENTED, f"Message encoding '{encoding}' is not supported"
        )
    try:
        return inflate(data, _WINDOW_BITS[encoding], max_bytes)
    except zlib.error as error:
        raise FramingError(GrpcStatus.INTERNAL, f"damaged {encoding} message: {error}") from error
    except TooLargeError as error:
        raise FramingError(
            GrpcStatus.RESOURCE_EXHAUSTED, f"Decompressed message larger than max ({max_bytes})"
        ) from error


def gzip_compress(parts: Parts, level: int) -> bytes:
    """A message as `grpc-encoding: gzip` wants it."""
    deflater = zlib.compressobj(level, wbits=_WINDOW_BITS["gzip"])
    return b"".join([*map(deflater.compress, parts), deflater.flush()])


# zlib's window bits: 16 more for a gzip header; "deflate" means the zlib format.
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def parse_timeout(value: str) -> float | None:
    """Seconds of a `grpc-timeout` header; None when it is malformed, to be ignored."""
    digits, unit = value[:-1], value[-1:]
    if unit not in _TIMEOUT_UNITS or not digits.isdecimal() or len(digits) > 8:
        return None
    return int(digits) * _TIMEOUT_UNITS[unit]


_MAX_DETAILS_BYTES = 7000
_PLAIN_CHARACTERS = frozenset(range(0x20, 0x7F)) - {ord("%")}


def encode_grpc_message(text: str) -> bytes:
    """A `grpc-message` header: percent-encoded UTF-8."""
    data = text.encode("utf-8", "replace")
    if _PLAIN_CHARACTERS.issuperset(data):
        return data
    return b"".join(
        bytes((byte,)) if byte in _PLAIN_CHARACTERS else b"%%%02X" % byte for byte in data
    )


def shortened(text: str) -> str:
    """A status text that clients accept: they refuse headers of more than 8 KiB (grpcio)."""
    text = text[: _MAX_DETAILS_BYTES + 1]  # not encoding what may be megabytes
    while len(encoded := encode_grpc_message(text)) > _MAX_DETAILS_BYTES:
        text = text[: len(text) * (_MAX_DETAILS_BYTES - 100) // len(encoded)] + " …"
    return text
