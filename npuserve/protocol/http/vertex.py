"""The endpoint that Google Vertex AI calls: a health route and a predict route.

Both come from the environment of the container. A predict request runs the default model, or goes
to the path that its redirect header names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from starlette.responses import Response

from npuserve.errors import InvalidArgumentError
from npuserve.protocol.http.cloud_forward import Forward, error_response
from npuserve.protocol.http.cloud_mime import BinaryMime
from npuserve.protocol.http.infer import InferService
from npuserve.protocol.http.listener import HttpService, Listener
from npuserve.protocol.http.routes import create_application
from npuserve.protocol.http.session import FrontEnd
from npuserve.protocol.prometheus import CONTENT_TYPE, render

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

    from npuserve.options import ServerOptions
    from npuserve.protocol.shared_memory import SharedMemoryRegistry
    from npuserve.server.core import InferenceServer

_MIME = BinaryMime("application/vnd.vertex-ai-triton.binary+json")
_REDIRECT = b"x-vertex-ai-triton-redirect"

# What a redirect must not reach: a public endpoint may run models, not manage the server.
_FORBIDDEN = re.compile(
    r"v2/(system|cuda)sharedmemory(/.*)?/(un)?register|v2/repository(/.*)?/(un)?load"
)
_KNOWN = re.compile(r"v2|v2/.+|metrics")


class VertexAiServer(HttpService):
    """Health and predict routes of Vertex AI.

    Args:
        environ: holds AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE.

    Raises:
        InvalidArgumentError: a route is missing, or it is not clear which model to run.
    """

    def __init__(
        self,
        server: InferenceServer,
        options: ServerOptions,
        shared_memory: SharedMemoryRegistry,
        environ: Mapping[str, str],
    ) -> None:
        self._server = server
        self._health_route = _route(environ, "AIP_HEALTH_ROUTE")
        self._predict_route = _route(environ, "AIP_PREDICT_ROUTE")
        self._model = _default_model(server, options)
        self._infer = InferService(server, options, shared_memory)
        self._application = create_application(server, options, shared_memory, self._infer)
        self._listener = Listener(
            self._answer, FrontEnd(options), options.http_address, options.vertex_ai_port
        )

    async def stop(self, grace_s: float) -> None:
        """See `HttpService.stop`."""
        await super().stop(grace_s)
        self._infer.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._responder(scope)(scope, receive, send)

    def _responder(self, scope: Scope) -> ASGIApp:
        path, method = scope["path"], scope["method"]
        if path == self._health_route:
            if method != "GET":
                return error_response(405, "Method Not Allowed")
            return Response(status_code=200 if self._server.ready() else 400)
        if path != self._predict_route:
            return error_response(400, "Not Found")
        if method != "POST":
            return error_response(405, "Method Not Allowed")
        for name, value in scope["headers"]:
            if name.lower() == _REDIRECT:
                return self._redirected(scope, value.decode("latin-1"))
        return Forward(self._application, f"/v2/models/{self._model}/infer", _MIME)

    def _redirected(self, scope: Scope, target: str) -> ASGIApp:
        path = target.lstrip("/")
        if _FORBIDDEN.fullmatch(path):
            return error_response(403, f"redirect to '{target}' is not allowed")
        if not _KNOWN.fullmatch(path):
            return error_response(400, f"unknown redirect '{target}'")
        if path == "metrics":
            return Response(render(self._server), media_type=CONTENT_TYPE)
        # The predict route takes POST only; endpoints that are read answer it as a GET.
        reads = not path.endswith(("/infer", "/generate", "/generate_stream", "/index"))
        if reads:
            scope["method"] = "GET"
        return Forward(self._application, f"/{path}", _MIME)


def _route(environ: Mapping[str, str], name: str) -> str:
    route = environ.get(name, "")
    if not route:
        raise InvalidArgumentError(f"{name} is not defined for Vertex AI endpoint")
    return route


def _default_model(server: InferenceServer, options: ServerOptions) -> str:
    ready = sorted({model.name for model in server.models})
    chosen = options.vertex_ai_default_model
    if chosen:
        if chosen not in ready:
            raise InvalidArgumentError(
                f"Expect the default model '{chosen}' to be loaded for Vertex AI endpoint"
            )
        return chosen
    if len(ready) != 1:
        raise InvalidArgumentError(
            "Expect the model repository contains only a single model if default model is not "
            "specified, use --vertex-ai-default-model"
        )
    return ready[0]
