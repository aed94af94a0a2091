"""The server's end of a worker's channel. Runs on the event loop and never blocks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from npuserve.backends.worker import wire
from npuserve.backends.worker.channel import (
    ANCILLARY_BYTES,
    ROOM_BYTES,
    fds_of,
    rights,
    transmit,
)
from npuserve.backends.worker.shm import SharedMemoryLink

if TYPE_CHECKING:
    from npuserve.buffer_pool import BufferPool

# Give memory back to the worker without waiting for the next batch when this much has gathered.
_RETURN_COUNT = 8
_RETURN_BYTES = 16 << 20


class Connection:
    """The channel of one worker process, from its start to its death. Loop thread only.

    Args:
        on_message: gets (kind, payload).
        on_lost: called once when the worker closed its end, or nothing it sends can be read.
        sock: this end, if there is a channel already.

    Attributes:
        peer: the other end; of a channel that was there already, this one.
        failure: why nothing can be read; "" when the worker closed its end.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: BufferPool,
        on_message: Callable[[int, Any], None],
        on_lost: Callable[[], None],
        sock: socket.socket | None = None,
    ) -> None:
        self._loop = loop
        self.link = SharedMemoryLink(pool, self._memory_waits, relays=True)
        self._on_message = on_message
        self._on_lost = on_lost
        pair = (sock, sock) if sock else socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket, self.peer = pair
        self._socket.setblocking(False)
        self._room = memoryview(bytearray(ROOM_BYTES))
        # Messages the full socket did not take; invariant: not empty ⇔ a writer is registered.
        self._backlog: deque[tuple[bytes, list[int]]] = deque()
        self._return_announced = False
        self.closed = False
        self.failure = ""
        self._paused = False
        loop.add_reader(self._socket, self._on_readable)

    def close(self) -> None:
        """Drop the channel and everything lent through it."""
        if self.closed:
            return
        self.closed = True
        if not self._paused:
            self._loop.remove_reader(self._socket)
        if self._backlog:
            self._loop.remove_writer(self._socket)
            self._backlog.clear()
        self._socket.close()
        self.link.close()

    def close_after_fork(self) -> None:
        """In a forked process: the channel is its parent's alone."""
        if not self.closed:
            os.close(self._socket.detach())

    # -- sending ------------------------------------------------------------------------------

    def send(self, kind: int, payload: Any) -> None:
        """Send a message, now or as soon as the socket takes it."""
        if not self.closed:
            transmit(self.link, self._put, kind, payload)

    def _put(self, data: bytes, fds: list[int]) -> None:
        if self._backlog:
            self._backlog.append((data, fds))
        elif not self._try_send(data, fds):
            self._backlog.append((data, fds))
            self._loop.add_writer(self._socket, self._on_writable)

    def _try_send(self, data: bytes, fds: list[int]) -> bool:
        try:
            if fds:
                self._socket.sendmsg([data], rights(fds))
            else:
                self._socket.send(data)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            return True  # the worker is dead; reading the end of the channel deals with it
        return True

    def _on_writable(self) -> None:
        backlog = self._backlog
        while backlog:
            if not self._try_send(*backlog[0]):
                return
            backlog.popleft()
        self._loop.remove_writer(self._socket)

    def _memory_waits(self, count: int, size: int) -> None:
        """In any thread: views of the worker's memory are gone, its tokens wait to go back."""
        if (count >= _RETURN_COUNT or size >= _RETURN_BYTES) and not self._return_announced:
            self._return_announced = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the worker is gone too
                self._loop.call_soon_threadsafe(self._return_memory)

    def _return_memory(self) -> None:
        self._return_announced = False
        if not self.closed and self.link.has_news:
            self.send(wire.MEMORY, None)

    # -- receiving ----------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Read nothing for now, so that the full channel blocks the worker, or go on."""
        if self.closed or paused == self._paused:
            return
        self._paused = paused
        if paused:
            self._loop.remove_reader(self._socket)
        else:
            self._loop.add_reader(self._socket, self._on_readable)

    @property
    def has_unread(self) -> bool:
        """Whether a message, or the end of the channel, has come that was not taken yet."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            pass  # reading deals with it
        return True

    def end(self) -> None:
        """The worker has exited: take what it sent, then report the loss.

        Also when the end of the channel cannot be seen: while paused, or because a process that
        the model started keeps the worker's end open.
        """
        while not self.closed and self._read_once():
            pass
        if not self.closed:
            self._lost()

    def _on_readable(self) -> None:
        self._read_once()

    def _read_once(self) -> bool:
        """Take one message, or the end, and tell whether there was any."""
        try:
            size, ancillary, _, _ = self._socket.recvmsg_into([self._room], ANCILLARY_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # The worker left something unread. Told once, before what it sent itself.
            return True
        if not size:
            self._lost()
            return True
        try:
            message = wire.unpack(self._room[:size])
            if message[1] is not None:
                self.link.accept_memory(message[1], fds_of(ancillary))
            if message[0] == wire.SPILLED:
                message = wire.unpack(self.link.borrow(message[2]))
        except (wire.WireError, OSError) as error:  # no room for memory, no descriptors left
            self.failure = str(error)
            self._lost()
            return True
        self._on_message(message[0], message[2])
        return True

    def _lost(self) -> None:
        self.close()
        self._on_lost()
