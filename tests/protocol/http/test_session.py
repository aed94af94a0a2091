"""Connections byte by byte: cuts, pipelining, back-pressure, time-outs, hang-ups. No sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npuserve.protocol.http.read_threshold import PIECE_BYTES
from npuserve.protocol.http.session import (
    DISCARD_SECONDS,
    HEAD_SECONDS,
    MAX_HEAD_BYTES,
    READ_BYTES,
    SLOW_SECONDS,
    STALL_SECONDS,
)
from npuserve.protocol.http.tls_transport import PIECE_BYTES as TLS_PIECE_BYTES
from npuserve.response import InferenceResponse
from tests.protocol.http.fakes import (
    FakeModel,
    FakeServer,
    Held,
    infer_binary,
    infer_json,
    post,
    post_binary,
)
from tests.protocol.http.wire import Wire

PATH = "/v2/models/echo/infer"


@pytest.fixture
async def server() -> FakeServer:
    """A server whose model echoes."""
    return FakeServer()


@pytest.fixture
async def wire(server: FakeServer) -> AsyncIterator[Wire]:
    """A connection to it."""
    wire = Wire(server)
    yield wire
    wire.close()


def in_loop(pieces: list[bytes]) -> Wire:
    """Feed the pieces to a new connection, in an event loop of its own, for property tests."""

    async def run() -> Wire:
        wire = Wire(FakeServer())
        for piece in pieces:
            wire.feed(piece)
        wire.close()
        return wire

    return asyncio.run(run())


CHUNKED = (
    f"POST {PATH} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    + b"".join(
        b"%x\r\n%b\r\n" % (len(p), p) for p in re.findall(b".{1,9}", infer_json([1], id="c"))
    )
    + b"0\r\n\r\n"
)
STREAM = (
    post(PATH, infer_json([1, 2], id="a"))
    + CHUNKED
    + post_binary(*infer_binary(b"\1\2\3\4" * 20, id="b"))
    + post(PATH, b"{bad")
    + post_binary(*infer_binary(b"\1\2\3\4" * 10_000, id="large"), path=PATH + "?x=%20")
    + post("/v2/models/none/infer", infer_json([1]))
    + post(PATH, infer_json([3], id="z"), "Connection: close")
)


def test_the_stream_gets_its_replies() -> None:
    """What the property below compares is right."""
    wire = in_loop([STREAM])
    assert wire.ids == ["a", "c", "b", "large", "z"]
    assert wire.statuses == [200, 200, 200, 400, 200, 404, 200]


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=12))
def test_any_cut_of_the_stream_gives_the_same_replies(cuts: list[int]) -> None:
    """Where the packets end changes nothing."""
    places = sorted({0, *cuts, len(STREAM)})
    pieces = [STREAM[a:b] for a, b in itertools.pairwise(places)]
    assert in_loop(pieces).written == in_loop([STREAM]).written


@given(st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=4))
def test_random_bytes_get_400_or_nothing(pieces: list[bytes]) -> None:
    """Garbage never makes a 500 and never raises."""
    assert set(in_loop(pieces).statuses) <= {400}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
members = st.sampled_from(
    ["id", "inputs", "outputs", "parameters", "name", "datatype", "shape", "data",
     "binary_data_size", "shared_memory_region", "classification", "binary_data"]
)  # fmt: skip
documents = st.recursive(
    json_values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(members, inner, max_size=5),
    max_leaves=20,
)


@given(documents, st.binary(max_size=20))
def test_random_documents_never_get_a_500(document: object, binary: bytes) -> None:
    """Whatever the JSON says, the client is told what is wrong with it."""
    (status,) = in_loop([post_binary(json.dumps(document).encode(), binary)]).statuses
    assert status in (200, 400, 404)


async def test_pipelined_requests_are_answered_in_order() -> None:
    """The second starts after the first, and reading pauses meanwhile."""
    held = Held()
    wire = Wire(FakeServer(FakeModel(answer=held)))
    wire.feed(post(PATH, infer_json([1], id="a")) + post(PATH, infer_json([2], id="b")))
    first = held.requests.get_nowait()
    assert held.requests.empty()
    assert not wire.transport.is_reading()
    first.deliver(InferenceResponse([]), final=True)
    second = await held.requests.get()
    assert wire.transport.is_reading()
    second.deliver(InferenceResponse([]), final=True)
    assert wire.ids == ["a", "b"]
    wire.close()


async def test_hundreds_of_requests_in_one_packet() -> None:
    """Many small requests need no deep recursion."""
    held = Held()
    wire = Wire(FakeServer(FakeModel(answer=held), FakeModel("fast")))
    wire.feed(post(PATH, infer_json([0], id="first")))
    many = [post("/v2/models/fast/infer", infer_json([1], id=f"r{i}")) for i in range(300)]
    wire.feed(b"".join(many) + post(PATH, infer_json([0], id="last")))
    for _ in range(2):
        (await held.requests.get()).deliver(InferenceResponse([]), final=True)
    assert wire.ids == ["first", *(f"r{i}" for i in range(300)), "last"]
    wire.close()


async def test_hanging_up_cancels_the_request() -> None:
    """A response that comes later is dropped and nothing is written."""
    held = Held()
    wire = Wire(FakeServer(FakeModel(answer=held)))
    wire.feed(post(PATH, infer_json([1])))
    request = held.requests.get_nowait()
    wire.hang_up()
    assert request.cancelled
    request.deliver(InferenceResponse([]), final=True)
    assert not wire.written
    wire.close()


async def test_hanging_up_in_a_body_frees_its_buffer(server: FakeServer, wire: Wire) -> None:
    """A large body that never ends leaves nothing behind."""
    head, blob = infer_binary(bytes(1_000_000))
    wire.feed(post_binary(head, blob)[:500_000])
    assert server.buffer_pool.leased_bytes > 0
    wire.hang_up()
    assert server.buffer_pool.leased_bytes == 0
    assert server.requests == []


async def test_buffers_are_freed_with_the_reply(server: FakeServer, wire: Wire) -> None:
    """No reference cycle keeps a body until the garbage collector comes."""
    wire.feed(post_binary(*infer_binary(bytes(1_000_000))))
    assert wire.statuses == [200]
    server.requests.clear()
    assert server.buffer_pool.leased_bytes == 0


async def test_buffers_are_freed_with_an_error(server: FakeServer, wire: Wire) -> None:
    """Also when the core or the decoder refuses the request."""
    head, blob = infer_binary(bytes(1_000_000))
    wire.feed(post_binary(head.replace(b"INPUT0", b"NOPE"), blob))
    wire.feed(post_binary(b"{" + head, blob))
    assert wire.statuses == [400, 400]
    assert server.buffer_pool.leased_bytes == 0


async def test_the_tensor_of_a_large_body_is_aligned(server: FakeServer, wire: Wire) -> None:
    """The data behind the JSON start at a multiple of 64 bytes."""
    wire.feed(post_binary(*infer_binary(bytes(1_000_000))))
    (tensor,) = server.requests[0].inputs.values()
    assert np.frombuffer(tensor.data, np.uint8).ctypes.data % 64 == 0


@pytest.mark.parametrize("declared", [True, False], ids=["length", "chunks"])
async def test_a_body_over_the_limit_is_refused(server: FakeServer, declared: bool) -> None:
    """The reply comes before the body, which is thrown away; then the connection closes."""
    wire = Wire(server, http_max_body_size=50_000)
    if declared:
        wire.feed(post(PATH, bytes(60_000))[:5_000])
    else:
        head = f"POST {PATH} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        wire.feed(head + b"EA60\r\n" + bytes(60_000))
    assert wire.statuses == [400]
    assert b"--http-max-body-size" in wire.written
    assert b"Connection: close" in wire.written
    wire.feed(bytes(60_000) + post(PATH, infer_json([1])))
    assert server.requests == []
    wire.session.expire(server.loop.time() + DISCARD_SECONDS + 1)
    assert wire.transport.closed
    wire.close()


async def test_an_absurd_length_is_refused(wire: Wire) -> None:
    """Nothing is allocated for it."""
    wire.feed(f"POST {PATH} HTTP/1.1\r\nContent-Length: {2**62}\r\n\r\n".encode())
    assert wire.statuses == [400]
    assert str(2**62).encode() in wire.written


async def test_an_endless_head_is_refused(wire: Wire) -> None:
    """A head may have so many bytes and no more."""
    wire.feed(b"POST /v2 HTTP/1.1\r\n")
    wire.feed(b"x-filler: y\r\n" * (MAX_HEAD_BYTES // 10))
    assert wire.statuses == [400]
    assert wire.transport.closed


@pytest.mark.parametrize(
    ("sent", "limit"),
    [
        (b"", 75.0),
        (b"POST /v2/models/echo/in", HEAD_SECONDS),
        (post(PATH, infer_json([1]))[:-1], STALL_SECONDS),
        (post(PATH, infer_json([1])), 75.0),
    ],
    ids=["silent", "head", "body", "answered"],
)
async def test_a_client_that_takes_too_long_is_closed(
    server: FakeServer, wire: Wire, sent: bytes, limit: float
) -> None:
    """Each phase of a connection has its limit."""
    wire.feed(sent)
    now = server.loop.time()
    wire.session.expire(now + limit - 1)
    assert not wire.transport.closed
    wire.session.expire(now + limit + 1)
    assert wire.transport.closed


async def test_a_running_request_has_no_limit() -> None:
    """A slow model does not cost the connection."""
    held = Held()
    server = FakeServer(FakeModel(answer=held))
    wire = Wire(server)
    wire.feed(post(PATH, infer_json([1])))
    wire.session.expire(server.loop.time() + 1e6)
    assert not wire.transport.closed
    wire.close()


async def test_dripping_a_head_does_not_extend_its_limit(server: FakeServer, wire: Wire) -> None:
    """Bytes now and then (slow loris) are not progress."""
    wire.feed(b"POST /v2/models/echo/infer HTTP/1.1\r\n")
    start = server.loop.time()
    for _ in range(5):
        wire.feed(b"x: y\r\n")
    wire.session.expire(start + HEAD_SECONDS + 1)
    assert wire.transport.closed


async def test_a_client_that_does_not_read_may_not_send(server: FakeServer, wire: Wire) -> None:
    """Reading goes on when the replies have left."""
    wire.pause_writing()
    wire.feed(post(PATH, infer_json([1])))
    assert not wire.transport.is_reading()
    wire.resume_writing()
    assert wire.transport.is_reading()
    wire.pause_writing()
    wire.feed(post(PATH, infer_json([1])))
    wire.session.expire(server.loop.time() + STALL_SECONDS + 1)
    assert wire.transport.closed


async def test_a_client_that_reads_slowly_is_not_closed(server: FakeServer, wire: Wire) -> None:
    """However long a reply takes: only one that reads nothing for so long is gone."""
    now = server.loop.time()
    wire.transport.unsent = 1000
    wire.pause_writing()
    for _ in range(5):
        now += STALL_SECONDS + 1
        wire.transport.unsent -= 1
        wire.session.expire(now)
    assert not wire.transport.closed
    wire.session.expire(now + STALL_SECONDS - 1)
    assert not wire.transport.closed
    wire.session.expire(now + STALL_SECONDS + 1)
    assert wire.transport.closed


async def test_a_slow_reader_may_send_its_next_request(
    server: FakeServer, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not idle while it read."""
    wire.feed(post(PATH, infer_json([1])))
    wire.pause_writing()
    later = server.loop.time() + STALL_SECONDS
    monkeypatch.setattr(wire.session, "loop", SimpleNamespace(time=lambda: later))
    wire.resume_writing()
    wire.session.expire(later + 1)
    assert not wire.transport.closed


