"""The whole URL table, and the FastAPI application made of it. Step 2 of the walk.

Handlers get the plain request: bodies are JSON whatever their content type says, so FastAPI's own
body handling is not used. What it knows of bodies for the OpenAPI page is declared in the table.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from npuserve.errors import NpuserveError
from npuserve.protocol.http import bodies
from npuserve.protocol.http.control_handlers import ControlHandlers
from npuserve.protocol.http.handlers import InferenceHandlers
from npuserve.protocol.http.reply import Reply, error_body

if TYPE_CHECKING:
    from pydantic import BaseModel

    from npuserve.options import ServerOptions
    from npuserve.protocol.http.access import Restrictions
    from npuserve.protocol.http.infer import InferService
    from npuserve.protocol.shared_memory import SharedMemoryRegistry
    from npuserve.server.core import InferenceServer

Handler = Callable[[Request], Awaitable[Response]]
_JSON = "application/json"
_SCHEMAS = "#/components/schemas/"


class Endpoint(NamedTuple):
    """One line of the table.

    `{version}` in a path stands for digits; `/versions/{version}` in brackets and other
    bracketed parts are optional.
    """

    method: str
    path: str
    group: str  # of --http-restricted-api
    handler: Handler
    body: type[BaseModel] | None = None
    reply: type[BaseModel] | None = None

    @property
    def needs_body(self) -> bool:
        """Whether an empty body is refused: it is raw data for infer, all defaults for others."""
        return self.body not in (bodies.InferBody, bodies.IndexBody, bodies.LoadBody,
                                 bodies.UnloadBody)  # fmt: skip


def url_table(inference: InferenceHandlers, control: ControlHandlers) -> list[Endpoint]:
    """Every endpoint but metrics, which has a port of its own."""
    model = "/v2/models/{model}[/versions/{version}]"
    repository = "/v2/repository[/{repository}]"
    system = "/v2/systemsharedmemory[/region/{region}]"
    cuda = "/v2/cudasharedmemory[/region/{region}]"
    i, c, b, E = inference, control, bodies, Endpoint  # noqa: N806 (a table)
    return [
        E("GET", "/v2", "metadata", i.server_metadata, None, b.ServerMetadataReply),
        E("GET", "/v2/health/live", "health", i.live),
        E("GET", "/v2/health/ready", "health", i.ready),
        E("GET", "/v2/models/stats", "statistics", i.all_statistics, None, b.StatisticsReply),
        E("GET", model, "metadata", i.model_metadata, None, b.ModelMetadataReply),
        E("GET", f"{model}/ready", "health", i.model_ready),
        E("GET", f"{model}/config", "model-config", i.model_config, None, b.ModelConfigReply),
        E("GET", f"{model}/stats", "statistics", i.model_statistics, None, b.StatisticsReply),
        E("POST", f"{model}/infer", "inference", i.infer, b.InferBody, b.InferReply),
        E("POST", f"{model}/generate", "inference", i.generate, b.GenerateBody, b.GenerateReply),
        E("POST", f"{model}/generate_stream", "inference", i.generate_stream, b.GenerateBody),
        E("POST", f"{repository}/index", "model-repository", c.index, b.IndexBody, b.IndexReply),
        E("POST", f"{repository}/models/{{model}}/load", "model-repository", c.load, b.LoadBody),
        E("POST", f"{repository}/models/{{model}}/unload", "model-repository", c.unload,
          b.UnloadBody),
        E("GET", f"{system}/status", "shared-memory", c.system_status, None, b.SystemRegionsReply),
        E("POST", f"{system}/register", "shared-memory", c.system_register, b.RegisterSystemBody),
        E("POST", f"{system}/unregister", "shared-memory", c.system_unregister),
        E("GET", f"{cuda}/status", "shared-memory", c.cuda_status, None, b.CudaRegionsReply),
        E("POST", f"{cuda}/register", "shared-memory", c.cuda_register, b.RegisterCudaBody),
        E("POST", f"{cuda}/unregister", "shared-memory", c.cuda_unregister),
        E("GET", "/v2[/models/{model}]/trace/setting", "trace", c.trace_settings, None,
          b.TraceReply),
        E("POST", "/v2[/models/{model}]/trace/setting", "trace", c.trace_settings, b.TraceBody,
          b.TraceReply),
        E("GET", "/v2/logging", "logging", c.log_settings, None, b.LogReply),
        E("POST", "/v2/logging", "logging", c.log_settings, b.LogBody, b.LogReply),
    ]  # fmt: skip


def create_application(
    server: InferenceServer,
    options: ServerOptions,
    shared_memory: SharedMemoryRegistry,
    service: InferService,
) -> FastAPI:
    """The application that answers every request but those of the connection's own infer path."""
    application = FastAPI(
        title="npuserve",
        description="KServe v2 inference protocol with Triton's extensions.",
        version=importlib.metadata.version("npuserve"),
        redirect_slashes=False,
        exception_handlers={
            NpuserveError: _npuserve_error,
            ClientDisconnect: _client_gone,
            HTTPException: _http_error,
            Exception: _unexpected_error,
        },
    )
    table = url_table(
        InferenceHandlers(server, options, service),
        ControlHandlers(server, options, shared_memory),
    )
    for endpoint in table:
        for path in _paths(endpoint.path):
            _add_route(application, endpoint, path, service.restrictions)
    application.openapi = lambda: _openapi(application, table)  # type: ignore[method-assign]
    return application


