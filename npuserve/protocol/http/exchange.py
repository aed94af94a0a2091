"""One infer request and its reply on a connection, without ASGI.

Takes the place of uvicorn's `RequestResponseCycle`, whose attributes it has as far as uvicorn's
connection looks at them, so that both kinds of requests may follow each other on one connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npuserve.buffer_pool import LARGE_TENSOR_BYTES
from npuserve.errors import InvalidArgumentError, NpuserveError, UnavailableError
from npuserve.protocol.http.infer import InferCall
from npuserve.protocol.http.reply import Reply

if TYPE_CHECKING:
    from npuserve.protocol.http.infer import InferService
    from npuserve.protocol.http.infer_head import InferHeaders, InferTarget
    from npuserve.protocol.http.session import HttpSession
    from npuserve.tensor import Buffer

# Tensors start at a multiple of this in their buffer.
_ALIGNMENT = 64
_NOTHING = memoryview(b"")
_MAX_CHUNKS = 65536
_TOO_MANY_CHUNKS = (
    f"Chunked request body exceeds maximum of {_MAX_CHUNKS} non-empty chunks. Send fewer or "
    "larger HTTP chunks."
)


class InferExchange:
    """Collects the body, runs the call once it is this request's turn, writes the reply.

    Attributes:
        keep_alive: whether the connection stays open after the reply.
        response_complete: the reply was handed to the transport, or nobody wants it.
        unfilled: the rest of a large body's buffer; the connection receives straight into it.
            Empty when nothing is missing or the body is small.
    """

    __slots__ = (
        "_begin_ns", "_body", "_call", "_current", "_part_bytes", "_parts",
        "_received", "_refusal", "_service", "_session", "headers", "keep_alive",
        "response_complete", "target", "unfilled",
    )  # fmt: skip

    def __init__(
        self,
        session: HttpSession,
        service: InferService,
        target: InferTarget,
        headers: InferHeaders,
        keep_alive: bool,
    ) -> None:
        self._begin_ns = service.trace_ns()
        self._session = session
        self._service = service
        self.target = target
        self.headers = headers
        self._parts: list[bytes] = []
        self._part_bytes = 0
        self._refusal: NpuserveError | None = None
        self._body: memoryview | None = None
        self._call: InferCall | None = None
        self._current = False
        self._received = False
        self.keep_alive = keep_alive
        self.response_complete = False
        self.unfilled = _NOTHING

    # --------------------------------------------------------------- the body

    def prepare(self) -> None:
        """Make room for a large body of a declared length, or refuse it before it comes."""
        length = self.headers.content_length
        if length <= LARGE_TENSOR_BYTES or not self._check_size(length):
            return
        try:
            self._body = self.unfilled = self._lease(length)
        except (OSError, MemoryError, ValueError, OverflowError):
            self._refuse(UnavailableError(f"no memory for a request of {length} bytes"))

    def _check_size(self, length: int) -> bool:
        limit = self._session.front.max_body_size
        if length <= limit:
            return True
        self._refuse(
            InvalidArgumentError(
                f"request body of {length} bytes exceeds the maximum of {limit} bytes. "
                "Use --http-max-body-size to increase the limit."
            )
        )
        return False

    def _lease(self, length: int) -> memoryview:
        """A buffer whose tensor data, behind the JSON, are aligned."""
        given = self.headers.json_length or b""
        padding = -int(given) % _ALIGNMENT if given.isdigit() and len(given) < 19 else 0
        return self._service.server.buffer_pool.lease(padding + length)[padding:]

    @property
    def body_bytes(self) -> int:
        """How much of the body has come."""
        if self._body is not None:
            return len(self._body) - len(self.unfilled)
        return self._part_bytes

    def add_body(self, data: bytes) -> None:
        """More of the body, from the parser."""
        if self._refusal is not None or self.response_complete:
            return
        size = len(data)
        if self._body is not None:
            self.unfilled[:size] = data
            self.unfilled = self.unfilled[size:]
            return
        self._parts.append(data)
        self._part_bytes += size
        if len(self._parts) > _MAX_CHUNKS:
            self._refuse(InvalidArgumentError(_TOO_MANY_CHUNKS))
        else:
            self._check_size(self._part_bytes)

    def body_filled(self, count: int) -> bool:
        """The connection received `count` bytes into `unfilled`; True if nothing is missing."""
        self.unfilled = self.unfilled[count:]
        return not self.unfilled

    def body_complete(self) -> None:
        """The whole body is there."""
        self._received = True
        if self._current:
            self._run()

    def _take_body(self) -> Buffer:
        body, self._body = self._body, None
        if body is not None:
            self.unfilled = _NOTHING  # an empty slice, too, would keep the buffer
            return body
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # ------------------------------------------------------------- the answer

    def become_current(self) -> None:
        """All earlier requests of the connection are answered."""
        self._current = True
        if self._received or self._refusal is not None:
            self._run()
        elif self.headers.expects_continue:
            self._session.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _run(self) -> None:
        if self._refusal is not None:
            self._respond(Reply.from_error(self._refusal))
        elif not self.response_complete:
            self._call = InferCall(
                self._service, self.target, self.headers, self._respond, self._begin_ns
            )
            self._call.start(self._take_body())

    def _respond(self, reply: Reply) -> None:
        if self.response_complete:
            return
        self.response_complete = True
        self._call = None
        self._session.send(reply, self.keep_alive)

    def _refuse(self, error: NpuserveError) -> None:
        """Answer without the rest of the body, which is thrown away, and close."""
        self._refusal = error
        self._drop_body()
        self.keep_alive = False
        self._session.discard_input()
        if self._current:
            self._run()

    def _drop_body(self) -> None:
        self._body, self.unfilled = None, _NOTHING
        self._parts.clear()

    def abandon(self) -> None:
        """The connection is gone: cancel the request and free its buffers."""
        self.response_complete = True
        self._drop_body()
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
