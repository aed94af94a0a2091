"""One gRPC call on an HTTP/2 stream of the libnghttp2 transport; implements `Call`."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import ngh2

from npuserve.protocol.grpc import framing
from npuserve.protocol.grpc.framing import FramingError, GrpcStatus, LargeMessage, MessageReader
from npuserve.protocol.grpc.raw_contents import padding_for_alignment
from npuserve.protocol.grpc.transport import Method, StreamReceiver, text_metadata

if TYPE_CHECKING:
    import asyncio

    from npuserve.protocol.grpc.codec import Parts
    from npuserve.protocol.grpc.nghttp2_connection import Connection
    from npuserve.tensor import Buffer

_RESPONSE_HEADERS = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_GZIP_RESPONSE_HEADERS = (*_RESPONSE_HEADERS, (b"grpc-encoding", b"gzip"))
_OK_TRAILERS = ((b"grpc-status", b"0"),)
_PREFIX = struct.Struct(">BI")
# Messages up to this size are joined; the parts of larger ones go to libnghttp2 in such pieces.
_JOIN_BYTES = 64 * 1024
# Messages up to this size are compressed in the event loop, larger ones in a thread: about 1 ms.
_INLINE_COMPRESS_BYTES = 32 * 1024
# Received ones may grow a thousand times.
_INLINE_INFLATE_BYTES = 1024


class Stream:
    """Reads requests and writes responses of one call; everything on the loop's thread.

    Attributes:
        done: `finish` was called or the call was given up; nothing more is sent.
        large: the large message that is being received.
        remote_closed: the client has half-closed.
    """

    __slots__ = (
        "_compressing", "_connection", "_headers", "_headers_sent", "_inbox", "_inflating",
        "_message_seen", "_method", "_outbox", "_passed_bytes", "_pending", "_queued_bytes",
        "_reader", "_reading", "_receiver", "_timer", "_unacknowledged", "done", "id",
        "large", "on_cancel", "on_sent", "remote_closed",
    )  # fmt: skip

    def __init__(
        self, connection: Connection, stream_id: int, method: Method, headers: dict[bytes, bytes]
    ) -> None:
        self._connection = connection
        self.id = stream_id
        self._method = method
        self._headers = headers
        self.on_cancel: Callable[[], None] | None = None
        self.on_sent: Callable[[], None] | None = None
        self.done = False
        self.remote_closed = False
        self._headers_sent = False
        self._message_seen = False
        self._reader: MessageReader | None = None
        self.large: LargeMessage | None = None
        self._receiver: StreamReceiver | None = None
        self._timer: asyncio.TimerHandle | None = None
        # What waits because of pause_reading or for an inflating thread; whether compressed.
        self._reading = True
        self._inflating = False
        self._inbox: deque[tuple[bool, Buffer]] = deque()
        self._unacknowledged = 0
        # What waits for a compressing thread.
        self._compressing = False
        self._outbox: deque[Callable[[], None]] = deque()
        # Only streams: sent messages by their end offset in the bytes queued so far.
        self._pending: deque[int] = deque()
        self._queued_bytes = 0
        self._passed_bytes = 0  # of them, what has left
        timeout = headers.get(b"grpc-timeout")
        if timeout is not None:
            self._start_timer(timeout)

    def open(self) -> None:
        """Begin a bidirectional stream."""
        if self._method.stream is not None:
            self._receiver = self._method.stream(self)

    # ---------------------------------------------------------------- Call

    @property
    def metadata(self) -> Mapping[str, str]:
        """See `Call.metadata`."""
        return text_metadata((key.decode("latin-1"), value) for key, value in self._headers.items())

    @property
    def unsent(self) -> int:
        """See `Call.unsent`."""
        return len(self._pending) + len(self._outbox) + self._compressing

    @property
    def unsent_bytes(self) -> int:
        """See `Call.unsent_bytes`."""
        return self._queued_bytes - self._passed_bytes

    def send(self, message: Parts) -> None:
        """See `Call.send`."""
        connection = self._connection
        if connection.compresses and self._method.compress:
            level = connection.gzip_level(self._headers)
            if level:
                self._send_compressed(message, level)
                return
        self._send(message, compressed=False)

    def _send_compressed(self, message: Parts, level: int) -> None:
        """Compress and send, in the order of the calls."""
        if self._compressing:
            self._outbox.append(lambda: self._send_compressed(message, level))
        elif self.done or sum(map(len, message)) <= _INLINE_COMPRESS_BYTES:
            self._send([framing.gzip_compress(message, level)], compressed=True)
        else:
            self._compressing = True
            loop = self._connection.loop
            work = loop.run_in_executor(None, framing.gzip_compress, message, level)
            work.add_done_callback(self._compressed)

    def _compressed(self, work: asyncio.Future[bytes]) -> None:
        self._compressing = False
        self._send([work.result()], compressed=True)
        while self._outbox and not self._compressing:
            self._outbox.popleft()()

    def _send(self, message: Parts, *, compressed: bool) -> None:
        if self.done:
            return
        connection = self._connection
        size = sum(map(len, message))
        if size > connection.max_message_bytes:
            self._give_up(
                GrpcStatus.RESOURCE_EXHAUSTED,
                f"Sent message larger than max ({size} vs. {connection.max_message_bytes})",
            )
            return
        h2 = connection.h2
        try:
            if not self._headers_sent:
                self._headers_sent = True
                head = _GZIP_RESPONSE_HEADERS if compressed else _RESPONSE_HEADERS
                h2.send_response(self.id, head)
            prefix = _PREFIX.pack(compressed, size)
            if size <= _JOIN_BYTES:
                h2.send_data(self.id, b"".join([prefix, *message]))
            else:
                h2.send_data(self.id, prefix + message[0])
                for part in message[1:]:
                    # ngh2 copies: an allocation of megabytes costs page faults each time.
                    for begin in range(0, len(part), _JOIN_BYTES):
                        h2.send_data(self.id, part[begin : begin + _JOIN_BYTES])
        except ngh2.NGH2Error:
            self.abort()  # the peer closed the stream in the data being processed
            return
        if self._receiver is not None:
            self._queued_bytes += size + len(prefix)
            self._pending.append(self._queued_bytes)
            connection.watch_queue(self)
        connection.schedule_flush()

    def finish(self, status: int = 0, details: str = "") -> None:
        """See `Call.finish`."""
        if self._compressing:
            self._outbox.append(lambda: self.finish(status, details))
        else:
            self._finish(status, details)

    def _finish(self, status: int, details: str) -> None:
        if self.done:
            return
        self._end()
        trailers: tuple[tuple[bytes, bytes], ...] = _OK_TRAILERS
        if status:
            trailers = (
                (b"grpc-status", b"%d" % status),
                (b"grpc-message", framing.encode_grpc_message(details)),
            )
        connection = self._connection
        try:
            if self._headers_sent:
                connection.h2.send_trailers(self.id, trailers)
            else:
                connection.h2.send_response(
                    self.id, (*_RESPONSE_HEADERS, *trailers), end_stream=True
                )
                if not self.remote_closed:
                    # Tells the client to stop uploading what nobody will read.
                    connection.reset_after_response(self.id)
        except ngh2.NGH2Error:
            return  # the peer closed the stream in the data being processed
        connection.schedule_flush()

    def pause_reading(self) -> None:
        """See `Call.pause_reading`."""
        self._reading = False

    def resume_reading(self) -> None:
        """See `Call.resume_reading`."""
        self._reading = True
        self._drain_inbox()

    # ---------------------------------------------------------------- called by the connection

    def filled(self, amount: int) -> None:
        """Bytes from DATA frames were put into `large`, which they did not complete."""
        self._acknowledge(amount)

    def data_received(self, data: bytes, end_stream: bool) -> None:
        """A DATA frame, or part of one."""
        self.remote_closed = end_stream
        if self._reader is not None or not self._whole_message(data):
            self._read(data)
        self._acknowledge(len(data))
        if end_stream:
            self._half_closed()

    def trailers_received(self) -> None:
        """HEADERS that end the request; gRPC clients send none, HTTP/2 allows them."""
        self.remote_closed = True
        self._half_closed()

    def abort(self) -> None:
        """The client reset the stream or the connection is gone."""
        if self.done:
            return
        callback = self.on_cancel
        self._end()
        if callback is not None:
            callback()

    def update_unsent(self, queued_bytes: int) -> bool:
        """Learn how much still waits in libnghttp2; True while something does."""
        passed = self._passed_bytes = self._queued_bytes - queued_bytes
        pending = self._pending
        before = len(pending)
        while pending and pending[0] <= passed:
            pending.popleft()
        if len(pending) < before and self.on_sent is not None and not self.done:
            self.on_sent()
        return bool(pending)

    # ---------------------------------------------------------------- inside

    def _whole_message(self, data: bytes) -> bool:
        """The usual case of a small message in one frame, which needs no reader."""
        if len(data) < framing.PREFIX_BYTES:
            return False
        compressed, size = _PREFIX.unpack_from(data)
        whole = len(data) == size + framing.PREFIX_BYTES
        if compressed or not whole or size > self._connection.max_message_bytes:
            return False
        self._take(data[framing.PREFIX_BYTES :])
        return True

    def _read(self, data: bytes) -> None:
        if self.done:
            return
        reader = self._reader
        connection = self._connection
        if reader is None:
            reader = self._reader = MessageReader(
                connection.lease, padding_for_alignment, connection.max_message_bytes
            )
        try:
            messages = reader.feed(data)
            self.large = reader.large
            for compressed, message in messages:
                self._take(message, compressed)
        except FramingError as error:
            self._give_up(error.status, str(error))

    def _take(self, message: Buffer, compressed: bool = False) -> None:
        if self._open_to_messages and not compressed:
            self._message(message)
        else:
            self._inbox.append((compressed, message))
            self._next_messages()

    @property
    def _open_to_messages(self) -> bool:
        """Whether the next message may be handled now."""
        return self._reading and not self._inflating and not self._inbox

    def _next_messages(self) -> None:
        while self._inbox and self._reading and not self._inflating:
            compressed, message = self._inbox.popleft()
            if not compressed:
                self._message(message)
            elif len(message) <= _INLINE_INFLATE_BYTES:
                self._message(self._inflate(message))
            else:
                self._inflating = True
                work = self._connection.loop.run_in_executor(None, self._inflate, message)
                work.add_done_callback(self._inflated)

    def _inflate(self, message: Buffer) -> Buffer:
        """A message as it was before its compression; any thread."""
        encoding = self._headers.get(b"grpc-encoding", b"identity").decode("latin-1")
        return framing.decompress(message, encoding, self._connection.max_message_bytes)

    def _inflated(self, work: asyncio.Future[Buffer]) -> None:
        self._inflating = False
        try:
            self._message(work.result())
        except FramingError as error:
            self._give_up(error.status, str(error))
        self._drain_inbox()

    def _drain_inbox(self) -> None:
        """Handle what waited, then let the client go on."""
        try:
            self._next_messages()
        except FramingError as error:
            self._give_up(error.status, str(error))
        if not self._open_to_messages:
            return
        amount, self._unacknowledged = self._unacknowledged, 0
        if amount:
            self._connection.acknowledge(amount, self.id)
            self._connection.schedule_flush()
        if self.remote_closed:
            self._half_closed()

    def _message(self, message: Buffer) -> None:
        if self.done:
            return
        if self._receiver is not None:
            self._receiver.receive(message)
        elif self._message_seen:
            self._give_up(GrpcStatus.INTERNAL, "a unary call must have one request message")
        else:
            self._message_seen = True
            assert self._method.unary is not None
            self._method.unary(message, self)

    def _half_closed(self) -> None:
        if self.done:
            return
        if self._reader is not None and not self._reader.idle:
            self._give_up(GrpcStatus.INTERNAL, "the last request message is cut off")
        elif not self._open_to_messages:
            return  # told after what waits
        elif self._receiver is not None:
            self._receiver.half_closed()
        elif not self._message_seen:
            self.finish(GrpcStatus.INTERNAL, "a unary call must have one request message")

    def _acknowledge(self, amount: int) -> None:
        """Give the client its window back, unless the stream is held up."""
        if self._open_to_messages or self.done:
            self._connection.acknowledge(amount, self.id)
        else:
            self._unacknowledged += amount

    def _give_up(self, status: GrpcStatus, details: str) -> None:
        """End the call from this side and tell who works on it."""
        if self.done:
            return
        callback = self.on_cancel
        self._finish(status, details)
        if callback is not None:
            callback()

    def _end(self) -> None:
        self.done = True
        self.on_cancel = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        amount, self._unacknowledged = self._unacknowledged, 0
        if amount:
            self._connection.acknowledge(amount, self.id)
        self._inbox.clear()
        self._reader = None
        self.large = None

    def _start_timer(self, header: bytes) -> None:
        seconds = framing.parse_timeout(header.decode("latin-1"))
        if seconds is not None:
            self._timer = self._connection.loop.call_later(seconds, self._deadline_passed)

    def _deadline_passed(self) -> None:
        self._give_up(GrpcStatus.DEADLINE_EXCEEDED, "Deadline Exceeded")
