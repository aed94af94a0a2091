"""The HTTP service: listener, connections and application put together. Steps 1 and 10 of the walk.

socket → connection.py → session.py ─ infer ──→ exchange.py → infer.py → core
                             └─ all others → uvicorn → routes.py → handlers.py → core
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.errors import InvalidArgumentError
from npuserve.protocol.http.infer import InferService
from npuserve.protocol.http.listener import HttpService, Listener
from npuserve.protocol.http.routes import create_application
from npuserve.protocol.http.session import FrontEnd

if TYPE_CHECKING:
    from npuserve.options import ServerOptions
    from npuserve.protocol.shared_memory import SharedMemoryRegistry
    from npuserve.server.core import InferenceServer


class HttpServer(HttpService):
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
        self._infer = InferService(server, options, shared_memory)
        self._certificates = {
            flag: path
            for flag, path in (
                ("http-ssl-certfile", options.http_ssl_certfile),
                ("http-ssl-keyfile", options.http_ssl_keyfile),
                ("http-ssl-ca-certs", options.http_ssl_ca_certs),
            )
            if path
        }
        self._listener = Listener(
            create_application(server, options, shared_memory, self._infer),
            FrontEnd(options, self._infer if fast_path else None),
            options.http_address,
            options.http_port,
            reuse_port=options.reuse_http_port,
            **_tls_options(options),
        )

    async def start(self) -> None:
        """See `HttpService.start`; files that cannot be read are told apart."""
        for flag, path in self._certificates.items():
            _check_readable(flag, path)
        await super().start()

    async def stop(self, grace_s: float) -> None:
        """See `HttpService.stop`."""
        await super().stop(grace_s)
        self._infer.close()


def _check_readable(flag: str, path: str) -> None:
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise InvalidArgumentError(f"--{flag}: cannot read '{path}': {error.strerror}") from error


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