def _paths(pattern: str) -> list[str]:
    """The paths a pattern with at most one optional part stands for."""
    optional = re.search(r"\[(.*?)\]", pattern)
    if optional is None:
        return [pattern]
    return [pattern.replace(optional[0], ""), pattern.replace(optional[0], optional[1])]


def _add_route(
    application: FastAPI, endpoint: Endpoint, path: str, restrictions: Restrictions
) -> None:
    async def answer(request: Request) -> Response:
        version = request.path_params.get("version", "0")
        if not (version.isascii() and version.isdecimal()):
            raise HTTPException(404)
        refusal = restrictions.refusal(endpoint.group, request.headers.raw)
        if refusal is not None:
            return Response(error_body(refusal), 403, media_type=_JSON)
        return await endpoint.handler(request)

    application.add_api_route(
        path,
        answer,
        methods=[endpoint.method],
        response_class=Response,
        response_model=None,
        tags=[endpoint.group],
        summary=endpoint.handler.__doc__,
        operation_id=f"{endpoint.method.lower()}{re.sub(r'[^a-z0-9]+', '_', path)}",
        responses=_described_replies(endpoint),
        openapi_extra=_described_request(endpoint, path),
    )


# ------------------------------------------------------------------- OpenAPI


def _described_replies(endpoint: Endpoint) -> dict[int | str, dict[str, Any]]:
    good: dict[str, Any] = {"description": "Success"}
    if endpoint.reply is not None:
        good["content"] = {_JSON: {"schema": _reference(endpoint.reply)}}
    elif endpoint.path.endswith("generate_stream"):
        good["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    bad = {
        "description": "Error",
        "content": {_JSON: {"schema": _reference(bodies.ErrorReply)}},
    }
    return {200: good, "4XX": bad, "5XX": bad}


def _described_request(endpoint: Endpoint, path: str) -> dict[str, Any]:
    described: dict[str, Any] = {
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": _path_schema(name)}
            for name in re.findall(r"{(\w+)}", path)
        ]
    }
    if endpoint.body is not None:
        content: dict[str, Any] = {_JSON: {"schema": _reference(endpoint.body)}}
        if endpoint.body is bodies.InferBody:
            content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
        described["requestBody"] = {"content": content, "required": endpoint.needs_body}
    return described


def _path_schema(name: str) -> dict[str, str]:
    return {"type": "string", "pattern": "^[0-9]+$"} if name == "version" else {"type": "string"}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _SCHEMAS + model.__name__}


def _openapi(application: FastAPI, table: list[Endpoint]) -> dict[str, Any]:
    """The OpenAPI document, made once, with the schemas that the table refers to."""
    if application.openapi_schema is None:
        document = get_openapi(
            title=application.title,
            version=application.version,
            description=application.description,
            routes=application.routes,
        )
        models: set[type[BaseModel]] = {bodies.ErrorReply}
        models.update(m for e in table for m in (e.body, e.reply) if m is not None)
        ordered = sorted(models, key=lambda model: model.__name__)
        _, schemas = models_json_schema(
            [(model, "validation") for model in ordered], ref_template=_SCHEMAS + "{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        application.openapi_schema = document
    return application.openapi_schema


# -------------------------------------------------------------------- errors


async def _npuserve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, NpuserveError)
    reply = Reply.from_error(error)
    return Response(b"".join(reply.parts), reply.status, media_type=_JSON)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code != 405:
        return Response(error_body("Not Found"), error.status_code, error.headers, _JSON)
    headers = {"Allow": ", ".join(_methods_at(request))}
    return Response(error_body("Method Not Allowed"), 405, headers, _JSON)


def _methods_at(request: Request) -> list[str]:
    """Methods that the path of a request knows; the framework sees one of its routes only."""
    return sorted(
        method
        for route in request.app.routes
        if route.matches(request.scope)[0] is Match.PARTIAL
        for method in route.methods
    )


async def _client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; the client left while it sent its body."""
    return Response(status_code=400)


async def _unexpected_error(request: Request, error: Exception) -> Response:
    """A bug; uvicorn logs the traceback."""
    body = error_body("internal error, see the server's log")
    return Response(body, 500, media_type=_JSON)