async def test_the_limit_of_a_body_begins_when_its_client_may_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a long request the client cannot go on, or waits for 100 Continue."""
    held = Held()
    server = FakeServer(FakeModel(answer=held))
    wire = Wire(server)
    wire.feed(post(PATH, infer_json([1], id="long")))
    wire.feed(post(PATH, infer_json([1], id="second"), "Expect: 100-continue")[:-5])
    later = server.loop.time() + 2 * STALL_SECONDS
    clock = SimpleNamespace(time=lambda: later, call_soon=lambda callback: callback())
    monkeypatch.setattr(wire.session, "loop", clock)
    wire.session.expire(later)
    held.requests.get_nowait().deliver(InferenceResponse([]), final=True)
    wire.session.expire(later + STALL_SECONDS - 1)
    assert wire.statuses == [200, 100]
    assert not wire.transport.closed
    wire.session.expire(later + STALL_SECONDS + 1)
    wire.close()
    assert wire.transport.closed


async def test_continue_is_sent_when_asked_for(wire: Wire) -> None:
    """A client that waits for 100 Continue gets it, then its reply."""
    request = post(PATH, infer_json([1]), "Expect: 100-continue")
    end = request.index(b"\r\n\r\n") + 4
    wire.feed(request[:end])
    assert wire.statuses == [100]
    wire.feed(request[end:])
    assert wire.statuses == [100, 200]


def test_a_large_body_behind_the_end_of_a_head_is_no_large_head() -> None:
    """The head comes in two packets, the second of which has a body above the limit of heads."""
    request = post_binary(*infer_binary(bytes(2 * MAX_HEAD_BYTES)))
    assert in_loop([request[:5], request[5:]]).statuses == [200]


async def test_no_continue_for_a_refused_body(server: FakeServer) -> None:
    """A body that is too large is refused at once."""
    wire = Wire(server, http_max_body_size=50_000)
    wire.feed(post(PATH, bytes(60_000), "Expect: 100-continue")[:300])
    assert wire.statuses == [400]
    wire.close()


async def test_an_upgrade_offer_is_ignored(wire: Wire) -> None:
    """Java's client offers h2c with every first request; it is served HTTP/1.1."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    wire.feed(post(PATH, infer_json([1], id="a"), *offer) + post(PATH, infer_json([1], id="b")))
    assert wire.ids == ["a", "b"]


