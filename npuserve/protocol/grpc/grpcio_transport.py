"""The transport on grpcio's asyncio server, and on pygrpc-native, which has the same interface.

grpcio serves every option, TLS included; pygrpc-native does HTTP/2 outside the GIL but knows
neither TLS, connection age nor compression.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from npuserve.protocol.grpc import framing
from npuserve.protocol.grpc.transport import (
    MAX_CONCURRENT_STREAMS,
    SHUTTING_DOWN,
    Method,
    StreamReceiver,
    TransportOptions,
    text_metadata,
)

if TYPE_CHECKING:
    from npuserve.protocol.grpc.codec import Parts

_LAST_RESPONSES_S = 1.0  # for responses that the library still has to write
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class GrpcioTransport:
    """Listener on a server made by `aio.server()`; implements `Transport`.

    Args:
        aio: `grpc.aio`, or a module like it.
    """

    def __init__(
        self,
        methods: Iterable[Method],
        options: TransportOptions,
        loop: asyncio.AbstractEventLoop,
        lease: Callable[[int], memoryview],
        aio: ModuleType = grpc.aio,
    ) -> None:
        self._options = options
        self._methods = tuple(methods)
        self._aio = aio
        self._server: Any = None
        self._port = 0
        self._calls = _ActiveCalls()

    @property
    def port(self) -> int:
        """See `Transport.port`."""
        return self._port

    async def start(self) -> None:
        """See `Transport.start`."""
        options = self._options
        self._server = self._aio.server(options=self._channel_options())
        for service, handlers in self._handlers().items():
            generic = grpc.method_handlers_generic_handler(service, handlers)
            self._server.add_generic_rpc_handlers((generic,))
            if hasattr(self._server, "add_registered_method_handlers"):
                self._server.add_registered_method_handlers(service, handlers)
        host = f"[{options.address}]" if ":" in options.address else options.address
        address = f"{host}:{options.port}"
        try:
            if options.tls:
                self._port = self._server.add_secure_port(address, self._credentials())
            else:
                self._port = self._server.add_insecure_port(address)
        except RuntimeError as error:  # grpcio's way to say that it could not bind
            raise OSError(str(error)) from error
        await self._server.start()

    async def stop(self, grace_s: float, refuse: Callable[[], None]) -> None:
        """See `Transport.stop`."""
        refuse()
        self._calls.refused = True
        if self._server is None:
            return
        # Stopping the library is its only way to send a GOAWAY, but answers calls that the client
        # sent before it knew with CANCELLED, which nobody repeats. So they get the servicer's
        # refusal first, UNAVAILABLE.
        idle = await self._calls.wait_idle(grace_s)
        await self._server.stop(_LAST_RESPONSES_S if idle else None)

    def _channel_options(self) -> list[tuple[str, int]]:
        options = self._options
        chosen = [
            ("grpc.max_receive_message_length", options.max_message_bytes),
            ("grpc.max_send_message_length", options.max_message_bytes),
            ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
            ("grpc.so_reuseport", int(options.reuse_port)),
            ("grpc.keepalive_time_ms", options.keepalive_time_ms),
            ("grpc.keepalive_timeout_ms", options.keepalive_timeout_ms),
            ("grpc.keepalive_permit_without_calls", int(options.keepalive_permit_without_calls)),
            ("grpc.http2.max_pings_without_data", options.max_pings_without_data),
            (
                "grpc.http2.min_ping_interval_without_data_ms",
                options.min_recv_ping_interval_ms,
            ),
            ("grpc.http2.max_ping_strikes", options.max_ping_strikes),
        ]
        if options.max_connection_age_ms is not None:
            chosen.append(("grpc.max_connection_age_ms", options.max_connection_age_ms))
        if options.max_connection_age_grace_ms is not None:
            grace_ms = options.max_connection_age_grace_ms
            chosen.append(("grpc.max_connection_age_grace_ms", grace_ms))
        return chosen

    def _credentials(self) -> grpc.ServerCredentials:
        options = self._options
        return grpc.ssl_server_credentials(
            [(options.private_key, options.certificate_chain)],
            root_certificates=options.root_certificates or None,
            require_client_auth=bool(options.root_certificates),
        )

    def _handlers(self) -> dict[str, dict[str, grpc.RpcMethodHandler]]:
        """Method handlers by service and name. Without (de)serialisers, messages are bytes."""
        services: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
        for method in self._methods:
            _, service, name = method.path.split("/")
            compressed = method.compress and self._options.compression_level != "none"
            if method.unary is not None:
                handler = grpc.unary_unary_rpc_method_handler(
                    _unary(method, self._calls, compressed)
                )
            else:
                handler = grpc.stream_stream_rpc_method_handler(
                    _stream(method, self._calls, compressed)
                )
            services.setdefault(service, {})[name] = handler
        return services


def native_transport(
    methods: Iterable[Method],
    options: TransportOptions,
    loop: asyncio.AbstractEventLoop,
    lease: Callable[[int], memoryview],
) -> GrpcioTransport:
    """The same on pygrpc-native.

    Raises:
        ImportError: it is not installed.
    """
    import pygrpc_native.aio

    return GrpcioTransport(methods, options, loop, lease, aio=pygrpc_native.aio)


class _ActiveCalls:
    """Counts the calls inside its `with` blocks.

    Attributes:
        refused: new unary calls are turned away.
    """

    def __init__(self) -> None:
        self.refused = False
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self._count += 1
        self._idle.clear()

    def __exit__(self, *exc: object) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until there are none; False if the time was up before."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class _GrpcioCall:
    """The part of `Call` that unary calls and streams have in common."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.on_cancel: Callable[[], None] | None = None
        self.on_sent: Callable[[], None] | None = None
        self.done: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    @property
    def metadata(self) -> Mapping[str, str]:
        """See `Call.metadata`."""
        return text_metadata(self._context.invocation_metadata() or ())

    def finish(self, status: int = 0, details: str = "") -> None:
        """See `Call.finish`."""
        if not self.done.done():
            self.on_cancel = None
            self.done.set_result((status, details))

    def abort(self) -> None:
        """The client gave up, or its deadline passed."""
        callback, self.on_cancel = self.on_cancel, None
        if not self.done.done():
            self.done.cancel()
        if callback is not None:
            callback()


