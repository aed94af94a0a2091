"""The Prometheus endpoint on a port of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from npuserve.protocol.http.listener import HttpService, Listener
from npuserve.protocol.http.session import FrontEnd
from npuserve.protocol.prometheus import CONTENT_TYPE, render

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from npuserve.options import ServerOptions
    from npuserve.server.core import InferenceServer


class MetricsServer(HttpService):
    """`GET /metrics`; any other path is an empty 200, any other method 405, as with Triton."""

    def __init__(self, server: InferenceServer, options: ServerOptions) -> None:
        self._server = server
        self._listener = Listener(
            self._application,
            FrontEnd(options),
            options.metrics_address or options.http_address,
            options.metrics_port,
        )

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._answer(scope["method"], scope["path"])
        await response(scope, receive, send)

    def _answer(self, method: str, path: str) -> Response:
        if method != "GET":
            return Response(status_code=405)
        if path != "/metrics":
            return Response(status_code=200)
        return Response(render(self._server), media_type=CONTENT_TYPE)
