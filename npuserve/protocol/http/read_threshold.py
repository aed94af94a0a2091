"""How much of a large body the kernel collects before it wakes the server.

Without it a client on a fast network wakes the loop for every packet or two: for 4.9 MB some
hundred times, and each wake-up of a sleeping core costs the sender, too. With it a body is
received in a few large pieces. tcp(7) calls the socket option SO_RCVLOWAT; the end of a stream, an
error and a full socket buffer wake the server all the same.
"""

from __future__ import annotations

import socket
from typing import Any

# A larger piece gains nothing; it would only hold more memory in the kernel.
PIECE_BYTES = 1 << 20


class ReadThreshold:
    """The threshold of one connection.

    Args:
        transport: the connection's. One with TLS is left alone: what it has received and not
            yet decrypted is no longer in the socket, so it could wait for bytes that never come.
    """

    __slots__ = ("_bytes", "_socket")

    def __init__(self, transport: Any) -> None:
        encrypted = transport.get_extra_info("sslcontext") is not None
        self._socket = None if encrypted else transport.get_extra_info("socket")
        self._bytes = 1

    def expect(self, missing: int) -> None:
        """So many bytes of a body are still to come, and surely will; 0 after its end."""
        self._set(min(missing, PIECE_BYTES) or 1)

    def clear(self) -> None:
        """Be woken by any byte: the next one of a slow client shows that it is still there."""
        self._set(1)

    def _set(self, count: int) -> None:
        if count == self._bytes or self._socket is None:
            return
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
        except OSError:  # a system without it; only speed is lost
            self._socket = None
        self._bytes = count
