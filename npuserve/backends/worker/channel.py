"""A worker's end of its channel: one SOCK_SEQPACKET socket and the shared memory behind it.

Runs in every interpreter a worker may have: standard library and NumPy only.
"""

from __future__ import annotations

import array
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from npuserve.backends.worker import wire
from npuserve.backends.worker.shm import SharedMemoryLink
from npuserve.buffer_pool import BufferPool

ANCILLARY_BYTES = socket.CMSG_SPACE(wire.MAX_FDS * 4)

# One buffer for good: a fresh one for each message would cost more than the message.
ROOM_BYTES = 4 * wire.MAX_DATAGRAM_BYTES


def fds_of(ancillary: list[Any]) -> list[int]:
    """The file descriptors that came with a message."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def rights(fds: list[int]) -> list[Any]:
    """Ancillary data that carries file descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]


def transmit(
    link: SharedMemoryLink, put: Callable[[bytes, list[int]], None], kind: int, payload: Any
) -> None:
    """Send a message and the news of shared memory, as one datagram if they fit.

    Args:
        put: sends one datagram with file descriptors.
    """
    memory, fds = link.take_memory()
    while memory is not None and link.has_news:  # more descriptors than one message carries
        put(wire.pack(wire.MEMORY, memory, None), fds)
        memory, fds = link.take_memory()
    data = wire.pack(kind, memory, payload)
    if len(data) > wire.MAX_DATAGRAM_BYTES:
        if memory is not None:  # blocks have to be known before anything refers to them
            put(wire.pack(wire.MEMORY, memory, None), fds)
            data = wire.pack(kind, None, payload)
        reference = link.lend(data)
        memory, fds = link.take_memory()
        data = wire.pack(wire.SPILLED, memory, reference)
    put(data, fds)


class Channel:
    """Sends and receives messages, blocking; any thread may send, one at a time receives.

    Attributes:
        lock: held while a message that refers to shared memory is made and sent, so that what
            announces memory never comes after what refers to it. Re-entrant: the garbage
            collector may end a response sender, which then sends, in the middle of it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.lock = threading.RLock()
        self.link = SharedMemoryLink(BufferPool())
        self.socket = sock
        self._room = memoryview(bytearray(ROOM_BYTES))

    def send(self, kind: int, payload: Any) -> None:
        """Send one message; waits while the server is behind. Nothing once the server is gone."""
        with self.lock:
            transmit(self.link, self._put, kind, payload)

    def _put(self, data: bytes, fds: list[int]) -> None:
        try:
            if fds:
                self.socket.sendmsg([data], rights(fds))
            else:
                self.socket.send(data)
        except (BrokenPipeError, ConnectionResetError):
            # The end of the server shows as end of file where messages are received.
            return

    def receive(self, flags: int = 0) -> wire.Message | None:
        """The next message, or None when the server is gone.

        Raises:
            BlockingIOError: with MSG_DONTWAIT, if there is none.
        """
        try:
            size, ancillary, _, _ = self.socket.recvmsg_into([self._room], ANCILLARY_BYTES, flags)
        except ConnectionResetError:
            return None
        if not size:
            return None
        message = wire.unpack(self._room[:size])
        kind, memory, payload = message
        if memory is not None:
            with self.lock:
                self.link.accept_memory(memory, fds_of(ancillary))
        if kind == wire.SPILLED:
            return wire.unpack(self.link.borrow(payload))
        return message

    def close_after_fork(self) -> None:
        """In a forked process: the channel is the other's alone."""
        os.close(self.socket.detach())