async def test_many_upgrade_offers_in_one_packet(wire: Wire) -> None:
    """They need no deep recursion."""
    offer = ("Connection: Upgrade", "Upgrade: h2c")
    wire.feed(post(PATH, infer_json([1], id="x"), *offer) * 300)
    assert wire.statuses == [200] * 300


async def test_garbage_behind_a_request_in_progress() -> None:
    """Its reply comes whole, then the connection ends."""
    held = Held()
    wire = Wire(FakeServer(FakeModel(answer=held)))
    wire.feed(post(PATH, infer_json([1])) + b"GARBAGE\r\n\r\n")
    assert wire.statuses == []
    held.requests.get_nowait().deliver(InferenceResponse([]), final=True)
    assert wire.statuses == [200]
    assert b"Connection: close" in wire.written
    wire.session.expire(wire.session.loop.time() + DISCARD_SECONDS + 1)
    assert wire.transport.closed
    wire.close()


async def test_garbage_in_a_body(server: FakeServer, wire: Wire) -> None:
    """A bad chunk is told at once."""
    head = f"POST {PATH} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    wire.feed(head + b"5\r\nabcde\r\nxyz\r\n")
    assert wire.statuses == [400]
    assert wire.transport.closed
    assert server.requests == []


async def test_connect_is_refused(wire: Wire) -> None:
    """This is no proxy."""
    wire.feed(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n")
    assert wire.statuses == [400]
    assert wire.transport.closed


async def test_two_responses_of_a_model_that_is_not_decoupled() -> None:
    """The client gets one reply: an error."""
    held = Held()
    wire = Wire(FakeServer(FakeModel(answer=held)))
    wire.feed(post(PATH, infer_json([1])))
    request = held.requests.get_nowait()
    request.deliver(InferenceResponse([]), final=False)
    request.deliver(InferenceResponse([]), final=True)
    assert wire.statuses == [500]
    assert b"expected a single response, got 2" in wire.written
    wire.close()


async def test_no_response_at_all_is_an_error() -> None:
    """A request that ends without a response does not hang."""
    held = Held()
    wire = Wire(FakeServer(FakeModel(answer=held)))
    wire.feed(post(PATH, infer_json([1])))
    held.requests.get_nowait().deliver(None, final=True)
    assert wire.statuses == [500]
    wire.close()


LARGE = post_binary(*infer_binary(bytes(2 * PIECE_BYTES + 500_000), id="large"))


@given(st.lists(st.integers(1, len(LARGE) - 1), max_size=8))
@example([len(LARGE) - 1])
@example([len(LARGE) - PIECE_BYTES - 1, len(LARGE) - PIECE_BYTES])
def test_no_byte_of_a_large_body_is_left_in_the_kernel(cuts: list[int]) -> None:
    """The threshold is never above what is still to come, and is gone after the body."""
    places = sorted({0, *cuts, len(LARGE)})
    pieces = [LARGE[a:b] for a, b in itertools.pairwise(places)]
    wire = in_loop([*pieces, post(PATH, infer_json([1], id="next"))])
    assert wire.ids == ["large", "next"]
    assert wire.transport.socket.threshold == 1


async def test_a_large_body_comes_in_large_pieces(server: FakeServer, wire: Wire) -> None:
    """Until its client is slow: then each byte is seen, so that it is not taken for stalled."""
    kernel = wire.transport.socket
    wire.feed(LARGE[: READ_BYTES + 1])
    assert kernel.threshold == PIECE_BYTES
    start = server.loop.time()
    wire.session.expire(start + SLOW_SECONDS - 0.5)
    assert kernel.threshold == PIECE_BYTES
    wire.session.expire(start + SLOW_SECONDS + 0.5)
    assert kernel.threshold == 1
    wire.feed(LARGE[READ_BYTES + 1 :])
    assert (wire.ids, kernel.threshold) == (["large"], 1)


async def test_an_encrypted_body_is_read_as_it_comes(server: FakeServer) -> None:
    """Part of it may already be above the kernel, so there is no telling what the kernel gets."""
    wire = Wire(server, {"sslcontext": object()})
    wire.feed(LARGE[:-1])
    assert wire.transport.socket.threshold == 1
    wire.feed(LARGE[-1:])
    assert wire.ids == ["large"]
    wire.close()


async def test_a_closing_connection_is_left_alone(server: FakeServer, wire: Wire) -> None:
    """Its descriptor may already be another connection's."""
    wire.feed(LARGE[:-1])
    threshold = wire.transport.socket.threshold = 7
    wire.transport.close()
    wire.session.expire(server.loop.time() + SLOW_SECONDS + 1)
    assert wire.transport.socket.threshold == threshold


async def test_a_client_that_does_not_read_is_slow_all_the_same(
    server: FakeServer, wire: Wire
) -> None:
    """Its body, too, is then looked at byte by byte."""
    wire.feed(LARGE[: READ_BYTES + 1])
    wire.pause_writing()
    wire.session.expire(server.loop.time() + SLOW_SECONDS + 1)
    assert wire.transport.socket.threshold == 1


async def test_an_encrypted_reply_is_freed_with_its_connection(server: FakeServer) -> None:
    """The client leaves before it has read all."""
    wire = Wire(server, {"sslcontext": object()})
    wire.transport.after_write = wire.pause_writing
    block = bytearray(10 * TLS_PIECE_BYTES)
    wire.session.transport.write(memoryview(block))
    wire.hang_up()
    block.clear()  # raises BufferError while a view of it is left
    wire.close()


@pytest.mark.parametrize("begun", [0, 2 * READ_BYTES], ids=["never", "no longer"])
async def test_large_bodies_need_no_threshold(server: FakeServer, wire: Wire, begun: int) -> None:
    """Where the system refuses it, they come as they come."""
    wire.feed(LARGE[:begun])
    wire.transport.socket.refuses = True
    wire.session.expire(server.loop.time() + SLOW_SECONDS + 1)
    wire.feed(LARGE[begun : begun + PIECE_BYTES])
    wire.feed(LARGE[begun + PIECE_BYTES :])
    assert wire.ids == ["large"]


async def test_an_encrypted_reply_leaves_as_its_client_reads(server: FakeServer) -> None:
    """It is not taken for sent before; the connection closes behind it, not in it."""
    wire = Wire(server, {"sslcontext": object()})
    wire.transport.after_write = wire.pause_writing  # there is room for one piece
    reply = [b"head", *[bytes([n]) * 300_000 for n in range(5)]]
    wire.session.transport.writelines(reply)
    wire.session.transport.close()
    now, sent = server.loop.time(), 0
    while not wire.transport.closed:
        assert sent < len(wire.written) <= sent + TLS_PIECE_BYTES
        sent = len(wire.written)
        now += STALL_SECONDS - 1
        wire.session.expire(now)
        wire.resume_writing()
    assert wire.written == b"".join(reply)
    wire.close()


async def test_an_encrypted_reply_that_nobody_reads_ends(server: FakeServer) -> None:
    """As over plain TCP."""
    wire = Wire(server, {"sslcontext": object()})
    wire.transport.after_write = wire.pause_writing
    wire.session.transport.write(bytes(10 * TLS_PIECE_BYTES))
    wire.session.expire(server.loop.time() + STALL_SECONDS - 1)
    assert not wire.transport.closed
    wire.session.expire(server.loop.time() + STALL_SECONDS + 1)
    wire.close()
    assert wire.session.transport.get_write_buffer_size() == 0
    assert wire.transport.closed
