"""The libnghttp2 transport against clients that are wrong, hostile or slow.

The client here speaks HTTP/2 through ngh2 as well, but says what the test wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import random
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import ngh2
import pytest

from npuserve._proto import grpc_service_pb2 as pb
from npuserve.protocol.grpc import framing, nghttp2_connection
from npuserve.protocol.grpc.framing import frame_prefix
from npuserve.protocol.grpc.nghttp2_transport import Nghttp2Transport
from tests.protocol.grpc.conftest import Rig, request, running
from tests.protocol.grpc.fakes import response_of

INFER = b"/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = b"/inference.GRPCInferenceService/ModelStreamInfer"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class RawClient:
    """An HTTP/2 connection driven by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.h2 = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(auto_window_update=False))
        self.h2.initiate_connection({})
        self.events: list[Any] = []
        self.closed = False

    def flush(self) -> None:
        """Write what libnghttp2 has."""
        self._writer.write(self.h2.data_to_send())
        self.events += self.h2.events()  # sending may close a stream

    def open(self, path: bytes = INFER, **headers: str) -> int:
        """Send the headers of a call."""
        fields = {
            b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x",
            b"content-type": b"application/grpc", b"te": b"trailers",
        }  # fmt: skip
        fields |= {key.replace("_", "-").encode(): value.encode() for key, value in headers.items()}
        return self.h2.send_request(list(fields.items()))

    def send(self, stream_id: int, data: bytes, *, end: bool = True) -> None:
        """Send part of a request body."""
        self.h2.send_data(stream_id, data, end_stream=end)
        self.flush()

    async def read(self) -> bool:
        """Read once; False at the end of the connection."""
        try:
            data = await self._reader.read(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self.closed = True
            return False
        self.h2.receive_data(data)
        self.events += self.h2.events()
        self.flush()
        return True

    async def until(self, kind: type[Any], **fields: Any) -> Any:
        """Read until an event of this kind with these fields comes."""
        while True:
            for event in self.events:
                if isinstance(event, kind) and all(
                    getattr(event, key) == value for key, value in fields.items()
                ):
                    return event
            assert await self.read(), f"closed before {kind.__name__}"

    async def until_closed(self) -> None:
        """Read until the server closes the connection."""
        while await self.read():
            pass

    async def status(self, stream_id: int) -> tuple[int, str]:
        """The gRPC status and message a call ended with."""
        await self.until(ngh2.StreamClosed, stream_id=stream_id)
        fields: dict[bytes, bytes] = {}
        for event in self.events:
            if (
                isinstance(event, ngh2.ResponseReceived | ngh2.TrailersReceived)
                and event.stream_id == stream_id
            ):
                fields |= dict(event.headers)
        return int(fields[b"grpc-status"]), fields.get(b"grpc-message", b"").decode()


@asynccontextmanager
async def connected(rig: Rig, receive_bytes: int = 0) -> AsyncIterator[RawClient]:
    """A raw client of the front end; `receive_bytes` for a small buffer in the kernel."""
    plug = socket.socket()
    if receive_bytes:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    plug.connect(("127.0.0.1", rig.front.port))
    reader, writer = await asyncio.open_connection(sock=plug)
    client = RawClient(reader, writer)
    client.flush()
    try:
        yield client
    finally:
        writer.transport.abort()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """The libnghttp2 transport with default options."""
    async with running("nghttp2") as started:
        yield started


def framed(message: pb.ModelInferRequest) -> bytes:
    """A message with its length prefix."""
    data = message.SerializeToString()
    return frame_prefix(len(data)) + data


async def test_a_call_byte_by_byte(rig: Rig) -> None:
    """A request in single-byte frames is answered like any other."""
    async with connected(rig) as client:
        stream_id = client.open()
        data = framed(request())
        for byte in data[:-1]:
            client.send(stream_id, bytes([byte]), end=False)
        client.send(stream_id, data[-1:])
        assert await client.status(stream_id) == (0, "")


async def test_half_close_in_a_frame_of_its_own(rig: Rig) -> None:
    """A client may end its side with an empty frame, before or after the answer."""
    async with connected(rig) as client:
        stream_id = client.open()
        client.send(stream_id, framed(request()), end=False)
        await client.until(ngh2.TrailersReceived, stream_id=stream_id)
        client.send(stream_id, b"")
        assert await client.status(stream_id) == (0, "")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "a unary call must have one request message"),
        (framed(request())[:-3], "the last request message is cut off"),
        (b"\7\0\0\0\0", "Received a message with the bad flag 7"),
    ],
)
async def test_broken_bodies_are_internal(rig: Rig, body: bytes, text: str) -> None:
    """A body that breaks gRPC's framing ends the call with INTERNAL, not the connection."""
    async with connected(rig) as client:
        stream_id = client.open()
        client.send(stream_id, body)
        assert await client.status(stream_id) == (13, text)
        good = client.open()
        client.send(good, framed(request()))
        assert (await client.status(good))[0] == 0


