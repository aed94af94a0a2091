"""The fast transport: HTTP/2 by libnghttp2 inside the event loop, no thread, no task a call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from npuserve.protocol.grpc.nghttp2_connection import Connection

if TYPE_CHECKING:
    from npuserve.protocol.grpc.transport import Method, TransportOptions

_READ_BYTES = 256 * 1024
_BACKLOG = 2048
_CLOSE_S = 2.0  # for the last bytes of connections that are being closed
_GZIP_LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}


class Nghttp2Transport:
    """Listener of the libnghttp2 transport; implements `Transport`.

    Attributes:
        methods: by ":path".
        read_buffer: where sockets are read to, one after the other.
        active_calls: calls in progress on all connections.
        stopping: connections that come now are turned away.
    """

    def __init__(
        self,
        methods: Iterable[Method],
        options: TransportOptions,
        loop: asyncio.AbstractEventLoop,
        lease: Callable[[int], memoryview],
    ) -> None:
        self.methods = {method.path.encode(): method for method in methods}
        self.options = options
        self.loop = loop
        self.lease = lease
        self.gzip_level = _GZIP_LEVELS[options.compression_level]
        self.read_buffer = memoryview(bytearray(_READ_BYTES))
        self.connections: set[Connection] = set()
        self.active_calls = 0
        self.stopping = False
        self._change: asyncio.Event | None = None
        self._listener: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """See `Transport.port`."""
        assert self._listener is not None
        return int(self._listener.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """See `Transport.start`."""
        self._listener = await self.loop.create_server(
            lambda: Connection(self),
            self.options.address,
            self.options.port,
            reuse_port=self.options.reuse_port or None,
            backlog=_BACKLOG,
        )

    async def stop(self, grace_s: float, refuse: Callable[[], None]) -> None:
        """See `Transport.stop`."""
        if self._listener is None:
            return
        self.stopping = True
        end = self.loop.time() + grace_s
        self._listener.close()
        for connection in list(self.connections):
            connection.drain()
        await self._wait_until(lambda: all(each.told for each in self.connections), grace_s)
        refuse()
        await self._wait_until(lambda: not self.active_calls, end - self.loop.time())
        for connection in list(self.connections):
            connection.close()
        await self._wait_until(lambda: not self.connections, _CLOSE_S)
        for connection in list(self.connections):
            connection.abort()

    def changed(self) -> None:
        """A call or a connection ended, or a client knows that it will."""
        if self._change is not None:
            self._change.set()

    async def _wait_until(self, reached: Callable[[], bool], timeout_s: float) -> None:
        """Return once `reached`, or after the time-out."""
        change = self._change = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not reached():
                    change.clear()
                    await change.wait()
