"""Handlers of generate and generate_stream: one request, any number of JSON replies."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import TYPE_CHECKING

from starlette.responses import Response, StreamingResponse

from npuserve.errors import InvalidArgumentError, NpuserveError, StatusCode
from npuserve.protocol.http.infer import LARGE_DATA_BYTES
from npuserve.protocol.http.json_text import parse_json
from npuserve.protocol.http.load_metrics import FORMAT_HEADER, REPORT_HEADER, load_report
from npuserve.protocol.http.reply import error_body
from npuserve.protocol.http.requests import or_disconnect, read_bytes
from npuserve.protocol.http.sse import decode_generate, encode_generate, event
from npuserve.protocol.status import http_status
from npuserve.request import InferenceRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from npuserve.protocol.http.codec import InferMessage
    from npuserve.protocol.http.infer import InferService
    from npuserve.protocol.http.infer_head import InferTarget
    from npuserve.response import InferenceResponse

_NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)
# The model is asked to wait while more than this waits for a slow reader.
_HOLD_BYTES = 1 << 20
# A model that cannot wait is cancelled here.
_MAX_PENDING_BYTES = 64 << 20
_TOO_SLOW = "the client reads too slowly: too many responses are waiting"
_EVENTS = "text/event-stream; charset=utf-8"


async def generate(service: InferService, request: Request, target: InferTarget) -> Response:
    """The one response of the model as a JSON object."""
    answers = await _submit(service, request, target, most=2)
    try:
        await or_disconnect(request, answers.wait_end(), answers.abandon)
    finally:
        answers.abandon()
    headers = _load_headers(service, request)
    if len(answers.pending) != 1:
        return Response(error_body(_NOT_ONE), 200, headers, "application/json")
    body, status = answers.pending[0]
    return Response(body, status, headers, "application/json")


async def generate_stream(service: InferService, request: Request, target: InferTarget) -> Response:
    """Every response of the model as a server-sent event, as soon as it comes."""
    answers = await _submit(service, request, target)
    # The first one fixes the status, so nothing is sent before it.
    try:
        await or_disconnect(request, answers.wait_first(), answers.abandon)
    except asyncio.CancelledError:
        answers.abandon()
        raise
    status = answers.pending[0][1] if answers.pending else 200
    headers = _load_headers(service, request)
    return StreamingResponse(answers.events(), status, headers, _EVENTS)


def _load_headers(service: InferService, request: Request) -> dict[str, str]:
    wanted = request.headers.get(FORMAT_HEADER)
    if wanted is None:
        return {}
    report = load_report(wanted, service.server.custom_metrics.collect())
    return {} if report is None else {REPORT_HEADER: report}


async def _submit(
    service: InferService, request: Request, target: InferTarget, most: int = sys.maxsize
) -> _Answers:
    """Decode the request and hand it to the core.

    Args:
        most: responses to keep; the caller has no use for more.

    Raises:
        NpuserveError: before anything ran; an ordinary error reply.
    """
    server = service.server
    metadata = server.model_metadata(target.model, target.version)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise InvalidArgumentError("Unsupported content-encoding, only 'identity' is supported.")
    text = await read_bytes(request, service.max_input_size)

    def decode() -> InferMessage:
        return decode_generate(parse_json(text), metadata.inputs)

    if len(text) < LARGE_DATA_BYTES:
        message = decode()
    else:
        message = await server.loop.run_in_executor(service.executor, decode)
    message.parameters.update(service.forwarding.parameters(request.headers.raw))
    answers = _Answers(message.id, most)
    answers.request = InferenceRequest(
        target.model,
        message.inputs,
        answers.add,
        model_version=server.parse_version(target.version),
        id=message.id,
        parameters=message.parameters or None,
    )
    server.infer(answers.request)
    return answers


class _Answers:
    """The responses of one request, encoded, until they are sent.

    Attributes:
        pending: (JSON, HTTP status it would have) not yet taken.
        request: set once it exists.
    """

    def __init__(self, request_id: str, most: int) -> None:
        self.pending: deque[tuple[bytes, int]] = deque()
        self.request: InferenceRequest
        self._pending_bytes = 0
        self._request_id = request_id
        self._most = most
        self._news = asyncio.Event()
        self._ended = False

    def add(self, response: InferenceResponse | None, final: bool) -> None:
        """Callback of the request."""
        if response is not None and not self._ended and len(self.pending) < self._most:
            self._append(*self._encode(response))
        self._ended = self._ended or final
        self._news.set()

    def _append(self, body: bytes, status: int) -> None:
        self.pending.append((body, status))
        self._pending_bytes += len(body)
        if self._pending_bytes > _MAX_PENDING_BYTES:
            self.pending.append((error_body(_TOO_SLOW), 503))
            self.abandon()
        elif self._pending_bytes > _HOLD_BYTES:
            self.request.hold(True)

    def abandon(self) -> None:
        """The client has gone, or got all there is."""
        self._ended = True
        self._news.set()
        self.request.cancel()

    async def wait_first(self) -> None:
        """Until there is a response, or there will be none."""
        while not (self.pending or self._ended):
            await self._next()

    async def wait_end(self) -> None:
        """Until the last response was given."""
        while not self._ended:
            await self._next()

    async def events(self) -> AsyncIterator[bytes]:
        """All responses as events; closing it early cancels the request."""
        try:
            while True:
                while self.pending:
                    body, _ = self.pending.popleft()
                    self._pending_bytes -= len(body)
                    if self._pending_bytes <= _HOLD_BYTES:
                        self.request.hold(False)
                    yield event(body)
                if self._ended:
                    return
                await self._next()
        finally:
            self.abandon()

    async def _next(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _encode(self, response: InferenceResponse) -> tuple[bytes, int]:
        try:
            if response.error is not None:
                raise response.error
            model = self.request.model
            response.model_name = response.model_name or model.name
            response.model_version = response.model_version or str(model.version)
            return encode_generate(response, self._request_id), 200
        except NpuserveError as error:
            # As Triton: a failure of the model is 400 here, not 500.
            internal = error.code is StatusCode.INTERNAL
            return error_body(str(error)), 400 if internal else http_status(error.code)
