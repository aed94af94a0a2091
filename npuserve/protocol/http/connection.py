"""A client's socket: receives large bodies straight into their place, small reads for the parser.

uvicorn creates one per connection (it takes a protocol class). A BufferedProtocol of its own, as
uvicorn's is none: the event loop asks where the next bytes go, so that a large body is copied
once, from the kernel into the pooled buffer that a worker process can map.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from npuserve.protocol.http.session import FrontEnd, HttpSession
from npuserve.protocol.http.tls_transport import TlsTransport

if TYPE_CHECKING:
    from collections.abc import Callable


class HttpConnection(asyncio.BufferedProtocol):
    """Socket side of an `HttpSession`.

    Attributes:
        session: what the bytes mean.
    """

    __slots__ = ("_direct", "_read_buffer", "_writer", "session")

    def __init__(self, front: FrontEnd, **uvicorn_arguments: Any) -> None:
        self.session = HttpSession(front, **uvicorn_arguments)
        self._writer: HttpSession | TlsTransport = self.session
        self._read_buffer = front.read_buffer
        self._direct = False

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go; the event loop reads at once."""
        place = self.session.unfilled
        self._direct = place is not None
        return self._read_buffer if place is None else place

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` bytes were received."""
        if self._direct:
            self.session.received_body(nbytes)
        else:
            self.session.received(self._read_buffer[:nbytes])

    def connection_made(self, transport: Any) -> None:
        """The socket is open."""
        if transport.get_extra_info("sslcontext") is not None:
            transport = self._writer = TlsTransport(transport, self.session)
        self.session.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        if isinstance(self._writer, TlsTransport):
            self._writer.drop()
        self.session.connection_lost(exc)

    def eof_received(self) -> None:
        """The client has closed its side: close ours."""

    def pause_writing(self) -> None:
        """Too much waits to be written."""
        self._writer.pause_writing()

    def resume_writing(self) -> None:
        """The client has read most of it."""
        self._writer.resume_writing()


def connection_class(front: FrontEnd) -> Callable[..., HttpConnection]:
    """What uvicorn is given as its protocol class: `HttpConnection` with its front end."""

    class BoundHttpConnection(HttpConnection):
        """An `HttpConnection` of one listener."""

        def __init__(self, **uvicorn_arguments: Any) -> None:
            super().__init__(front, **uvicorn_arguments)

    return BoundHttpConnection
