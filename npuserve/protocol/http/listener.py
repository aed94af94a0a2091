"""A listening socket with uvicorn behind it, on the running event loop.

uvicorn's server is started and stopped step by step instead of by its `serve`: the process's
signals belong to `app.py`, and its polling main loop is not needed.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import TYPE_CHECKING, Any

import uvicorn

from npuserve.errors import InvalidArgumentError, UnavailableError
from npuserve.protocol.http.connection import connection_class

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from npuserve.protocol.http.session import FrontEnd

    Application: TypeAlias = Callable[..., Any]

_BACKLOG = 2048
# How often idle and stalled connections are looked for.
_SWEEP_SECONDS = 1.0
_DRAIN_INTERVAL_SECONDS = 0.01


class Listener:
    """Serves an ASGI application at an address.

    Args:
        application: what answers the requests.
        front: what the connections share; may answer infer requests itself.
        address, port: where to listen; port 0 takes a free one.
        reuse_port: share the port with other processes.
        uvicorn_options: further arguments of `uvicorn.Config`.
    """

    def __init__(
        self,
        application: Application,
        front: FrontEnd,
        address: str,
        port: int,
        *,
        reuse_port: bool = False,
        **uvicorn_options: Any,
    ) -> None:
        self._address = address
        self.port = port
        self._reuse_port = reuse_port
        self._socket: socket.socket | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        config = uvicorn.Config(
            application,
            http=connection_class(front),  # type: ignore[arg-type]
            interface="asgi3",  # a bound method is not recognised as such
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            **uvicorn_options,
        )
        self._uvicorn = uvicorn.Server(config)

    async def start(self) -> None:
        """Bind and accept.

        Raises:
            UnavailableError: the address is taken or not of this machine.
            InvalidArgumentError: certificates that cannot be used.
        """
        server, config = self._uvicorn, self._uvicorn.config
        if not config.loaded:
            try:
                config.load()
            except OSError as error:  # ssl.SSLError is one
                raise InvalidArgumentError(
                    f"--http-ssl-certfile, -keyfile or -ca-certs cannot be used: {error}"
                ) from error
        server.lifespan = config.lifespan_class(config)
        self._socket = _bind(self._address, self.port, self._reuse_port)
        self.port = self._socket.getsockname()[1]
        await server.startup(sockets=[self._socket])
        self._sweep()

    def _sweep(self) -> None:
        """Close connections whose clients take too long; one timer instead of one for each."""
        loop = asyncio.get_running_loop()
        self._sweep_timer = loop.call_later(_SWEEP_SECONDS, self._sweep)
        for session in self._connections:
            loop.call_soon(session.expire, loop.time())  # an error of one does not end the sweep

    @property
    def _connections(self) -> list[Any]:
        """The `HttpSession`s of the open connections."""
        return list(self._uvicorn.server_state.connections)

    async def stop(self, grace_s: float) -> None:
        """Accept no more, wait for the replies in progress, then cut off what is left."""
        if self._socket is None:
            return
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        state = self._uvicorn.server_state
        for server in self._uvicorn.servers:
            server.close()
        self._socket.close()
        self._socket = None
        await asyncio.sleep(0)  # requests that have arrived are read before idle sockets close
        for connection in self._connections:
            connection.shutdown()
        try:
            async with asyncio.timeout(grace_s):
                # uvicorn tells nobody of their end.
                while state.connections or state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(_DRAIN_INTERVAL_SECONDS)
        except TimeoutError:
            for connection in self._connections:
                connection.transport.abort()
            for task in state.tasks:
                task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


class HttpService:
    """Base of the services that listen for HTTP; a subclass sets `_listener`."""

    _listener: Listener

    @property
    def port(self) -> int:
        """The port, once started."""
        return self._listener.port

    async def start(self) -> None:
        """Bind and accept.

        Raises:
            UnavailableError: the address is taken.
        """
        await self._listener.start()

    async def stop(self, grace_s: float) -> None:
        """Accept no more; requests in progress have `grace_s` seconds to end."""
        await self._listener.stop(grace_s)


def _bind(address: str, port: int, reuse_port: bool) -> socket.socket:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UnavailableError(f"cannot listen at '{address}:{port}': {error}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(place)
        listening.listen(_BACKLOG)  # now, so that a taken port is found here
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise UnavailableError(f"Socket '{address}:{port}' already in use ") from error
        raise UnavailableError(f"cannot listen at '{address}:{port}': {error}") from error
    return listening
