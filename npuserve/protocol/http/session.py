"""The requests of one connection, in order: infer requests run here, all others in uvicorn.

A subclass of uvicorn's httptools protocol. The parser's callbacks look at each request head: an
infer request becomes an `InferExchange`, which needs no ASGI scope, task or future; any other is
replayed to uvicorn's own callbacks and so runs the FastAPI application. Order, keep-alive,
pipelining and shutdown are uvicorn's for both. Bytes come in through `connection.py`.

Written against uvicorn 0.54: it uses the attributes `cycle`, `pipeline`, `flow`, `headers`, `url`
and the methods overridden below.
"""

from __future__ import annotations

import re
import sys
import urllib.parse
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from npuserve.buffer_pool import LARGE_TENSOR_BYTES
from npuserve.protocol.http.exchange import InferExchange
from npuserve.protocol.http.infer_head import InferHeaders, InferTarget
from npuserve.protocol.http.read_threshold import ReadThreshold
from npuserve.protocol.http.reply import Reply, error_body

if TYPE_CHECKING:
    from collections import deque

    from uvicorn._types import ASGI3Application

    from npuserve.options import ServerOptions
    from npuserve.protocol.http.infer import InferService

_INFER_PATH = re.compile(rb"/v2/models/([^/?#]+)(?:/versions/([0-9]+))?/infer(?:\?.*)?", re.DOTALL)
_KNOWN_PATHS = 1024  # remembered; a client cannot make it grow without bound

# Time-outs against clients that hold connections without using them, in seconds.
HEAD_SECONDS = 30.0  # for a request head, from its first byte
STALL_SECONDS = 120.0  # without a byte of an unfinished body, or without reading a reply
SLOW_SECONDS = 1.0  # without a byte of a large body: from then on every byte is looked at
DISCARD_SECONDS = 2.0  # reading on after a refused body, so that the client sees the reply

MAX_HEAD_BYTES = 64 * 1024
_MAX_KNOWN_HEAD_BYTES = 4096
READ_BYTES = 64 * 1024


class FrontEnd:
    """What the connections of a listener share.

    Attributes:
        infer: runs infer requests without the application; None leaves all to it.
        read_buffer: where small reads land; the parser copies what it keeps before the next.
    """

    def __init__(self, options: ServerOptions, infer: InferService | None = None) -> None:
        self.infer = infer
        self.max_body_size = options.http_max_body_size
        self.max_connections = options.http_limit_connections or sys.maxsize
        self.keep_alive_seconds = float(options.http_keep_alive_secs)
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self._targets: dict[bytes, InferTarget | None] = {}

    def infer_target(self, url: bytes) -> InferTarget | None:
        """Model and version of an infer path; None for any other path."""
        try:
            return self._targets[url]
        except KeyError:
            if len(self._targets) >= _KNOWN_PATHS:
                self._targets.clear()
            target = self._targets[url] = _parse_infer_path(url)
            return target


def _parse_infer_path(url: bytes) -> InferTarget | None:
    match = _INFER_PATH.fullmatch(url)
    if match is None:
        return None
    # Differs from Triton: percent-encoded names are decoded.
    name = urllib.parse.unquote(match[1].decode("latin-1"))
    return InferTarget(name, (match[2] or b"").decode())


class _KnownHead(NamedTuple):
    """A request head as its client sent it, and what it said.

    The same bytes at the beginning of a request say the same again: clients with a kept
    connection repeat themselves, and comparing costs a tenth of parsing.
    """

    text: bytes
    target: InferTarget
    headers: InferHeaders


