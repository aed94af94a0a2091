"""The server's end of a worker's channel, with the other end in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from npuserve.backends.worker import wire
from npuserve.backends.worker.channel import Channel
from npuserve.backends.worker.connection import Connection
from npuserve.buffer_pool import BufferPool


class _Ends:
    """A connection and the channel of its worker."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.received: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self.lost = asyncio.Event()
        self.connection = Connection(loop, BufferPool(), self._take, self.lost.set)
        self.channel = Channel(self.connection.peer)

    def _take(self, kind: int, payload: Any) -> None:
        if kind != wire.MEMORY:
            self.received.put_nowait((kind, payload))


@pytest.fixture
async def ends() -> AsyncIterator[_Ends]:
    ends = _Ends()
    yield ends
    ends.connection.close()
    ends.channel.socket.close()


async def test_messages_wait_while_the_worker_is_behind(ends: _Ends) -> None:
    """More than the socket holds is kept and arrives in order."""
    count = 2000
    for number in range(count):
        ends.connection.send(wire.EXECUTE, (number, bytes(1000)))
    for number in range(count):
        message = await asyncio.to_thread(ends.channel.receive)
        assert message is not None
        assert message[2][0] == number


@pytest.mark.parametrize("size", [10, wire.MAX_DATAGRAM_BYTES, 3 << 20])
async def test_long_messages_go_through_shared_memory(ends: _Ends, size: int) -> None:
    """A message of any length arrives, both ways, and its memory comes back."""
    ends.connection.send(wire.EXECUTE, bytes(size))
    message = await asyncio.to_thread(ends.channel.receive)
    assert message == (wire.EXECUTE, None, bytes(size))
    await asyncio.to_thread(ends.channel.send, wire.RESULT, bytes(size))
    assert await ends.received.get() == (wire.RESULT, bytes(size))
    assert ends.connection.link.lent_count == 0


async def test_end_of_the_worker_is_noticed_once(ends: _Ends) -> None:
    """The closed channel is reported, and later messages go nowhere."""
    ends.channel.socket.shutdown(socket.SHUT_RDWR)
    await ends.lost.wait()
    assert ends.connection.closed
    ends.connection.send(wire.EXECUTE, None)


async def test_what_a_worker_sent_before_its_death_arrives(ends: _Ends) -> None:
    """Although it left a message unread, of which the kernel tells first."""
    ends.connection.send(wire.EXECUTE, 1)
    ends.channel.send(wire.RESULT, 1)
    ends.channel.send(wire.RESULT, 2)
    ends.channel.socket.close()
    await ends.lost.wait()
    assert [ends.received.get_nowait() for _ in range(2)] == [(wire.RESULT, 1), (wire.RESULT, 2)]


async def test_nonsense_ends_the_connection(ends: _Ends) -> None:
    """A worker that sends something else is given up."""
    ends.channel.socket.send(b"\xff nonsense")
    await ends.lost.wait()


async def test_any_number_of_blocks_is_announced(ends: _Ends) -> None:
    """More new blocks than one message carries descriptors for arrive all the same."""
    parts = [bytes([number]) * wire.INLINE_BYTES for number in range(wire.MAX_FDS + 50)]
    ends.connection.send(wire.EXECUTE, [ends.connection.link.lend(part) for part in parts])
    message = await asyncio.to_thread(ends.channel.receive)
    while message is not None and message[0] == wire.MEMORY:
        message = await asyncio.to_thread(ends.channel.receive)
    assert message is not None
    assert [bytes(ends.channel.link.borrow(ref)) for ref in message[2]] == parts


async def test_exit_of_a_worker_whose_end_stays_open_is_noticed(ends: _Ends) -> None:
    """What it sent is taken first, also from a paused channel."""
    ends.connection.pause(True)
    ends.channel.send(wire.RESULT, 1)
    ends.connection.end()
    assert ends.received.get_nowait() == (wire.RESULT, 1)
    assert ends.lost.is_set()
