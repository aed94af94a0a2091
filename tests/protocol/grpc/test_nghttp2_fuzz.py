"""Random conversations, damaged on the way, with the libnghttp2 transport in memory."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import ngh2
import pytest

from npuserve.options import ServerOptions
from npuserve.protocol.grpc.framing import frame_prefix
from npuserve.protocol.grpc.infer import InferFrontEnd
from npuserve.protocol.grpc.nghttp2_connection import Connection
from npuserve.protocol.grpc.nghttp2_transport import Nghttp2Transport
from npuserve.protocol.grpc.server import transport_options
from npuserve.protocol.grpc.servicer import Servicer
from npuserve.protocol.shared_memory import SharedMemoryRegistry
from tests.protocol.grpc.conftest import request
from tests.protocol.grpc.fakes import FakeServer, response_of

MODELS = ("echo", "hold", "stream", "nope")
SIZES = (0, 4, 100, 40_000, 70_000)
CHUNKS = (100, 5_000, 262_144)


class Socket(asyncio.Transport):
    """Takes everything and forgets it."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: Any) -> None:
        """Forget it."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """No limits."""

    def close(self) -> None:
        """Note it."""
        self.closed = True

    def write_eof(self) -> None:
        """The client answers it at once."""
        self.closed = True

    def is_closing(self) -> bool:
        """Whether one of `close` and `write_eof` was called."""
        return self.closed

    abort = close


class FuzzRig:
    """A transport without a listener, over a fake core.

    Attributes:
        errors: what was raised into the loop.
    """

    def __init__(self) -> None:
        self.errors: list[dict[str, Any]] = []
        core = self.core = FakeServer()
        core.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        core.loop.set_debug(False)
        registry = SharedMemoryRegistry()
        servicer = Servicer(
            core,  # type: ignore[arg-type]
            registry,
            InferFrontEnd(core, registry, None),  # type: ignore[arg-type]
            restricted={},
            max_unsent=2,
        )
        options = transport_options(ServerOptions(model_repository=("unused",)))
        self.transport = Nghttp2Transport(
            servicer.methods(), options, core.loop, core.buffer_pool.lease
        )

    def connect(self) -> tuple[Connection, Socket]:
        """A new connection and its end of the socket."""
        connection, socket = Connection(self.transport), Socket()
        connection.connection_made(socket)
        return connection, socket


@pytest.fixture
async def rig() -> FuzzRig:
    """See `FuzzRig`."""
    return FuzzRig()


def conversation(dice: random.Random, paths: list[bytes]) -> bytearray:
    """What a client sends in a few calls, some of them odd, some of the bytes damaged."""
    client = ngh2.Connection(ngh2.Role.CLIENT)
    client.initiate_connection({4: dice.choice([0, 100, 1 << 20])})
    data = bytearray()
    for _ in range(dice.randrange(1, 6)):
        fields = {
            b":method": b"POST", b":scheme": b"http", b":path": dice.choice(paths),
            b":authority": b"x", b"content-type": b"application/grpc",
        }  # fmt: skip
        if dice.random() < 0.3:
            fields[b"grpc-timeout"] = dice.choice([b"1n", b"0S", b"5S", b"x"])
        if dice.random() < 0.2:
            fields[b"grpc-encoding"] = dice.choice([b"gzip", b"deflate", b"q"])
        stream_id = client.send_request(list(fields.items()))
        for _ in range(dice.randrange(3)):
            message = request(dice.choice(MODELS), dice.randbytes(dice.choice(SIZES)))
            body = message.SerializeToString()
            size = len(body) if dice.random() < 0.9 else dice.randrange(1 << 20)
            client.send_data(stream_id, frame_prefix(size, dice.random() < 0.1) + body)
        if dice.random() < 0.6:
            client.end_stream(stream_id)
        data += client.data_to_send()
        if dice.random() < 0.2:
            client.ping()
    data += client.data_to_send()
    for _ in range(dice.choice([0, 0, 1, 3, 6])):
        index = dice.randrange(24, len(data))
        if dice.random() < 0.5:
            data[index] = dice.randrange(256)
        else:
            del data[index : index + dice.randrange(1, 20)]
    return data


def play(connection: Connection, socket: Socket, data: bytearray, dice: random.Random) -> None:
    """Feed the bytes in pieces, with a socket that blocks now and then."""
    room = connection.get_buffer(-1)
    while data and not socket.closed:
        size = min(dice.choice(CHUNKS), len(data))
        room[:size] = data[:size]
        del data[:size]
        connection.buffer_updated(size)
        if dice.random() < 0.1:
            connection.pause_writing()
        elif dice.random() < 0.2:
            connection.resume_writing()


def answer_held(core: FakeServer, dice: random.Random) -> None:
    """Answer some of the requests that wait."""
    while not core.held.empty():
        held = core.held.get_nowait()
        if dice.random() < 0.7:
            held.deliver(response_of(held), dice.random() < 0.5)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream_id.to_bytes(4, "big") + payload


def call_head() -> bytes:
    """The header block of a call."""
    client = ngh2.Connection(ngh2.Role.CLIENT)
    client.initiate_connection({})
    client.data_to_send()
    client.send_request(
        [
            (b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x"),
            (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
            (b"content-type", b"application/grpc"),
        ]
    )  # fmt: skip
    return client.data_to_send()[9:]


def rapid_reset() -> bytes:
    """Calls opened and reset at once (CVE-2023-44487)."""
    head, reset = call_head(), (8).to_bytes(4, "big")
    return b"".join(
        frame(1, 4, stream_id, head) + frame(3, 0, stream_id, reset)
        for stream_id in range(1, 90_001, 2)
    )


# Name → what a client sends after the preface, repeated until the server hangs up.
FLOODS = {
    "rapid reset": rapid_reset(),
    "continuation": frame(1, 0, 1, call_head()) + frame(9, 0, 1, b"\x40\1a\1b" * 100) * 200,
    "empty continuation": frame(1, 0, 1, call_head()) + frame(9, 0, 1) * 2000,
    "settings": frame(4, 0, 0) * 20_000,
    "ping": frame(6, 0, 0, b"12345678") * 20_000,
    "empty data": frame(1, 4, 1, call_head()) + frame(0, 0, 1) * 20_000,
}


@pytest.mark.parametrize("name", FLOODS)
async def test_floods_end_their_connection(rig: FuzzRig, name: str) -> None:
    """Nothing is raised into the loop, nothing is left; the socket is closed soon."""
    connection, socket = rig.connect()
    head = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
    data = memoryview(head + FLOODS[name])
    room = connection.get_buffer(-1)
    while data and not socket.closed:
        count = min(len(room), len(data))
        room[:count] = data[:count]
        data = data[count:]
        connection.buffer_updated(count)
    assert socket.closed
    connection.connection_lost(None)
    assert rig.transport.active_calls == 0
    await asyncio.sleep(0)  # what was scheduled
    assert rig.errors == []


@pytest.mark.parametrize("seed", range(4))
async def test_no_conversation_breaks_the_server(rig: FuzzRig, seed: int) -> None:
    """Whatever comes, nothing is raised into the loop and no call is left over."""
    paths = [b"/no/method", *rig.transport.methods] + list(rig.transport.methods)[:2] * 20
    dice = random.Random(seed)
    for _ in range(150):
        connection, socket = rig.connect()
        play(connection, socket, conversation(dice, paths), dice)
        answer_held(rig.core, dice)
        await asyncio.sleep(0)  # what was scheduled is written
        for end in (connection.drain, connection.close):
            if dice.random() < 0.3:
                end()
        connection.connection_lost(None)
        assert rig.transport.active_calls == 0
        assert not rig.transport.connections
    await asyncio.sleep(0)
    assert rig.errors == []


async def test_a_connection_accepted_at_the_last_moment_is_turned_away(rig: FuzzRig) -> None:
    """Before it has said a word, so that its client tries the next address with all its calls."""
    rig.transport.stopping = True
    connection, socket = rig.connect()
    assert socket.closed
    connection.connection_lost(None)
    assert not rig.transport.connections
