"""One HTTP/2 connection of the libnghttp2 transport: an asyncio protocol around ngh2.

libnghttp2 does frames, header compression, flow control and protocol checks without I/O. This
class moves bytes between it and the socket, gives events to streams, and keeps the connection's
own rules: keepalive, ping strikes, age and graceful end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import ngh2
from ngh2 import (
    ConnectionClosed,
    DataReceived,
    PingAcknowledged,
    PingReceived,
    RequestReceived,
    SettingsReceived,
    StreamClosed,
    StreamReset,
    TrailersReceived,
)

from npuserve.protocol.grpc.framing import GrpcStatus, encode_grpc_message
from npuserve.protocol.grpc.nghttp2_stream import Stream
from npuserve.protocol.grpc.transport import MAX_CONCURRENT_STREAMS

if TYPE_CHECKING:
    from npuserve.protocol.grpc.nghttp2_transport import Nghttp2Transport

# A 5 MB image fits into a stream's window without waiting for a WINDOW_UPDATE.
_STREAM_WINDOW_BYTES = 16 << 20
_CONNECTION_WINDOW_BYTES = 64 << 20
# gRPC core sends frames as large as it may. ngh2 joins the pieces of a frame that comes in several
# reads: those of a megabyte cost it page faults and copies, more than their number saves.
_FRAME_BYTES = 64 << 10
# Of the values of a call's headers. Larger ones are refused call by call, as gRPC core does, as
# long as libnghttp2 can read them at all: beyond `max_inbound_header_list_size`, or with one value
# of more than 64 KiB, it ends the connection, as it has lost the state of header compression.
_MAX_METADATA_BYTES = 64 << 10
_SETTINGS = {
    ngh2.Setting.MAX_CONCURRENT_STREAMS: MAX_CONCURRENT_STREAMS,
    ngh2.Setting.INITIAL_WINDOW_SIZE: _STREAM_WINDOW_BYTES,
    ngh2.Setting.MAX_FRAME_SIZE: _FRAME_BYTES,
    ngh2.Setting.MAX_HEADER_LIST_SIZE: _MAX_METADATA_BYTES,
}
_CONFIGURATION = ngh2.Configuration(
    auto_window_update=False,  # a stream that is not read must not be refilled
    # Deadlines make honest clients reset many streams; this still bounds a rapid-reset flood.
    stream_reset_rate_limit=(20_000, 2_000),
    max_inbound_header_list_size=1 << 20,
    max_continuations=64,  # so many of the smallest frames
)
# Bytes given to the socket at once; between two of them a slow peer can make us stop.
_WRITE_BYTES = 1 << 20
# For a client to close its side of a connection that we have closed.
_LINGER_S = 1.0
# For the client's preface and settings, as gRPC core has it; nobody may hold a socket for nothing.
HANDSHAKE_S = 120.0
_DRAIN_PING = b"draining"
# For the client's answer to it. gRPC core waits for 20 s; a stop is not to take that long because
# of a client that is stuck.
_DRAIN_S = 1.0
# gRPC lets a client ping an idle connection every two hours, whatever the options say.
_IDLE_PING_INTERVAL_S = 7200.0
_AGE_JITTER = 0.1  # gRPC spreads the age of connections by this share


class Connection(asyncio.BufferedProtocol):
    """A client's connection.

    Attributes:
        h2: sans-I/O state; whoever changes it calls `schedule_flush`.
        streams: calls in progress by stream id.
        compresses: whether responses may be compressed at all.
        told: the client has no more calls on the way that it does not know to be in vain.
    """

    def __init__(self, owner: Nghttp2Transport) -> None:
        self._owner = owner
        self.loop = owner.loop
        self.lease = owner.lease
        self.max_message_bytes = owner.options.max_message_bytes
        self.compresses = owner.gzip_level > 0
        self.h2 = ngh2.Connection(ngh2.Role.SERVER, _CONFIGURATION)
        self.streams: dict[int, Stream] = {}
        self._transport: asyncio.Transport | None = None
        self._reading = False  # inside buffer_updated, which flushes at its end
        self._flush_scheduled = False
        self._write_paused = False
        self._queued: set[Stream] = set()  # streams with unsent messages
        self._to_reset: list[int] = []
        self._greeted = False  # the client has sent its settings
        self._draining = False
        self._told = False  # the final GOAWAY is on its way
        self._closing = False
        self._lingering = False  # all is written, our side is closed
        self._last_read = self.loop.time()
        self._last_ping = -_IDLE_PING_INTERVAL_S
        self._ping_strikes = 0
        self._queued_at_ping = 0  # bytes of responses that waited at the last ping
        self._timers: list[asyncio.TimerHandle] = []

    # ---------------------------------------------------------------- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        transport = cast("asyncio.Transport", transport)  # uvloop's class is no subclass
        if self._owner.stopping:  # accepted at the last moment: the client goes elsewhere
            transport.abort()
            return
        self._transport = transport
        transport.set_write_buffer_limits(high=2 * _WRITE_BYTES)
        self._owner.connections.add(self)
        self.h2.initiate_connection(_SETTINGS)
        self.h2.set_local_window_size(_CONNECTION_WINDOW_BYTES)
        self._start_timers()
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The read buffer, shared by all connections: its content is used up at once."""
        return self._owner.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes of the client are in the read buffer."""
        self._last_read = self.loop.time()
        if self._lingering:
            return
        self._reading = True
        try:
            self.h2.receive_data(self._owner.read_buffer[:nbytes])
            self._handle_all(self.h2.events())
        except ngh2.NGH2Error:
            self._closing = True  # not HTTP/2, or broken; the GOAWAY is flushed below
        self._reading = False
        self._flush()

    def eof_received(self) -> bool:
        """The client closed its side: gRPC has no use for half-open connections."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone: so are all calls on it."""
        self._transport = None
        self._closing = True
        for timer in self._timers:
            timer.cancel()
        for stream in list(self.streams.values()):
            stream.abort()
        self._owner.active_calls -= len(self.streams)
        self.streams.clear()
        self._queued.clear()
        self._owner.connections.discard(self)
        self._owner.changed()

    def pause_writing(self) -> None:
        """The peer reads slowly: keep the rest in libnghttp2."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """Go on writing."""
        self._write_paused = False
        self._flush()

    # ---------------------------------------------------------------- used by streams

    def schedule_flush(self) -> None:
        """Write what libnghttp2 has, once for all calls answered in this loop iteration."""
        if not self._reading and not self._flush_scheduled:
            self._flush_scheduled = True
            self.loop.call_soon(self._flush)
        self._forget_pings()

    def acknowledge(self, amount: int, stream_id: int) -> None:
        """Give received bytes back to the client's windows."""
        if not amount:
            return
        try:
            self.h2.acknowledge_received_data(amount, stream_id)
        except (ngh2.ConnectionStateError, ngh2.StreamUnavailableError):
            return  # ended: there is no window left to refill

    def watch_queue(self, stream: Stream) -> None:
        """Tell the stream when its messages have left."""
        self._queued.add(stream)

    def reset_after_response(self, stream_id: int) -> None:
        """Reset a stream, without an error, once its response was written."""
        self._to_reset.append(stream_id)

    def gzip_level(self, headers: dict[bytes, bytes]) -> int:
        """Zlib level for responses of this call, 0 for none."""
        takes_gzip = b"gzip" in headers.get(b"grpc-accept-encoding", b"")
        return self._owner.gzip_level if takes_gzip else 0

    # ---------------------------------------------------------------- life of the connection

    def drain(self) -> None:
        """Tell the client to go elsewhere with new calls; running ones may end.

        The final GOAWAY follows when the client has seen the notice: it answers the ping. Calls
        it sent before are served as any other.
        """
        if self._draining or self._closing:
            return
        self._draining = True
        try:
            self.h2.send_shutdown_notice()
            self.h2.ping(_DRAIN_PING)
        except ngh2.ConnectionStateError:
            self._closing = True  # the client has said goodbye already
        self._timers.append(self.loop.call_later(_DRAIN_S, self._say_goodbye))
        self.schedule_flush()

    @property
    def told(self) -> bool:
        """See the class."""
        return self._told or self._closing

    def close(self) -> None:
        """End the connection now; what was sent so far still arrives."""
        if self._transport is None:
            return
        if not self._closing:
            self._closing = True
            # After the final GOAWAY of a drain there is nothing more to say.
            with contextlib.suppress(ngh2.ConnectionStateError):
                self.h2.terminate_connection()
        self._flush()

    def abort(self) -> None:
        """Drop the connection with whatever was not yet sent."""
        if self._transport is not None:
            self._transport.abort()

    # ---------------------------------------------------------------- inside

    def _handle_all(self, events: list[Any]) -> None:
        """Pass events on; what belongs into a large message, hundreds of them, is put there."""
        streams = self.streams
        filled: dict[int, int] = {}  # bytes by stream
        for event in events:
            if type(event) is DataReceived:
                stream_id = event.stream_id
                stream = streams.get(stream_id)
                if stream is not None:
                    large = stream.large
                    if large is not None and not event.end_stream:
                        data = event.data
                        begin = large.filled
                        end = begin + len(data)
                        if end < large.size:
                            large.target[begin:end] = data
                            large.filled = end
                            filled[stream_id] = filled.get(stream_id, 0) + len(data)
                            continue
            self._handle(event)
        for stream_id, amount in filled.items():
            stream = streams.get(stream_id)
            if stream is None:
                self.acknowledge(amount, stream_id)
            else:
                stream.filled(amount)

    def _handle(self, event: Any) -> None:
        """Pass an event on; the three of every call come first."""
        kind = type(event)
        if kind is DataReceived:
            self._data_received(event)
        elif kind is RequestReceived:
            self._open_stream(event)
        elif kind is StreamClosed:
            self._stream_closed(event.stream_id)
        elif kind is StreamReset or kind is TrailersReceived:
            stream = self.streams.get(event.stream_id)
            if stream is not None:
                stream.abort() if kind is StreamReset else stream.trailers_received()
        elif kind is PingReceived:
            self._count_ping()
        elif kind is PingAcknowledged:
            if self._draining and event.opaque_data == _DRAIN_PING:
                self._say_goodbye()
        elif kind is ConnectionClosed:
            self._closing = True
        elif kind is SettingsReceived:
            self._greeted = True

    def _data_received(self, event: DataReceived) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is None:
            self.acknowledge(len(event.data), event.stream_id)
        else:
            stream.data_received(event.data, event.end_stream)

    def _open_stream(self, event: RequestReceived) -> None:
        headers: dict[bytes, bytes] = dict(event.headers)
        if not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            self.h2.send_response(event.stream_id, ((b":status", b"415"),), end_stream=True)
            return
        path = headers.get(b":path", b"")
        method = self._owner.methods.get(path)
        if method is None:
            self._refuse(event, GrpcStatus.UNIMPLEMENTED, "Method not found!")
            return
        size = sum(map(len, headers.values()))
        if size > _MAX_METADATA_BYTES:
            text = f"received metadata size exceeds hard limit ({size} vs. {_MAX_METADATA_BYTES})"
            self._refuse(event, GrpcStatus.RESOURCE_EXHAUSTED, text)
            return
        stream = Stream(self, event.stream_id, method, headers)
        self.streams[event.stream_id] = stream
        self._owner.active_calls += 1
        stream.open()
        if event.end_stream:
            stream.trailers_received()

    def _refuse(self, event: RequestReceived, status: GrpcStatus, details: str) -> None:
        self.h2.send_response(
            event.stream_id,
            (
                (b":status", b"200"),
                (b"content-type", b"application/grpc"),
                (b"grpc-status", b"%d" % status),
                (b"grpc-message", encode_grpc_message(details)),
            ),
            end_stream=True,
        )
        if not event.end_stream:
            self.reset_after_response(event.stream_id)

    def _stream_closed(self, stream_id: int) -> None:
        stream = self.streams.pop(stream_id, None)
        if stream is None:
            return
        self._queued.discard(stream)
        stream.abort()
        self._owner.active_calls -= 1
        self._owner.changed()
        self._close_if_drained()

    def _say_goodbye(self) -> None:
        """The client has seen the notice, or does not answer: name the last call we serve."""
        if not self.told:
            self._told = True
            with contextlib.suppress(ngh2.ConnectionStateError):  # the client has gone
                self.h2.send_goaway()
            self._close_if_drained()
            self.schedule_flush()
        self._owner.changed()

    def _close_if_drained(self) -> None:
        if self._told and not self.streams:
            self._closing = True

    def _flush(self) -> None:
        self._flush_scheduled = False
        transport = self._transport
        # uvloop raises when one writes to a transport that is already closed.
        if transport is None or self._lingering or transport.is_closing():
            return
        try:
            self._write(transport)
            for event in self.h2.events():  # the last frame of a stream closes it
                self._handle(event)
        except ngh2.NGH2Error:
            self._closing = True  # broken by the peer: libnghttp2 has no more to say
        if self._queued:
            self._update_queued()
        if self._closing:
            self._linger(transport)

    def _linger(self, transport: asyncio.Transport) -> None:
        """Close our side, and the rest when the client has closed its own.

        Whatever the client still sends is read, window updates say: a socket that is closed
        with unread bytes in it is reset, and the kernel drops the responses it has yet to send.
        """
        self._lingering = True
        transport.write_eof()
        self._timers.append(self.loop.call_later(_LINGER_S, transport.close))

    def _write(self, transport: asyncio.Transport) -> None:
        while not self._write_paused:
            data = self.h2.data_to_send(_WRITE_BYTES)
            if data:
                transport.write(data)
            if len(data) < _WRITE_BYTES:
                if not self._to_reset:
                    break
                self._reset_answered()

    def _reset_answered(self) -> None:
        for stream_id in self._to_reset:
            # A client that ended its side or the connection has nothing left to stop.
            with contextlib.suppress(ngh2.NGH2Error):
                self.h2.reset_stream(stream_id, ngh2.ErrorCode.NO_ERROR)
        self._to_reset.clear()

    def _update_queued(self) -> None:
        for stream in list(self._queued):
            if not stream.update_unsent(self.h2.queued_body_size(stream.id)):
                self._queued.discard(stream)

    def _forget_pings(self) -> None:
        """Data frames of ours left: gRPC counts only the pings between two of them."""
        self._ping_strikes = 0
        self._last_ping = -_IDLE_PING_INTERVAL_S

    def _count_ping(self) -> None:
        """Close on a client that pings more often than allowed ("too_many_pings").

        Source: gRPC core, ping_abuse_policy.cc.
        """
        options = self._owner.options
        allowed_s = options.min_recv_ping_interval_ms / 1000
        if not self.streams and not options.keepalive_permit_without_calls:
            allowed_s = _IDLE_PING_INTERVAL_S
        queued = sum(self.h2.queued_body_size(stream_id) for stream_id in self.streams)
        if queued < self._queued_at_ping:  # a long response is on its way, without new calls
            self._forget_pings()
        self._queued_at_ping = queued
        now = self.loop.time()
        too_early = now - self._last_ping < allowed_s
        self._last_ping = now
        if not too_early:
            return
        self._ping_strikes += 1
        if options.max_ping_strikes and self._ping_strikes > options.max_ping_strikes:
            self.h2.send_goaway(ngh2.ErrorCode.ENHANCE_YOUR_CALM, debug_data=b"too_many_pings")
            self._closing = True

    def _start_timers(self) -> None:
        options = self._owner.options
        self._timers.append(self.loop.call_later(options.keepalive_time_ms / 1000, self._keepalive))
        self._timers.append(self.loop.call_later(HANDSHAKE_S, self._check_greeted))
        if options.max_connection_age_ms is not None:
            spread = random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)
            age_s = options.max_connection_age_ms / 1000 * spread
            self._timers.append(self.loop.call_later(age_s, self._too_old))

    def _keepalive(self) -> None:
        """Ping a connection that was silent for the keepalive time."""
        if self._closing:
            return
        options = self._owner.options
        interval_s = options.keepalive_time_ms / 1000
        silent_s = self.loop.time() - self._last_read
        if silent_s < interval_s:
            self._again(interval_s - silent_s, self._keepalive)
        elif not self.streams and not options.keepalive_permit_without_calls:
            self._again(interval_s, self._keepalive)
        else:
            asked_at = self.loop.time()
            self.h2.ping()
            self.schedule_flush()
            self._again(options.keepalive_timeout_ms / 1000, lambda: self._check_alive(asked_at))

    def _check_alive(self, asked_at: float) -> None:
        if self._last_read < asked_at and self._transport is not None:
            self._transport.abort()
        else:
            self._again(self._owner.options.keepalive_time_ms / 1000, self._keepalive)

    def _check_greeted(self) -> None:
        if not self._greeted:
            self.abort()

    def _too_old(self) -> None:
        self.drain()
        grace_ms = self._owner.options.max_connection_age_grace_ms
        if grace_ms is not None:
            self._timers.append(self.loop.call_later(grace_ms / 1000, self.close))

    def _again(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._timers[0] = self.loop.call_later(delay_s, callback)