class _Phase(Enum):
    """What the next bytes of the client belong to."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    DISCARD = auto()


class HttpSession(HttpToolsProtocol):
    """See the module; created by `HttpConnection`, one per connection."""

    cycle: InferExchange | RequestResponseCycle | None  # type: ignore[assignment]
    pipeline: deque[Any]  # (cycle, app) pairs of requests that wait for their turn

    def __init__(self, front: FrontEnd, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self.front = front
        self._phase = _Phase.IDLE
        self._head_bytes = 0
        # Start of the current phase, or the last byte of a body (loop time).
        self._since = self.loop.time()
        # Since when the client's buffers are full and it has read nothing (loop time).
        self._paused_since = 0.0
        self._unsent = 0  # bytes of replies that waited then
        self._current: InferExchange | RequestResponseCycle | None = None
        self._known: _KnownHead | None = None  # of the last infer request
        self._missing = 0  # bytes of a body that the parser does not see
        self._begun = 0  # heads the parser has seen
        self._surplus = False  # one connection more than --http-limit-connections
        self._new_parser()

    def _new_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_version=True)

    def connection_made(self, transport: Any) -> None:
        """The socket is open."""
        super().connection_made(transport)
        self._threshold = ReadThreshold(transport)
        self._surplus = len(self.connections) > self.front.max_connections

    # ---------------------------------------------------------------- bytes in

    @property
    def unfilled(self) -> memoryview | None:
        """The rest of a large body's buffer, to receive into; None to use the read buffer."""
        exchange = self.cycle
        if self._phase is _Phase.BODY and type(exchange) is InferExchange and exchange.unfilled:
            return exchange.unfilled
        return None

    def received_body(self, count: int) -> None:
        """`count` bytes were received into `unfilled`."""
        self._since = self.loop.time()
        exchange = self.cycle
        assert type(exchange) is InferExchange
        complete = exchange.body_filled(count)
        self._threshold.expect(len(exchange.unfilled))
        if complete:
            # The parser did not see this body, so another one goes on after it.
            self._new_parser()
            self._missing = 0
            self.on_message_complete()

    def received(self, data: memoryview) -> None:
        """Bytes of the client; what is kept of them is copied."""
        while data and self._phase is not _Phase.DISCARD and not self.transport.is_closing():
            if self._phase is _Phase.IDLE:
                known = self._known
                if known is not None and data[: len(known.text)].tobytes() == known.text:
                    self._begin_known(known)
                    data = data[len(known.text) :]
                    continue
                begun = self._begun
                self._feed(data)
                if self._begun == begun + 1:
                    self._learn_head(data)
            elif self._phase is _Phase.HEAD:
                self._continue_head(data)
            else:
                self._since = self.loop.time()
                if self._missing:
                    data = self._add_known_body(data)
                    continue
                self._feed(data)
            return

    def _continue_head(self, data: memoryview) -> None:
        """Feed more of a request head; only what does not end it counts, a body may follow."""
        begun = self._begun
        self._feed(data)
        if self._phase is _Phase.HEAD and self._begun == begun:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("request head is too large")

    def _learn_head(self, data: memoryview) -> None:
        """Keep the head of the infer request that `data` begins with, if it is plain."""
        exchange = self.cycle
        if type(exchange) is not InferExchange or self._phase not in (_Phase.IDLE, _Phase.BODY):
            return
        headers = exchange.headers
        body_bytes = exchange.body_bytes if self._phase is _Phase.BODY else headers.content_length
        text = data[: len(data) - body_bytes].tobytes()
        plain = headers.content_length and exchange.keep_alive and not headers.expects_continue
        # The head and nothing but the head: what looks like its end must be the first such place.
        is_head = text.find(b"\r\n\r\n") == len(text) - 4 and b"\n\n" not in text
        if plain and is_head and len(text) <= _MAX_KNOWN_HEAD_BYTES:
            self._known = _KnownHead(text, exchange.target, headers)

    def _begin_known(self, known: _KnownHead) -> None:
        service = self.front.infer
        assert service is not None
        self._since = self.loop.time()
        self._phase = _Phase.BODY
        self._missing = known.headers.content_length
        self._begin_infer(InferExchange(self, service, known.target, known.headers, True))

    def _add_known_body(self, data: memoryview) -> memoryview:
        """Take what belongs to the body; gives back what does not."""
        exchange, missing = self.cycle, self._missing
        assert type(exchange) is InferExchange
        body = data[:missing].tobytes()
        exchange.add_body(body)
        self._missing = missing - len(body)
        if not self._missing and self._phase is _Phase.BODY:
            self._phase = _Phase.IDLE
            exchange.body_complete()
        return data[missing:]

    def _feed(self, data: memoryview) -> None:
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    data = data[upgrade.args[0] :]
                    self._decline_upgrade()
        except httptools.HttpParserError as error:
            self.send_400_response(f"invalid HTTP request: {error}")

    def _decline_upgrade(self) -> None:
        """Serve HTTP/1.1 to a client that offered another protocol (h2c by Java, WebSocket).

        The parser takes the body for the other protocol's data, so the head is parsed again
        without the offer.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(400, "CONNECT is not supported")
            return
        kept = (b"%b: %b\r\n" % field for field in self.headers if field[0].lower() != b"upgrade")
        version = self.parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(kept))
        self._new_parser()
        self.parser.feed_data(head)

    # -------------------------------------------------------- parser callbacks

    def on_message_begin(self) -> None:
        """A request head begins."""
        self.url = b""
        self.headers = []
        self._begun += 1
        if self._phase is _Phase.DISCARD:
            return
        self._phase = _Phase.HEAD
        self._head_bytes = 0
        self._since = self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, as sent."""
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Decide who answers the request."""
        if self._phase is _Phase.DISCARD or self.parser.should_upgrade():
            return
        if self._surplus:
            self._refuse(503, "too many connections")
            return
        version = self.parser.get_http_version()
        if version == "0.9":
            self._refuse(400, "HTTP/0.9 is not supported")
            return
        self._phase = _Phase.BODY
        service = self.front.infer
        target = self.front.infer_target(self.url) if service is not None else None
        if service is None or target is None or self.parser.get_method() != b"POST":
            self._begin_application_request()
            return
        # As uvicorn: HTTP/1.0 connections are not kept, whatever their headers say.
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        headers = InferHeaders(self.headers)
        self._begin_infer(InferExchange(self, service, target, headers, keep_alive))

    def _begin_application_request(self) -> None:
        """Let uvicorn see the request head that was collected."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        super().on_url(url)
        for name, value in headers:
            super().on_header(name, value)
        super().on_headers_complete()

    def _begin_infer(self, exchange: InferExchange) -> None:
        previous, self.cycle = self.cycle, exchange
        exchange.prepare()
        if previous is None or previous.response_complete:
            self._start_asgi_task(exchange, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        exchange = self.cycle
        if type(exchange) is InferExchange:
            exchange.add_body(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self.parser.should_upgrade():
            return
        if self._phase is not _Phase.DISCARD:
            self._phase = _Phase.IDLE
        exchange = self.cycle
        if type(exchange) is InferExchange:
            exchange.body_complete()
        else:
            super().on_message_complete()

    # --------------------------------------------------------------- responses

    def _start_asgi_task(self, cycle: Any, app: ASGI3Application) -> None:
        """A request's turn has come."""
        self._current = cycle
        if type(cycle) is InferExchange:
            cycle.become_current()
        else:
            super()._start_asgi_task(cycle, app)

    def send(self, reply: Reply, keep_alive: bool) -> None:
        """Write the reply of the current infer request."""
        transport = self.transport
        if transport.is_closing():  # uvloop raises on a write to a closed transport
            return
        head, parts = reply.head(keep_alive), reply.parts
        if sum(map(len, parts)) < LARGE_TENSOR_BYTES:
            transport.write(b"".join((head, *parts)))
        else:
            transport.writelines((head, *parts))
        if not keep_alive and self._phase is not _Phase.DISCARD:
            transport.close()
        self.on_response_complete()

    def on_response_complete(self) -> None:
        """A reply was written: the next request's turn, or wait for one."""
        self.server_state.total_requests += 1
        self._current = None
        if self.transport.is_closing():
            return
        if self.pipeline:
            self.loop.call_soon(self._start_next)
            return
        if self._phase is _Phase.IDLE:
            self._since = self.loop.time()
        # A client that does not read its replies may not send further requests.
        if self.flow.write_paused:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def _start_next(self) -> None:
        if self.pipeline and self._current is None and not self.transport.is_closing():
            cycle, app = self.pipeline.pop()
            if not self.pipeline:
                self._resume_reading()
            self._start_asgi_task(cycle, app)

    def _resume_reading(self) -> None:
        self.flow.resume_reading()
        self._since = self.loop.time()  # until now the client could not go on

    def pause_writing(self) -> None:
        """The client does not read what was written."""
        super().pause_writing()
        self._paused_since = self.loop.time()
        self._unsent = self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._current is None and not self.pipeline:
            self._resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP request, and close."""
        self._refuse(400, msg)

    def _refuse(self, status: int, text: str) -> None:
        """Reply to what cannot be a request of the connection's, and close.

        If an earlier request is still to be answered, its reply is not cut into: the connection
        ends after it.
        """
        in_turn = self._in_turn()
        self.discard_input()
        if self.transport.is_closing():
            return
        if in_turn:
            reply = Reply(status, [error_body(text)])
            self.transport.write(reply.head(keep_alive=False) + b"".join(reply.parts))
            self.transport.close()
        elif self.cycle is not None:
            self.cycle.keep_alive = False

    def _in_turn(self) -> bool:
        """Whether nothing, or only a request without its whole body, waits for its reply."""
        current = self._current
        if current is None:
            return True
        if current is not self.cycle or self._phase is not _Phase.BODY:
            return False
        return not (isinstance(current, RequestResponseCycle) and current.response_started)

    def discard_input(self) -> None:
        """Throw away what the client still sends; the connection closes soon."""
        self._phase = _Phase.DISCARD
        self._since = self.loop.time()

    # ------------------------------------------------------------------ the end

    def expire(self, now: float) -> None:
        """Close the connection if its client took too long; called every few seconds."""
        waiting_for_client = self._current is None or self._phase is not _Phase.IDLE
        limit = {
            _Phase.IDLE: self.front.keep_alive_seconds,
            _Phase.HEAD: HEAD_SECONDS,
            _Phase.BODY: STALL_SECONDS,
            _Phase.DISCARD: DISCARD_SECONDS,
        }[self._phase]
        if now - self._since > SLOW_SECONDS and not self.transport.is_closing():
            self._threshold.clear()
        if self.flow.write_paused:
            unsent = self.transport.get_write_buffer_size()
            if unsent < self._unsent:
                self._paused_since = now
            elif now - self._paused_since > STALL_SECONDS:
                self.transport.abort()
            self._unsent = unsent
        elif waiting_for_client and not self.flow.read_paused and now - self._since > limit:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone: cancel what it asked for."""
        for cycle in (self._current, self.cycle):
            if type(cycle) is InferExchange:
                cycle.abandon()
            elif isinstance(cycle, RequestResponseCycle):
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self.cycle = self._current = None
        super().connection_lost(exc)
