"""One infer request from its complete body to its complete reply.

Both ways in use it: the connection's own (no ASGI, see `session.py`) and the FastAPI route. It
decodes, hands the request to the core and encodes what comes back. It knows headers and bodies
but no connection; the core knows neither.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from npuserve.errors import InternalError, InvalidArgumentError, NpuserveError, UnsupportedError
from npuserve.protocol.http.access import HeaderForwarding, Restrictions
from npuserve.protocol.http.codec import (
    InferMessage,
    decode_infer,
    decode_raw,
    encode_infer,
    json_output_bytes,
)
from npuserve.protocol.http.compression import (
    check_encoding,
    choose_encoding,
    compress,
    decompress,
)
from npuserve.protocol.http.json_text import parse_json
from npuserve.protocol.http.large_json import parse_large_json
from npuserve.protocol.http.reply import BINARY, JSON, Reply, error_body
from npuserve.protocol.http.templates import InferTemplate, Templates
from npuserve.request import InferenceRequest
from npuserve.server.trace import Trace, TraceContext

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Sequence
    from typing import Any

    from npuserve.options import ServerOptions
    from npuserve.protocol.http.infer_head import InferHeaders, InferTarget
    from npuserve.protocol.shared_memory import RegionSlice, SharedMemoryRegistry
    from npuserve.response import InferenceResponse
    from npuserve.server.core import InferenceServer
    from npuserve.server.model import Model
    from npuserve.tensor import Buffer, Tensor

logger = logging.getLogger(__name__)

# JSON or compressed data beyond this are dealt with in a thread: other requests, readiness
# probes above all, must not wait for them.
LARGE_DATA_BYTES = 128 * 1024


class InferService:
    """What all infer requests of a listener share.

    Args:
        max_input_size: `--http-max-input-size`, for JSON, raw input and decompressed bodies.
    """

    def __init__(
        self, server: InferenceServer, options: ServerOptions, shared_memory: SharedMemoryRegistry
    ) -> None:
        self.server = server
        self.shared_memory = shared_memory
        self.max_input_size = options.http_max_input_size
        self.restrictions = Restrictions(options.http_restricted_api)
        self.forwarding = HeaderForwarding(options.http_header_forward_pattern)
        self.templates = Templates()
        self.executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="http-codec")

    def trace_ns(self) -> int:
        """Now, if anything is traced; else 0, as nobody will look at it."""
        return time.monotonic_ns() if self.server.tracer.active else 0

    def close(self) -> None:
        """Stop the threads; nothing may be in flight."""
        self.executor.shutdown(wait=False, cancel_futures=True)


class InferCall:
    """A request on its way through decoding, the core and encoding.

    Args:
        respond: called once with the reply, on the loop's thread, unless `cancel` came first.
        begin_ns: `trace_ns` when the request's head was complete.
    """

    __slots__ = (
        "_begin_ns", "_cancelled", "_headers", "_message", "_model", "_request", "_respond",
        "_response", "_service", "_slices", "_target", "_template",
    )  # fmt: skip

    def __init__(
        self,
        service: InferService,
        target: InferTarget,
        headers: InferHeaders,
        respond: Callable[[Reply], None],
        begin_ns: int = 0,
    ) -> None:
        self._begin_ns = begin_ns
        self._service = service
        self._target = target
        self._headers = headers
        self._respond = respond
        self._message: InferMessage
        self._model: Model
        self._template: InferTemplate | None = None
        self._request: InferenceRequest | None = None
        self._response: InferenceResponse | None = None
        self._slices: dict[str, RegionSlice] = {}
        self._cancelled = False

    # ------------------------------------------------------------------ way in

    def start(self, body: Buffer) -> None:
        """Run the request; `body` is whole and belongs to the call from now on."""
        self._guard(self._start, body)

    def cancel(self) -> None:
        """The client has gone: stop what can be stopped, never respond."""
        self._cancelled = True
        if self._request is not None:
            self._request.cancel()

    def _start(self, body: Buffer) -> None:
        service, headers = self._service, self._headers
        refusal = service.restrictions.refusal("inference", headers.fields)
        if refusal is not None:
            self._respond(Reply(403, [error_body(refusal)]))
            return
        server = service.server
        self._model = server.model(self._target.model, server.parse_version(self._target.version))
        if self._model.decoupled:
            raise UnsupportedError(
                "HTTP end point doesn't support models with decoupled transaction policy"
            )
        if headers.content_encoding is None:
            self._parse(body)
        else:
            self._decompress(body, headers.content_encoding.decode("latin-1"))

    def _decompress(self, body: Buffer, encoding: str) -> None:
        check_encoding(encoding)
        if encoding == "identity":
            self._parse(body)
        elif len(body) < LARGE_DATA_BYTES:
            self._parse(decompress(body, encoding, self._service.max_input_size))
        else:
            limit = self._service.max_input_size
            self._in_thread(decompress, body, encoding, limit, then=self._parse)

    def _parse(self, body: Buffer) -> None:
        """Cut the body into JSON and binary data, and parse the JSON."""
        length = self._json_length(len(body))
        if not length:
            self._check_size(f"Raw input has a byte_size ({len(body)} bytes) that", len(body))
            model = self._model
            specs = model.input_specs
            message = decode_raw(body, model.name, specs, model.max_batch_size)
            self._submit(message, message.inputs)
            return
        view = memoryview(body)
        binary = view[length:]
        if length < LARGE_DATA_BYTES:
            self._parse_text(view[:length].tobytes(), binary)
        else:
            self._check_size(f"request JSON size of {length} bytes", length)
            text = view[:length] if binary else body
            self._in_thread(
                self._decode_large,
                text,
                binary,
                then=lambda message: self._accept(message, message.inputs),
            )

    def _decode_large(self, text: Buffer, binary: memoryview) -> InferMessage:
        """All that a long JSON text needs before the core sees the request; any thread."""
        service = self._service
        read_region = service.shared_memory.reader(service.server.loop)
        return decode_infer(parse_large_json(text), binary, self._target.model, read_region)

    def _parse_text(self, text: bytes, binary: memoryview) -> None:
        template = self._service.templates.get(text) if binary else None
        if template is not None and template.binary_size == len(binary):
            self._template = template
            self._submit(template.message, template.inputs(binary))
            return
        document = parse_json(text)
        regions = self._service.shared_memory
        message = decode_infer(document, binary, self._target.model, regions.read)
        inputs = message.inputs
        if binary:
            self._template = self._service.templates.remember(text, document, message)
        self._accept(message, inputs)

    def _check_size(self, what: str, size: int) -> None:
        limit = self._service.max_input_size
        if size > limit:
            raise InvalidArgumentError(
                f"{what} exceeds the maximum allowed input size of {limit} bytes. "
                "Use --http-max-input-size to increase the limit."
            )

    def _json_length(self, body_length: int) -> int:
        """Bytes of JSON in the body; 0 means that the body is one raw tensor."""
        given = self._headers.json_length
        if given is None:
            return body_length
        digits = given.strip().removeprefix(b"+")
        if not digits.isdigit():
            # Differs from Triton: 2.51 takes what is a number of it, or 0; later ones refuse it.
            raise InvalidArgumentError(
                f"Unable to parse Inference-Header-Content-Length, got: {given.decode('latin-1')}"
            )
        length = int(digits) if len(digits) < 20 else body_length + 1
        if length > body_length:
            raise InvalidArgumentError(
                f"inference header size should be in range (0, {body_length}), "
                f"got: {given.decode('latin-1')}"
            )
        return length

    def _accept(self, message: InferMessage, inputs: dict[str, Tensor]) -> None:
        """Go on with a request that is decoded."""
        regions = self._service.shared_memory
        for name, output in message.outputs.items():
            if output.region is not None:
                self._slices[name] = regions.acquire(*output.region)
        self._submit(message, inputs)

    def _submit(self, message: InferMessage, inputs: dict[str, Tensor]) -> None:
        for tensor in inputs.values():
            if tensor.datatype == "BYTES" and tensor.long_to_scan:
                self._in_thread(tensor.scan_strings, then=lambda _: self._submit(message, inputs))
                return
        self._message = message
        parameters = message.parameters
        forwarding = self._service.forwarding
        if parameters or forwarding.active:
            # A copy, as others may share the message and the model may keep the parameters.
            parameters = {**parameters, **forwarding.parameters(self._headers.fields)}
        template = self._template
        request = self._request = InferenceRequest(
            self._target.model,
            inputs,
            self._on_response,
            model_version=self._model.version if self._target.version else -1,
            id=message.id,
            requested_outputs=(
                tuple(message.outputs) if template is None else template.requested_outputs
            ),
            parameters=parameters or None,
            correlation_id=message.correlation_id,
            flags=message.flags,
            priority=message.priority,
            timeout_us=message.timeout_us,
        )
        if template is not None:
            request.checked = template.checked
        if self._begin_ns:
            self._infer_traced(request)
        else:
            self._service.server.infer(request)
        if template is not None:
            template.checked = request.checked

    def _infer_traced(self, request: InferenceRequest) -> None:
        end_ns = self._service.trace_ns()
        request.trace = _client_trace(self._headers.fields)
        self._service.server.infer(request)
        trace = request.trace
        if isinstance(trace, Trace):
            trace.mark("HTTP_RECV_START", self._begin_ns)
            trace.mark("HTTP_RECV_END", end_ns)

    # ----------------------------------------------------------------- way out

    def _on_response(self, response: InferenceResponse | None, final: bool) -> None:
        if response is not None:
            if self._response is None:
                self._response = response
            else:
                error = InternalError("expected a single response, got 2")
                self._response.error = error
        if final:
            self._guard(self._finish)
            self._request = None  # no reference cycle: its buffers are freed at once

    def _finish(self) -> None:
        response = self._response
        if self._cancelled:
            self._release_regions()
            return
        if response is None:
            raise InternalError("expected a single response, got 0")
        if response.error is not None:
            self._fail(response.error)
            return
        model = self._request.model if self._request is not None else self._model
        response.model_name = response.model_name or model.name
        response.model_version = response.model_version or str(model.version)
        known = self._template.reply(response) if self._template is not None else None
        if known is not None and not self._headers.accept_encoding:
            self._send(known)
        elif json_output_bytes(response, self._message) < LARGE_DATA_BYTES:
            self._reply(self._encode(response, model))
        else:
            self._in_thread(self._encode, response, model, then=self._reply)

    def _encode(self, response: InferenceResponse, model: Model) -> tuple[bytes, list[Buffer]]:
        return encode_infer(
            response,
            self._message,
            self._slices,
            labels=model.labels,
            batched=model.max_batch_size > 0,
        )

    def _reply(self, encoded: tuple[bytes, list[Buffer]]) -> None:
        self._release_regions()
        head, blobs = encoded
        parts: list[Buffer] = [head, *blobs]
        headers: list[tuple[bytes, bytes]] = []
        content_type = JSON
        if any(blobs):
            content_type = BINARY
            headers.append((b"Inference-Header-Content-Length", b"%d" % len(head)))
        accept = self._headers.accept_encoding
        encoding = choose_encoding(accept.decode("latin-1")) if accept else ""
        reply = Reply(200, parts, content_type, headers)
        if not encoding:
            if self._template is not None and self._response is not None:
                self._template.remember_reply(self._response, reply)
            self._send(reply)
            return
        headers.append((b"Content-Encoding", encoding.encode()))
        if sum(map(len, parts)) < LARGE_DATA_BYTES:
            self._send_packed(reply, compress(parts, encoding))
        else:
            self._in_thread(
                compress, parts, encoding, then=lambda packed: self._send_packed(reply, packed)
            )

    def _send_packed(self, reply: Reply, packed: Sequence[Buffer]) -> None:
        reply.parts = packed
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        trace = self._request.trace if self._request is not None else None
        if trace is None:
            self._respond(reply)
        else:
            trace.mark("HTTP_SEND_START")
            self._respond(reply)
            trace.mark("HTTP_SEND_END")

    # ------------------------------------------------------------------ errors

    def _guard(self, step: Callable[..., None], *arguments: Any) -> None:
        """Run a step; whatever it raises becomes the reply."""
        try:
            step(*arguments)
        except NpuserveError as error:
            self._fail(error)
        except Exception:
            logger.exception("infer request for model '%s' failed", self._target.model)
            self._fail(InternalError("internal error, see the server's log"))

    def _fail(self, error: NpuserveError) -> None:
        self._release_regions()
        self._request = None  # as in _on_response
        if self._cancelled:
            return
        if isinstance(error, UnsupportedError) and self._headers.content_encoding is not None:
            self._respond(Reply.from_error(error, (b"Accept-Encoding", b"gzip, deflate")))
        else:
            self._respond(Reply.from_error(error))

    def _release_regions(self) -> None:
        for place in self._slices.values():
            place.release()
        self._slices.clear()

    def _in_thread(
        self, function: Callable[..., Any], *arguments: Any, then: Callable[[Any], None]
    ) -> None:
        """Call `function` away from the loop and go on with its result."""

        def done(future: Future[Any]) -> None:
            if self._cancelled:
                self._release_regions()
            else:
                self._guard(lambda: then(future.result()))

        service = self._service
        future = service.server.loop.run_in_executor(service.executor, function, *arguments)
        future.add_done_callback(done)


def _client_trace(fields: Sequence[tuple[bytes, bytes]]) -> TraceContext | None:
    """The W3C trace context of the headers."""
    values = {name.lower(): value.decode("latin-1") for name, value in fields}
    parent = values.get(b"traceparent")
    return TraceContext(parent, values.get(b"tracestate", "")) if parent else None
