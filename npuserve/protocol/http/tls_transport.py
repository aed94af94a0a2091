"""Writes to a TLS connection a piece at a time, so that one sees whether its client reads.

uvloop encrypts all it is given at once and hands it on to the socket's transport, whose buffer
nobody sees: a reply that the client is still reading would be taken for sent, its connection for
idle, and whatever is unread 30 seconds after `close` is thrown away. Here replies wait outside and
follow as the client reads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npuserve.protocol.http.session import HttpSession

# At once; uvloop says stop after two of them.
PIECE_BYTES = 256 * 1024


class TlsTransport(asyncio.Transport):
    """What an `HttpSession` writes to.

    Args:
        transport: the event loop's; its flow control ends in `pause_writing` and `resume_writing`.
        session: hears that its client reads too slowly, or reads again.
    """

    def __init__(self, transport: asyncio.Transport, session: HttpSession) -> None:
        super().__init__()
        self._transport = transport
        self._session = session
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._full = False  # the transport below wants no more
        self._paused = False  # the session was told so
        self._closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As the transport below."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """As the transport below."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """As the transport below."""
        self._transport.resume_reading()

    # -------------------------------------------------------------------- writing

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Send, or keep until the client has read what was sent before."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        """As `write`."""
        if self._closing:
            return
        for data in list_of_data:
            self._waiting.append(memoryview(data))
            self._waiting_bytes += len(data)
        self._go_on()

    def get_write_buffer_size(self) -> int:
        """Bytes that wait here and below."""
        return self._waiting_bytes + self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        """The transport below has enough."""
        self._full = True
        self._tell()

    def resume_writing(self) -> None:
        """The transport below can take more."""
        self._full = False
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and not self._full and not self._transport.is_closing():
            data = self._waiting.popleft()
            if len(data) > PIECE_BYTES:
                self._waiting.appendleft(data[PIECE_BYTES:])
                data = data[:PIECE_BYTES]
            self._waiting_bytes -= len(data)
            self._transport.write(data)
        if self._closing and not self._waiting:
            self._transport.close()
        self._tell()

    def _tell(self) -> None:
        paused = self._full or bool(self._waiting)
        if paused is not self._paused:
            self._paused = paused
            if paused:
                self._session.pause_writing()
            else:
                self._session.resume_writing()

    # -------------------------------------------------------------------- the end

    def is_closing(self) -> bool:
        """Whether it is or will be closed."""
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        """Close as soon as all is sent; what still comes in does not count."""
        if not self._closing:
            self._closing = True
            self._go_on()

    def abort(self) -> None:
        """Close at once."""
        self._closing = True
        self.drop()
        self._transport.abort()

    def drop(self) -> None:
        """Nobody will read what waits: free it."""
        self._waiting.clear()
        self._waiting_bytes = 0
