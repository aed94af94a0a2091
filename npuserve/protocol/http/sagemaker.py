"""The endpoint that Amazon SageMaker calls: /ping, /invocations and, for many models, /models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from npuserve.errors import InvalidArgumentError, NpuserveError
from npuserve.protocol.http.cloud_forward import Forward, error_response
from npuserve.protocol.http.cloud_mime import BinaryMime
from npuserve.protocol.http.infer import InferService
from npuserve.protocol.http.listener import HttpService, Listener
from npuserve.protocol.http.routes import create_application
from npuserve.protocol.http.sagemaker_models import SageMakerModels, is_memory_error
from npuserve.protocol.http.session import FrontEnd
from npuserve.protocol.status import http_status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from npuserve.options import ServerOptions
    from npuserve.protocol.shared_memory import SharedMemoryRegistry
    from npuserve.server.core import InferenceServer

_MIME = BinaryMime("application/vnd.sagemaker-triton.binary+json")
_INFERENCE_TYPES = ("infer", "generate", "generate_stream")
_MODEL = re.compile(r"/models/([^/]+)")
_INVOKE = re.compile(r"/models/([^/]+)/invoke")


class SageMakerServer(HttpService):
    """SageMaker's container contract, for one model and for many (multi-model endpoints).

    Args:
        environ: SAGEMAKER_TRITON_PING_MODE, …_INFERENCE_TYPE and …_DEFAULT_MODEL_NAME.

    Raises:
        InvalidArgumentError: an unknown ping mode or inference type.
    """

    def __init__(
        self,
        server: InferenceServer,
        options: ServerOptions,
        shared_memory: SharedMemoryRegistry,
        environ: Mapping[str, str],
    ) -> None:
        self._server = server
        self._ping_mode = _choice(environ, "SAGEMAKER_TRITON_PING_MODE", ("ready", "live"))
        kind = _choice(environ, "SAGEMAKER_TRITON_INFERENCE_TYPE", _INFERENCE_TYPES)
        self._default_model = environ.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "")
        self._kind = kind
        self._infer = InferService(server, options, shared_memory)
        self._models = SageMakerModels(server, options)
        self._application = create_application(server, options, shared_memory, self._infer)
        self._listener = Listener(
            self._answer, FrontEnd(options), options.http_address, options.sagemaker_port
        )

    async def stop(self, grace_s: float) -> None:
        """See `HttpService.stop`."""
        await super().stop(grace_s)
        self._infer.close()
        self._models.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            responder = await self._responder(Request(scope, receive))
        except NpuserveError as error:
            responder = error_response(http_status(error.code), str(error))
        await responder(scope, receive, send)

    async def _responder(self, request: Request) -> ASGIApp:
        method, path = request.method, request.url.path
        if (method, path) == ("GET", "/ping"):
            return self._ping()
        if (method, path) == ("POST", "/invocations"):
            return self._invocation()
        if method == "POST" and (invoked := _INVOKE.fullmatch(path)):
            return self._invoke(invoked[1])
        named = _MODEL.fullmatch(path)
        handler = self._model_handler(method, path, named[1] if named else "")
        if handler is None:
            return error_response(400, f"unsupported request {method} {path}")
        refusal = self._infer.restrictions.refusal("model-repository", request.headers.raw)
        return error_response(403, refusal) if refusal else await handler(request)

    def _ping(self) -> Response:
        good = self._server.live() if self._ping_mode == "live" else self._server.ready()
        return Response(status_code=200 if good else 400)

    def _invocation(self) -> ASGIApp:
        name = self._default_model
        if not name:
            ready = sorted({model.name for model in self._server.models})
            if len(ready) != 1:
                raise InvalidArgumentError(
                    "set SAGEMAKER_TRITON_DEFAULT_MODEL_NAME to the model that /invocations runs"
                )
            name = ready[0]
        return Forward(self._application, f"/v2/models/{name}/{self._kind}", _MIME)

    def _invoke(self, name: str) -> ASGIApp:
        return _MemoryAware(Forward(self._application, f"/v2/models/{name}/infer", _MIME))

    def _model_handler(
        self, method: str, path: str, name: str
    ) -> Callable[[Request], Awaitable[Response]] | None:
        models = self._models
        if path == "/models":
            return {"GET": models.list, "POST": models.load}.get(method)
        if name:
            return {"GET": models.get, "DELETE": models.unload}.get(method)
        return None


class _MemoryAware:
    """Turns a failure for want of memory into 507, which makes SageMaker unload other models."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None

        async def watched(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
                return
            if start is not None:
                held, start = start, None
                if is_memory_error(message.get("body", b"").decode(errors="replace")):
                    held = {**held, "status": 507}
                await send(held)
            await send(message)

        await self._inner(scope, receive, watched)


def _choice(environ: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = environ.get(name) or allowed[0]
    if value not in allowed:
        raise InvalidArgumentError(
            f"invalid value '{value}' of {name}, expecting one of {', '.join(allowed)}"
        )
    return value
