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

    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self.closed

    abort = close


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


@pytest.mark.parametrize("seed", range(4))
async def test_no_conversation_breaks_the_server(seed: int) -> None:
    """Whatever comes, nothing is raised into the loop and no call is left over."""
    errors: list[dict[str, Any]] = []
    core = FakeServer()
    core.loop.set_exception_handler(lambda _, context: errors.append(context))
    core.loop.set_debug(False)
    options = ServerOptions(model_repository=("unused",))
    front_end = InferFrontEnd(core, SharedMemoryRegistry(), None)  # type: ignore[arg-type]
    servicer = Servicer(
        core,  # type: ignore[arg-type]
        SharedMemoryRegistry(),
        front_end,
        restricted={},
        max_unsent=2,
    )
    methods = servicer.methods()
    lease = core.buffer_pool.lease
    transport = Nghttp2Transport(methods, transport_options(options), core.loop, lease)
    paths = [b"/no/method", *(method.path.encode() for method in methods)] + [
        method.path.encode() for method in methods[:2] * 20
    ]
    dice = random.Random(seed)
    for _ in range(150):
        connection, socket = Connection(transport), Socket()
        connection.connection_made(socket)
        play(connection, socket, conversation(dice, paths), dice)
        answer_held(core, dice)
        await asyncio.sleep(0)  # what was scheduled is written
        for end in (connection.drain, connection.close):
            if dice.random() < 0.3:
                end()
        connection.connection_lost(None)
        assert transport.active_calls == 0
        assert not transport.connections
    await asyncio.sleep(0)
    assert errors == []
