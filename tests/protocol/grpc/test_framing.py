"""gRPC's framing and header values."""

from __future__ import annotations

import contextlib
import gzip
import urllib.parse
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.buffer_pool import LARGE_TENSOR_BYTES
from npuserve.protocol.grpc import framing
from npuserve.protocol.grpc.framing import FramingError, GrpcStatus, MessageReader


def reader(max_bytes: int = 2**31 - 1) -> MessageReader:
    """A reader whose large buffers are plain memory."""
    return MessageReader(lambda size: memoryview(bytearray(size)), lambda _: 24, max_bytes)


sizes = st.sampled_from([0, 1, 5, 4090, 4096, LARGE_TENSOR_BYTES - 1, LARGE_TENSOR_BYTES, 90_000])


@given(st.lists(sizes, max_size=4), st.lists(st.integers(1, 30_000), min_size=1, max_size=20))
def test_any_cut_gives_the_same_messages(lengths: list[int], cuts: list[int]) -> None:
    """However the bytes are cut into chunks, the messages are the same."""
    messages = [bytes([index]) * length for index, length in enumerate(lengths)]
    data = b"".join(framing.frame_prefix(len(each)) + each for each in messages)
    reading = reader()
    got: list[bytes] = []
    offset = turn = 0
    while offset < len(data):
        end = offset + cuts[turn % len(cuts)]
        got += [bytes(message) for _, message in reading.feed(data[offset:end])]
        offset, turn = end, turn + 1
    assert got == messages
    assert reading.idle


def test_byte_by_byte() -> None:
    """Even single bytes make a message."""
    data = framing.frame_prefix(3, compressed=True) + b"abc"
    reading = reader()
    got = [each for byte in data for each in reading.feed(bytes([byte]))]
    assert [(flag, bytes(message)) for flag, message in got] == [(True, b"abc")]


def test_an_unfinished_message_is_not_idle() -> None:
    """A stream that ends in the middle of a message is noticed."""
    for cut in (1, 5, 6, 20_000):
        reading = reader()
        reading.feed((framing.frame_prefix(100_000) + b"x" * 100_000)[:cut])
        assert not reading.idle


@given(st.binary(max_size=100))
def test_random_bytes_raise_only_framing_errors(data: bytes) -> None:
    """Garbage never gives another exception."""
    with contextlib.suppress(FramingError):
        reader(1 << 20).feed(data)


def test_limits() -> None:
    """Reserved flags and too large messages are refused by the prefix alone."""
    with pytest.raises(FramingError, match="bad flag 2"):
        reader().feed(b"\2\0\0\0\0")
    with pytest.raises(FramingError, match=r"larger than max \(101 vs. 100\)"):
        reader(100).feed(framing.frame_prefix(101))


def test_no_memory_is_exhaustion() -> None:
    """A buffer that cannot be had ends the call, not the server."""

    def lease(size: int) -> memoryview:
        raise OSError("no")

    with pytest.raises(FramingError) as caught:
        MessageReader(lease, lambda _: 0).feed(framing.frame_prefix(1 << 20) + b"x" * 5000)
    assert caught.value.status is GrpcStatus.RESOURCE_EXHAUSTED


@given(st.binary(max_size=1000))
def test_compression_round_trip(data: bytes) -> None:
    """Both of gRPC's encodings are read, gzip is written."""
    assert framing.decompress(zlib.compress(data), "deflate") == data
    assert framing.decompress(gzip.compress(data), "gzip") == data
    assert framing.decompress(framing.gzip_compress([data, b"!"], 6), "gzip") == data + b"!"


@pytest.mark.parametrize(
    ("data", "encoding", "status"),
    [
        (b"junk", "gzip", GrpcStatus.INTERNAL),
        (gzip.compress(b"x" * 100, mtime=0)[:-9], "gzip", GrpcStatus.INTERNAL),
        (b"", "deflate", GrpcStatus.INTERNAL),
        (b"x", "br", GrpcStatus.UNIMPLEMENTED),
        (b"x", "identity", GrpcStatus.UNIMPLEMENTED),
        (gzip.compress(b"\0" * 1_000_000, mtime=0), "gzip", GrpcStatus.RESOURCE_EXHAUSTED),
    ],
)
def test_bad_compression(data: bytes, encoding: str, status: GrpcStatus) -> None:
    """Damaged, unknown and exploding messages are refused, each with its status."""
    with pytest.raises(FramingError) as caught:
        framing.decompress(data, encoding, 100_000)
    assert caught.value.status is status


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("1H", 3600.0), ("2M", 120.0), ("3S", 3.0), ("250m", 0.25), ("5u", 5e-6), ("9n", 9e-9),
        ("99999999S", 99999999.0), ("", None), ("S", None), ("1", None), ("-1S", None),
        ("123456789S", None), ("1x", None), ("1.5S", None),
    ],
)  # fmt: skip
def test_timeouts(value: str, seconds: float | None) -> None:
    """`grpc-timeout` is read with its unit; anything malformed is ignored."""
    parsed = framing.parse_timeout(value)
    assert parsed == (pytest.approx(seconds) if seconds is not None else None)


@given(st.text(max_size=50))
def test_grpc_message_round_trip(text: str) -> None:
    """`grpc-message` is printable ASCII that percent-decodes to the text."""
    encoded = framing.encode_grpc_message(text)
    assert all(0x20 <= byte < 0x7F for byte in encoded)
    assert urllib.parse.unquote(encoded.decode()) == text


def test_long_texts_are_cut_before_they_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of megabytes in an error is not percent-encoded on the loop only to be cut."""
    sizes = []
    encode = framing.encode_grpc_message

    def recorded(text: str) -> bytes:
        sizes.append(len(text))
        return encode(text)

    monkeypatch.setattr(framing, "encode_grpc_message", recorded)
    text = framing.shortened("é" * 1_000_000)
    assert max(sizes) < 10_000
    assert text.endswith(" …")
