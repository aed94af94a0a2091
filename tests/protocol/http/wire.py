"""A connection of the front end without a socket: bytes in and out under the test's control."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from npuserve.options import ServerOptions
from npuserve.protocol.http.connection import connection_class
from npuserve.protocol.http.infer import InferService
from npuserve.protocol.http.session import FrontEnd
from npuserve.protocol.shared_memory import SharedMemoryRegistry
from tests.protocol.http.fakes import FakeServer


class FakeSocket:
    """Has addresses, and the one option that the front end sets.

    Attributes:
        threshold: SO_RCVLOWAT, in bytes.
        refuses: there is no such option.
    """

    threshold = 1
    refuses = False

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 8000

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 50000

    def setsockopt(self, level: int, option: int, value: int) -> None:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        if self.refuses:
            raise OSError(errno.ENOPROTOOPT, "Protocol not available")
        self.threshold = value


class FakeTransport(asyncio.Transport):
    """Collects what is written.

    Attributes:
        socket: below it.
        unsent: how much of what was written waits for the client to read.
        after_write: called then.
    """

    def __init__(self, **extra: Any) -> None:
        self.socket = FakeSocket()
        super().__init__({"socket": self.socket, **extra})
        self.written = bytearray()
        self._reading = True
        self.closed = False
        self.unsent = 0
        self.after_write: Callable[[], None] = lambda: None

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: Any) -> None:
        assert not self.closed, "write to a closed transport"
        self.written += data
        self.after_write()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True


class Wire:
    """One connection over a fake transport; infer requests only, they need no ASGI.

    Attributes:
        transport: the other side.
        session: for its time-outs.
    """

    def __init__(
        self, server: FakeServer, extra: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        options = ServerOptions(http_port=0, **settings)
        self._service = InferService(server, options, SharedMemoryRegistry())  # type: ignore[arg-type]
        config = uvicorn.Config(_no_application, lifespan="off", ws="none", log_config=None)
        config.load()
        self._connection = connection_class(FrontEnd(options, self._service))(
            config=config, server_state=ServerState(), app_state={}, _loop=server.loop
        )
        self._waiting = bytearray()
        self.transport = FakeTransport(**(extra or {}))
        self._connection.connection_made(self.transport)
        self.session = self._connection.session

    @property
    def written(self) -> bytes:
        """All that was written so far."""
        return bytes(self.transport.written)

    @property
    def statuses(self) -> list[int]:
        """The status of every reply."""
        return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d+) ", self.written)]

    @property
    def ids(self) -> list[str]:
        """Request ids of the replies, in order."""
        return re.findall(r'"id":"(\w+)"', self.written.decode("latin-1"))

    def feed(self, data: bytes) -> None:
        """Receive bytes as an event loop does, in as many reads as the buffers ask for.

        Fewer than the socket's threshold wait, as in the kernel.
        """
        self._waiting += data
        while len(self._waiting) >= self.transport.socket.threshold and not self.transport.closed:
            place = self._connection.get_buffer(-1)
            count = min(len(place), len(self._waiting))
            place[:count] = self._waiting[:count]
            del place, self._waiting[:count]
            self._connection.buffer_updated(count)

    def hang_up(self) -> None:
        """The client is gone."""
        self.transport.closed = True
        self._connection.connection_lost(None)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def close(self) -> None:
        self._service.close()


async def _no_application(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("not an infer request")
