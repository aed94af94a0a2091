"""The HTTP service: listener, connections and application put together. Steps 1 and 10 of the walk.

socket → connection.py → session.py ─ infer ──→ exchange.py → infer.py → core
                             └─ all others → uvicorn → routes.py → handlers.py → core
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

from npuserve.protocol.http.connection import connection_class
from npuserve.protocol.http.infer import InferService
from npuserve.protocol.http.listener import Listener
from npuserve.protocol.http.routes import create_application
from npuserve.protocol.http.session import FrontEnd

if TYPE_CHECKING:
    import asyncio

    from npuserve.options import ServerOptions
    from npuserve.protocol.shared_memory import SharedMemoryRegistry
    from npuserve.server.core import InferenceServer

# How often idle and stalled connections are looked for.
_SWEEP_SECONDS = 1.0


class HttpServer:
    """KServe v2 and Triton's extensions over HTTP/1.1.

    Args:
        fast_path: False sends infer requests through the application like all others; the
            replies are the same.
    """

    def __init__(
        self,
        server: InferenceServer,
        options: ServerOptions,
        shared_memory: SharedMemoryRegistry,
        *,
        fast_path: bool = True,
    ) -> None:
        self._loop = server.loop
        self._infer = InferService(server, options, shared_memory)
        self._sweep_timer: asyncio.TimerHandle | None = None
        protocol: dict[str, Any] = {"http": "httptools"}
        if fast_path:
            protocol = {"http": connection_class(FrontEnd(self._infer, options))}
        self._fast_path = fast_path
        self._listener = Listener(
            create_application(server, options, shared_memory, self._infer),
            options.http_address,
            options.http_port,
            reuse_port=options.reuse_http_port,
            timeout_keep_alive=options.http_keep_alive_secs,
            **_tls_options(options),
            **protocol,
        )

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
        if self._fast_path:
            self._sweep()

    async def stop(self, grace_s: float) -> None:
        """Accept no more; requests in progress have `grace_s` seconds to end."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        await self._listener.stop(grace_s)
        self._infer.close()

    def _sweep(self) -> None:
        """Close connections whose clients take too long; one timer instead of one for each."""
        now = self._loop.time()
        for session in self._listener.connections:
            session.expire(now)
        self._sweep_timer = self._loop.call_later(_SWEEP_SECONDS, self._sweep)


def _tls_options(options: ServerOptions) -> dict[str, Any]:
    if not options.http_ssl_certfile:
        return {}
    result: dict[str, Any] = {
        "ssl_certfile": options.http_ssl_certfile,
        "ssl_keyfile": options.http_ssl_keyfile or None,
    }
    if options.http_ssl_ca_certs:
        result["ssl_ca_certs"] = options.http_ssl_ca_certs
        result["ssl_cert_reqs"] = ssl.CERT_REQUIRED
    return result