class _UnaryCall(_GrpcioCall):
    """A unary call: the response is kept until `finish`."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.response = b""

    @property
    def unsent(self) -> int:
        """See `Call.unsent`."""
        return 0

    @property
    def unsent_bytes(self) -> int:
        """See `Call.unsent_bytes`."""
        return 0

    def send(self, message: Parts) -> None:
        """See `Call.send`."""
        self.response = framing.join(message)

    def pause_reading(self) -> None:
        """See `Call.pause_reading`; there is nothing to read."""

    def resume_reading(self) -> None:
        """See `Call.resume_reading`."""


class _StreamCall(_GrpcioCall):
    """A bidirectional stream: a queue towards the writing coroutine."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.outbox: deque[bytes] = deque()
        self.unsent_bytes = 0
        self.wake = asyncio.Event()  # something is in the outbox, or the call is done
        self.readable = asyncio.Event()
        self.readable.set()

    @property
    def unsent(self) -> int:
        """See `Call.unsent`."""
        return len(self.outbox)

    def send(self, message: Parts) -> None:
        """See `Call.send`."""
        if not self.done.done():
            data = framing.join(message)
            self.outbox.append(data)
            self.unsent_bytes += len(data)
            self.wake.set()

    def finish(self, status: int = 0, details: str = "") -> None:
        """See `Call.finish`."""
        super().finish(status, details)
        self.wake.set()

    def pause_reading(self) -> None:
        """See `Call.pause_reading`."""
        self.readable.clear()

    def resume_reading(self) -> None:
        """See `Call.resume_reading`."""
        self.readable.set()

    async def write_all(self) -> None:
        """Write what is sent until the call is finished and the outbox empty."""
        while True:
            while self.outbox:
                await self._context.write(self.outbox[0])
                self.unsent_bytes -= len(self.outbox.popleft())
                if self.on_sent is not None:
                    self.on_sent()
            if self.done.done():
                return
            self.wake.clear()
            await self.wake.wait()


def _unary(
    method: Method, calls: _ActiveCalls, compressed: bool
) -> Callable[[bytes, Any], Awaitable[bytes]]:
    handle = method.unary
    assert handle is not None

    async def serve(request: bytes, context: Any) -> bytes:
        call = _UnaryCall(context)
        if calls.refused:
            await context.abort(grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        with calls:
            handle(request, call)
            try:
                status, details = await call.done
            except asyncio.CancelledError:
                call.abort()
                raise
        if status:
            await context.abort(_STATUS[status], details)
        if compressed:
            context.set_compression(grpc.Compression.Gzip)
        return call.response

    return serve


def _stream(
    method: Method, calls: _ActiveCalls, compressed: bool
) -> Callable[[Any, Any], Awaitable[None]]:
    open_stream = method.stream
    assert open_stream is not None

    async def serve(requests: Any, context: Any) -> None:
        call = _StreamCall(context)
        if compressed:
            context.set_compression(grpc.Compression.Gzip)
        with calls:
            await _run_stream(requests, call, open_stream(call))
        status, details = (0, "") if call.done.cancelled() else call.done.result()
        if status:
            await context.abort(_STATUS[status], details)

    return serve


async def _run_stream(requests: Any, call: _StreamCall, receiver: StreamReceiver) -> None:
    """Read and write until the call is finished or given up."""
    # Apart from the `except*` below, which would put a cancellation into a group: grpcio takes
    # that for a failure of the handler and logs it with all its frames.
    try:
        await _read_and_write(requests, call, receiver)
    except asyncio.CancelledError:
        call.abort()
        raise


async def _read_and_write(requests: Any, call: _StreamCall, receiver: StreamReceiver) -> None:
    try:
        # A task of its own for reading: responses must not wait for the next request.
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(_read_all(requests, call, receiver), name="read")
            await call.write_all()
            reading.cancel()
    except* grpc.RpcError:
        call.abort()


async def _read_all(requests: Any, call: _StreamCall, receiver: StreamReceiver) -> None:
    async for message in requests:
        await call.readable.wait()
        receiver.receive(message)
    receiver.half_closed()