async def test_a_second_message_is_an_error(rig: Rig) -> None:
    """A unary call with two messages is refused, and its request cancelled."""
    async with connected(rig) as client:
        stream_id = client.open()
        client.send(stream_id, framed(request("hold")) * 2)
        assert (await client.status(stream_id))[0] == 13
        await rig.core.cancelled.get()


async def test_a_call_without_body_is_an_error(rig: Rig) -> None:
    """HEADERS that end the stream carry no request message."""
    async with connected(rig) as client:
        fields = [
            (b":method", b"POST"), (b":scheme", b"http"), (b":path", INFER),
            (b":authority", b"x"), (b"content-type", b"application/grpc"),
        ]  # fmt: skip
        stream_id = client.h2.send_request(fields, end_stream=True)
        client.flush()
        assert (await client.status(stream_id))[0] == 13


async def test_too_much_metadata_is_refused_call_by_call(rig: Rig) -> None:
    """As gRPC core does; what else is in progress on the connection goes on."""
    waiting = asyncio.ensure_future(rig.infer(request("hold")))
    held = await rig.core.held.get()
    metadata = [(f"key-{number}", "x" * 10_000) for number in range(7)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.infer(request(), metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "received metadata size exceeds hard limit (70" in str(caught.value.details())
    await rig.infer(request(), metadata=metadata[:6])
    held.deliver(response_of(held), True)
    await waiting


async def test_another_content_type_is_http_415(rig: Rig) -> None:
    """A request that is no gRPC gets an HTTP answer."""
    async with connected(rig) as client:
        stream_id = client.open(content_type="application/json")
        client.send(stream_id, b"{}")
        event = await client.until(ngh2.ResponseReceived, stream_id=stream_id)
        assert (b":status", b"415") in event.headers


async def test_a_malformed_timeout_is_ignored(rig: Rig) -> None:
    """`grpc-timeout` that cannot be read is no timeout."""
    async with connected(rig) as client:
        stream_id = client.open(grpc_timeout="soon")
        client.send(stream_id, framed(request()))
        assert (await client.status(stream_id))[0] == 0


async def test_an_unknown_encoding_is_unimplemented(rig: Rig) -> None:
    """A compressed message without a known encoding is refused."""
    async with connected(rig) as client:
        stream_id = client.open(grpc_encoding="br")
        client.send(stream_id, frame_prefix(3, compressed=True) + b"abc")
        assert await client.status(stream_id) == (12, "Message encoding 'br' is not supported")


@pytest.mark.parametrize("path", [INFER, STREAM_INFER])
async def test_a_large_compressed_message_does_not_hold_up_the_loop(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    """It is unpacked in a thread: meanwhile others are served and its client may go."""
    begun, go_on = asyncio.Event(), threading.Event()
    loop, original = asyncio.get_running_loop(), framing.decompress

    def decompress(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        return original(*arguments)

    monkeypatch.setattr(framing, "decompress", decompress)
    body = gzip.compress(request("hold", data=os.urandom(5000)).SerializeToString())
    async with connected(rig) as client, connected(rig) as leaver:
        for each in (leaver, client):
            assert each.open(path, grpc_encoding="gzip") == 1
            each.send(1, frame_prefix(len(body), compressed=True) + body)
            await begun.wait()
            begun.clear()
        await rig.infer(request())
        leaver.h2.reset_stream(1)
        leaver.flush()
        await rig.infer(request())
        go_on.set()
        held = await rig.core.held.get()
        held.deliver(response_of(held), True)
        assert await client.status(1) == (0, "")
        assert rig.core.held.empty()


async def test_compressed_messages_keep_their_order() -> None:
    """Whether a thread packs or unpacks them or not."""
    sizes = [10, 200_000, 10, 10, 60_000, 0, 300_000, 5]
    blocks = [os.urandom(size // 2) + bytes(size - size // 2) for size in sizes]
    async with running("nghttp2", grpc_infer_response_compression_level="high") as rig:
        stream = rig.stream(compression=grpc.Compression.Gzip)
        await stream.write(*(request(data=block) for block in blocks))
        answers = await stream.rest()
    assert [answer.infer_response.raw_output_contents[0] for answer in answers] == blocks


async def test_an_upload_nobody_wants_is_stopped(rig: Rig) -> None:
    """After an early error the client is told to stop sending."""
    async with connected(rig) as client:
        stream_id = client.open(b"/inference.GRPCInferenceService/Nothing")
        client.send(stream_id, b"x" * 100_000, end=False)
        assert (await client.status(stream_id))[0] == 12
        event = await client.until(ngh2.StreamReset, stream_id=stream_id)
        assert event.error_code == 0


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
        PREFACE + b"\0\0\0\x0f\xff\xff\xff\xff\xff" * 3,
        PREFACE + b"\0\0\5\1\5\0\0\0\1\xff\xff\xff\xff\xff",  # HEADERS that are no HPACK
        PREFACE + b"\0\0\4\0\0\0\0\0\1abcd",  # DATA on an idle stream
        PREFACE + b"\0\0\4\3\0\0\0\0\0abcd",  # RST_STREAM on stream 0
        PREFACE + b"\0\0\4\x08\0\0\0\0\0\0\0\0\0",  # WINDOW_UPDATE of 0
    ],
)
async def test_what_is_no_http2_ends_its_connection_only(rig: Rig, data: bytes) -> None:
    """Garbage closes the connection it came on; others are served."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.front.port)
    writer.write(data)
    writer.write_eof()
    await reader.read()
    writer.close()
    await rig.infer(request())


async def test_random_frames_never_stop_the_server(rig: Rig) -> None:
    """Frames of random type, flags, stream and payload, and damaged real ones, do no harm."""
    dice = random.Random(7)
    sample = ngh2.Connection(ngh2.Role.CLIENT)
    sample.initiate_connection({})
    sample.send_request([(b":method", b"POST"), (b":path", INFER), (b":scheme", b"http")])
    real = bytearray(sample.data_to_send())
    for _ in range(150):
        data = bytearray(PREFACE)
        for _ in range(dice.randrange(1, 8)):
            payload = os.urandom(dice.randrange(0, 40))
            data += len(payload).to_bytes(3, "big") + bytes(
                [dice.randrange(11), dice.randrange(256), 0, 0, 0, dice.randrange(6)]
            )
            data += payload
        if dice.random() < 0.5:
            data = real.copy()
            for _ in range(3):
                data[dice.randrange(len(PREFACE), len(data))] = dice.randrange(256)
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.front.port)
        writer.write(bytes(data))
        writer.write_eof()
        with_errors = await asyncio.gather(reader.read(), return_exceptions=True)
        assert len(with_errors) == 1
        writer.close()
    await rig.infer(request())


async def test_cancelled_uploads_give_their_window_back(rig: Rig) -> None:
    """A hundred uploads cut in the middle leave the connection's window as it was."""
    message = framed(request(data=b"x" * 4_000_000))
    async with connected(rig) as client:
        await client.until(ngh2.SettingsReceived)
        for _ in range(60):
            stream_id = client.open()
            client.send(stream_id, message[:2_000_000], end=False)
            client.h2.reset_stream(stream_id)
            client.flush()
        good = client.open()
        client.send(good, message)
        while not any(
            isinstance(event, ngh2.ResponseReceived) and event.stream_id == good
            for event in client.events
        ):
            assert await client.read()


async def test_calls_reset_at_once_do_no_harm(rig: Rig) -> None:
    """Requests and their reset in the same packet leave nothing behind."""
    async with connected(rig) as client:
        for model in ("echo", "hold") * 50:
            stream_id = client.open()
            client.h2.send_data(stream_id, framed(request(model)), end_stream=True)
            client.flush()
            client.h2.reset_stream(stream_id)
            client.flush()
        good = client.open()
        client.send(good, framed(request()))
        assert (await client.status(good))[0] == 0


async def test_a_client_that_does_not_read_holds_up_only_itself(rig: Rig) -> None:
    """Large responses wait for a slow client while others are served."""
    async with connected(rig) as client:
        for _ in range(10):
            client.send(client.open(), framed(request(data=b"x" * 3_000_000)))
        answers = await asyncio.gather(*(rig.infer(request()) for _ in range(20)))
        assert len(answers) == 20


async def test_too_many_pings_close_the_connection() -> None:
    """A client that pings without calls is sent away, as by gRPC core."""
    async with running("nghttp2", grpc_http2_max_ping_strikes=2) as rig, connected(rig) as client:
        for _ in range(8):
            client.h2.ping()
            client.flush()
        event = await client.until(ngh2.GoAwayReceived)
        assert event.error_code == ngh2.ErrorCode.ENHANCE_YOUR_CALM
        assert event.debug_data == b"too_many_pings"
        await client.until_closed()


async def test_pings_during_a_long_answer_are_welcome() -> None:
    """A client may measure the bandwidth of one answer: each ping finds more data gone."""
    async with running("nghttp2", grpc_http2_max_ping_strikes=1) as rig, connected(rig) as client:
        stream_id = client.open()
        client.send(stream_id, framed(request(data=b"x" * 2_000_000)))
        pings = received = 0
        while not any(isinstance(event, ngh2.StreamClosed) for event in client.events):
            assert await client.read(), "closed in the middle of an answer"
            sizes = [len(e.data) for e in client.events if isinstance(e, ngh2.DataReceived)]
            client.events = [e for e in client.events if not isinstance(e, ngh2.DataReceived)]
            for size in sizes:
                client.h2.acknowledge_received_data(size, stream_id)
                received += size
            # Two windows of data between two pings: some of it left in between for sure.
            if received > (pings + 1) * 2 * 65_535:
                client.h2.ping()
                pings += 1
            client.flush()
        assert pings > 8
        assert (await client.status(stream_id))[0] == 0


async def test_pings_between_answers_are_welcome(rig: Rig) -> None:
    """Pings that measure bandwidth between data frames are no strikes."""
    async with connected(rig) as client:
        for _ in range(10):
            client.h2.ping()
            stream_id = client.open()
            client.send(stream_id, framed(request()))
            assert (await client.status(stream_id))[0] == 0


async def test_a_silent_peer_is_dropped() -> None:
    """Without an answer to the keepalive ping the connection and its calls end."""
    options = {"grpc_keepalive_time": 50, "grpc_keepalive_timeout": 50}
    async with running("nghttp2", **options) as rig:
        _, writer = await asyncio.open_connection("127.0.0.1", rig.front.port)
        client = ngh2.Connection(ngh2.Role.CLIENT)
        client.initiate_connection({})
        raw = RawClient(_, writer)
        stream_id = raw.open()
        raw.send(stream_id, framed(request("hold")))
        await rig.core.held.get()
        await rig.core.cancelled.get()  # nobody reads, so nobody answered the ping
        writer.transport.abort()


@pytest.mark.parametrize("data", [b"", PREFACE[:10], PREFACE, PREFACE + b"\0\0\6\4"])
async def test_a_socket_that_never_speaks_http2_is_dropped(
    monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """Nothing, or the beginning of a preface, keeps no socket; a client that is idle stays."""
    monkeypatch.setattr(nghttp2_connection, "HANDSHAKE_S", 0.2)
    async with running("nghttp2") as rig, connected(rig) as idle:
        idle.flush()
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.front.port)
        writer.write(data)
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(1000):
                pass
        writer.close()
        stream_id = idle.open()
        idle.send(stream_id, framed(request()))
        assert await idle.status(stream_id) == (0, "")


async def test_a_talking_peer_is_kept() -> None:
    """A client that answers keepalive pings stays connected."""
    options = {"grpc_keepalive_time": 30, "grpc_keepalive_timeout": 500}
    async with running("nghttp2", **options) as rig, connected(rig) as client:
        stream_id = client.open()
        client.send(stream_id, framed(request("hold")))
        held = await rig.core.held.get()
        for _ in range(3):
            await client.until(ngh2.PingReceived)
            client.events.clear()
        held.deliver(response_of(held), True)
        assert (await client.status(stream_id))[0] == 0


async def test_an_old_connection_is_sent_away_gracefully() -> None:
    """At its age limit a connection gets GOAWAY, its running call still ends well."""
    async with running("nghttp2", grpc_max_connection_age=50) as rig, connected(rig) as client:
        stream_id = client.open()
        client.send(stream_id, framed(request("hold")))
        held = await rig.core.held.get()
        await client.until(ngh2.GoAwayReceived)
        held.deliver(response_of(held), True)
        assert (await client.status(stream_id))[0] == 0
        await client.until_closed()


async def test_calls_sent_before_the_client_knew_of_the_end_are_served() -> None:
    """What crosses the notice of a shutdown on its way is answered.

    A client in another country sends calls for a whole round trip after the notice has left.
    Some clients never repeat a large one (grpc-java: more than 1 MiB).
    """
    async with running("nghttp2") as rig, connected(rig) as client:
        client.send(client.open(), framed(request()))
        await client.until(ngh2.StreamClosed)
        client.events.clear()
        stopping = asyncio.ensure_future(rig.front.stop(10))
        await asyncio.sleep(0)  # the notice has left, the client has not read it
        calls = [client.open() for _ in range(3)]
        for stream_id in calls:
            client.h2.send_data(stream_id, framed(request(data=b"x" * 4_000)), end_stream=True)
        client.flush()
        assert [(await client.status(stream_id))[0] for stream_id in calls] == [0, 0, 0]
        await stopping


async def test_a_message_that_is_on_its_way_when_the_end_comes_is_served(rig: Rig) -> None:
    """A call counts from its head on: the rest of a large message may take long."""
    async with connected(rig) as client:
        message = framed(request(data=b"x" * 4_000))
        stream_id = client.open()
        client.send(stream_id, message[:100], end=False)
        await client.until(ngh2.SettingsReceived)
        stopping = asyncio.ensure_future(rig.front.stop(10))
        await client.until(ngh2.GoAwayReceived, last_stream_id=stream_id)
        client.send(stream_id, message[100:])
        assert await client.status(stream_id) == (0, "")
        await stopping


async def test_the_last_answer_arrives_although_the_client_still_sends(rig: Rig) -> None:
    """Pings and window updates that nobody reads would reset the socket with the answer in it."""
    transport = rig.front._transport
    assert isinstance(transport, Nghttp2Transport)
    async with connected(rig, receive_bytes=4096) as client:
        client.h2.set_local_window_size(2_000_000)
        client.h2.update_settings({ngh2.Setting.INITIAL_WINDOW_SIZE: 2_000_000})
        stream_id = client.open()
        client.send(stream_id, framed(request("hold", data=b"x" * 1_000_000)))
        await client.until(ngh2.SettingsReceived)
        held = await rig.core.held.get()
        stopping = asyncio.ensure_future(rig.front.stop(10))
        await client.until(ngh2.GoAwayReceived, last_stream_id=stream_id)
        held.deliver(response_of(held), True)
        while transport.active_calls:  # noqa: ASYNC110 - the transport itself waits for the event
            await asyncio.sleep(0)
        client.h2.ping()
        client.flush()
        assert await client.status(stream_id) == (0, "")
    await stopping


async def test_a_client_that_never_answers_the_ping_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that is stuck is given up after a moment, the rest of the grace is not waited."""
    monkeypatch.setattr(nghttp2_connection, "_DRAIN_S", 0.01)
    async with running("nghttp2") as rig, connected(rig) as client:
        client.send(client.open(), framed(request()))
        await client.until(ngh2.StreamClosed)
        await rig.front.stop(10_000)


async def test_the_grace_of_an_old_connection_ends() -> None:
    """After the grace period the connection is cut with its calls."""
    options = {"grpc_max_connection_age": 30, "grpc_max_connection_age_grace": 30}
    async with running("nghttp2", **options) as rig, connected(rig) as client:
        client.send(client.open(), framed(request("hold")))
        await client.until_closed()
        await rig.core.cancelled.get()


async def test_a_paused_stream_does_not_refill_the_window() -> None:
    """While a stream is held up the client cannot send more than its window."""
    async with running("nghttp2", grpc_max_response_pool_size=1) as rig, connected(rig) as client:
        await client.until(ngh2.SettingsReceived)
        stream_id = client.open(STREAM_INFER)
        message = framed(request(data=b"x" * 1_000_000))
        for _ in range(60):
            client.send(stream_id, message, end=False)
        # The answer to a later call proves that the server has read all it will.
        other = client.open(b"/inference.GRPCInferenceService/Nothing")
        client.send(other, b"")
        assert (await client.status(other))[0] == 12
        assert client.h2.queued_body_size(stream_id) > 30_000_000
