"""Handlers of health, metadata, statistics and the slow path of infer: one short method each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.responses import Response

from npuserve.model_config import config_to_json
from npuserve.protocol.http.generate import generate, generate_stream
from npuserve.protocol.http.infer import InferCall
from npuserve.protocol.http.infer_head import InferHeaders, InferTarget
from npuserve.protocol.http.json_text import dump_json
from npuserve.protocol.http.reply import Reply, error_body
from npuserve.protocol.http.requests import or_disconnect, read_bytes
from npuserve.protocol.http.statistics_codec import statistics_document

if TYPE_CHECKING:
    from typing import Any

    from starlette.requests import Request

    from npuserve.options import ServerOptions
    from npuserve.protocol.http.infer import InferService
    from npuserve.server.core import InferenceServer

_SERVER_EXITING = b"Server exiting"


def json_response(value: Any) -> Response:
    """A 200 with this value as JSON."""
    return Response(dump_json(value), media_type="application/json")


def target_of(request: Request) -> InferTarget:
    """The model and version of the path."""
    parameters = request.path_params
    return InferTarget(parameters["model"], parameters.get("version", ""))


class InferenceHandlers:
    """Endpoints about the server and its models, and inference."""

    def __init__(
        self, server: InferenceServer, options: ServerOptions, service: InferService
    ) -> None:
        self._server = server
        self._service = service
        self._max_body_size = options.http_max_body_size

    async def live(self, request: Request) -> Response:
        """Whether the process serves at all."""
        return self._health(self._server.live())

    async def ready(self, request: Request) -> Response:
        """Whether traffic should come."""
        return self._health(self._server.ready())

    def _health(self, good: bool) -> Response:
        if self._server.stopping:
            return Response(_SERVER_EXITING, 503)
        return Response(status_code=200 if good else 400)

    async def model_ready(self, request: Request) -> Response:
        """Whether a model version can serve."""
        if await self._server.model_ready(*target_of(request)):
            return Response()
        return Response(error_body("Model version not ready"), 400, media_type="application/json")

    async def server_metadata(self, request: Request) -> Response:
        """Name, version and extensions."""
        metadata = self._server.server_metadata()
        return json_response(
            {
                "name": metadata.name,
                "version": metadata.version,
                "extensions": list(metadata.extensions),
            }
        )

    async def model_metadata(self, request: Request) -> Response:
        """Inputs, outputs and ready versions."""
        metadata = self._server.model_metadata(*target_of(request))
        return json_response(metadata)

    async def model_config(self, request: Request) -> Response:
        """The complete configuration."""
        text = config_to_json(self._server.model_config(*target_of(request)))
        return Response(text, media_type="application/json")

    async def model_statistics(self, request: Request) -> Response:
        """Statistics of one model."""
        models = self._server.model_statistics(*target_of(request))
        return json_response(statistics_document(models))

    async def all_statistics(self, request: Request) -> Response:
        """Statistics of all ready models."""
        return json_response(statistics_document(self._server.model_statistics()))

    async def infer(self, request: Request) -> Response:
        """What `session.py` does without ASGI, for everything that comes another way."""
        begin_ns = self._service.trace_ns()
        body = await read_bytes(request, self._max_body_size, "--http-max-body-size")
        answer: asyncio.Future[Reply | None] = self._server.loop.create_future()

        def respond(reply: Reply | None) -> None:
            if not answer.done():
                answer.set_result(reply)

        headers = InferHeaders(request.headers.raw)
        call = InferCall(self._service, target_of(request), headers, respond, begin_ns)
        call.start(body)

        async def wait() -> Reply | None:
            return await answer

        def abandon() -> None:
            call.cancel()
            respond(None)

        try:
            return _to_response(await or_disconnect(request, wait(), abandon))
        except asyncio.CancelledError:  # the server stops
            call.cancel()
            raise

    async def generate(self, request: Request) -> Response:
        """One JSON reply."""
        return await generate(self._service, request, target_of(request))

    async def generate_stream(self, request: Request) -> Response:
        """Replies as server-sent events."""
        return await generate_stream(self._service, request, target_of(request))


def _to_response(reply: Reply | None) -> Response:
    if reply is None:  # nobody is there to read it
        return Response()
    response = Response(b"".join(reply.parts), reply.status)
    response.headers["content-type"] = reply.content_type.decode()
    for name, value in reply.headers:
        response.headers[name.decode()] = value.decode()
    return response
