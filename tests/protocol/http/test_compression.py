"""Content-Encoding, both ways."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.errors import InvalidArgumentError, UnsupportedError
from npuserve.protocol.http.compression import (
    check_encoding,
    choose_encoding,
    compress,
    decompress,
)
from tests.protocol.http.conftest import Start
from tests.protocol.http.fakes import infer_binary, infer_json, post, post_binary

PATH = "/v2/models/echo/infer"


@given(st.lists(st.binary()), st.sampled_from(["gzip", "deflate"]))
def test_parts_come_back(parts: list[bytes], encoding: str) -> None:
    """Decompressing what was compressed gives the parts in order."""
    whole = b"".join(parts)
    assert decompress(b"".join(compress(parts, encoding)), encoding, len(whole)) == whole


@given(st.binary(max_size=50), st.sampled_from(["gzip", "deflate"]))
def test_garbage_is_refused(data: bytes, encoding: str) -> None:
    """Corrupt, cut off and empty data are the client's fault."""
    with pytest.raises(InvalidArgumentError, match=f"failed to decompress {encoding}"):
        decompress(data, encoding, 1000)


def test_a_bomb_is_refused() -> None:
    """No more than the limit is ever decompressed."""
    with pytest.raises(InvalidArgumentError, match="maximum allowed value of 1000 bytes"):
        decompress(gzip.compress(bytes(10_000_000)), "gzip", 1000)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, deflate", "GZIP", "", " ", "gzip "])
def test_unknown_encodings(encoding: str) -> None:
    """Only the three exact names are known."""
    with pytest.raises(UnsupportedError, match="Unsupported compression type"):
        check_encoding(encoding)


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("gzip", "gzip"), ("deflate, gzip", "deflate"), ("gzip;q=0.5, deflate;q=0.9", "deflate"),
        ("gzip;q=1.0, deflate;q=0.1", "gzip"), ("*", ""), ("", ""), ("identity;q=0", ""),
        ("identity, gzip;q=0.9", ""), ("gzip;q=x, deflate;q=0.1", "deflate"), ("gzip;q=0", ""),
        ("br, gzip;level=1", ""),
        # As Triton 2.51: a semicolon needs a weight, of which the part that is a number counts.
        ("gzip;", ""), ("gzip;q=", ""), ("gzip;q=0.5x, deflate;q=0.4", "gzip"),
        ("gzip;q=0.5;q=0", "gzip"), ("gzip;q=0_1", ""), ("gzip;q=1e-3, deflate;q=0.0005", "gzip"),
        ("gzip;q=.5", "gzip"), ("gzip;q=+1", "gzip"), ("gzip;q=-1", ""), ("gzip;Q=1", ""),
        ("gzip;q=nan, deflate;q=0.1", "deflate"), ("gzip;q=5, deflate", "gzip"), (",,", ""),
        # Not as Triton, which does not know these.
        ("gzip; q=0.5", "gzip"), ("gzip ;q=0.5", "gzip"), ("br,\tgzip , deflate", "gzip"),
    ],
)  # fmt: skip
def test_the_highest_weight_wins(accept: str, chosen: str) -> None:
    """The first of equals; what is malformed or unknown is skipped."""
    assert choose_encoding(accept) == chosen


@pytest.mark.parametrize("size", [4, 400_000])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_compressed_both_ways(start: Start, encoding: str, size: int) -> None:
    """The header length counts plain bytes in the request and in the reply."""
    client = await (await start()).connect()
    head, blob = infer_binary(bytes(range(4)) * (size // 4))
    packed = b"".join(compress([head, blob], encoding))
    reply = await client.ask(
        post(
            PATH, packed, f"Content-Encoding: {encoding}", f"Accept-Encoding: {encoding}",
            f"Inference-Header-Content-Length: {len(head)}",
        )
    )  # fmt: skip
    assert reply.status == 200
    assert reply.headers["content-encoding"] == encoding
    plain = decompress(reply.body, encoding, 10_000_000)
    assert plain[int(reply.headers["inference-header-content-length"]) :] == blob


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_either_container_is_read(encoding: str) -> None:
    """As Triton reads them, whichever of the two the header names."""
    for packed in (gzip.compress(b"plain"), zlib.compress(b"plain")):
        assert decompress(packed, encoding, 100) == b"plain"


async def test_of_two_headers_the_first_counts(start: Start) -> None:
    """As with Triton."""
    client = await (await start()).connect()
    packed = gzip.compress(infer_json([1]))
    reply = await client.ask(
        post(
            PATH, packed, "Content-Encoding: gzip", "Content-Encoding: identity",
            "Accept-Encoding: identity", "Accept-Encoding: gzip",
        )
    )  # fmt: skip
    assert (reply.status, reply.headers.get("content-encoding")) == (200, None)


@pytest.mark.parametrize("header", ["Content-Encoding:", "Content-Encoding: "])
async def test_an_empty_content_encoding_is_refused(start: Start, header: str) -> None:
    """As Triton does, for infer and generate; other endpoints do not look at it."""
    client = await (await start()).connect()
    reply = await client.ask(post(PATH, infer_json([1]), header))
    assert (reply.status, reply.error) == (501, "Unsupported compression type")
    reply = await client.ask(post("/v2/models/echo/generate", b"{}", header))
    assert (reply.status, reply.error) == (
        400,
        "Unsupported content-encoding, only 'identity' is supported.",
    )
    assert (await client.ask(post("/v2/repository/index", b"{}", header))).status == 200


async def test_an_empty_accept_encoding_asks_for_nothing(start: Start) -> None:
    """The reply is plain."""
    client = await (await start()).connect()
    reply = await client.ask(post(PATH, infer_json([1]), "Accept-Encoding:"))
    assert (reply.status, reply.headers.get("content-encoding")) == (200, None)


async def test_an_unknown_encoding_names_the_known_ones(start: Start) -> None:
    """501, and errors are never compressed."""
    client = await (await start()).connect()
    reply = await client.ask(
        post(PATH, infer_json([1]), "Content-Encoding: br", "Accept-Encoding: gzip")
    )
    assert reply.status == 501
    assert reply.headers["accept-encoding"] == "gzip, deflate"
    assert reply.error == "Unsupported compression type"


async def test_decompressed_requests_have_a_limit(start: Start) -> None:
    """`--http-max-input-size` counts plain bytes."""
    client = await (await start(http_max_input_size=1000)).connect()
    packed = zlib.compress(infer_json([1.0] * 1000))
    reply = await client.ask(post(PATH, packed, "Content-Encoding: deflate"))
    assert reply.status == 400
    assert "--http-max-input-size" in reply.error


async def test_json_has_a_limit_and_binary_data_has_not(start: Start) -> None:
    """As with Triton, only the JSON is counted of an uncompressed request."""
    client = await (await start(http_max_input_size=200_000)).connect()
    reply = await client.ask(post(PATH, infer_json([1.5] * 100_000)))
    assert reply.status == 400
    assert "exceeds the maximum allowed input size of 200000 bytes" in reply.error
    reply = await client.ask(post_binary(*infer_binary(bytes(300_000))))
    assert reply.status == 200
