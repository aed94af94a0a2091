"""GrpcServer: chooses the transport, starts it and takes it down. Steps 1 and 10 of the walk.

| `--grpc-server` | library | for |
|---|---|---|
| nghttp2 | libnghttp2 (ngh2), in the event loop | the fastest; everything but TLS |
| native | pygrpc-native | no TLS, connection age, deflate or compressed responses |
| grpcio | grpcio | everything |
| auto | the first of these that is installed and can do what the options ask | |
"""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from npuserve.errors import InvalidArgumentError, UnavailableError
from npuserve.flag_values import header_pattern
from npuserve.protocol.grpc.infer import InferFrontEnd
from npuserve.protocol.grpc.servicer import Servicer
from npuserve.protocol.grpc.transport import Transport, TransportFactory, TransportOptions

if TYPE_CHECKING:
    from npuserve.options import ServerOptions
    from npuserve.protocol.shared_memory import SharedMemoryRegistry
    from npuserve.server.core import InferenceServer

logger = logging.getLogger(__name__)

_MODULES = {"nghttp2": "ngh2", "native": "pygrpc_native", "grpcio": "grpc"}


class GrpcServer:
    """The gRPC front end of one InferenceServer."""

    def __init__(
        self,
        server: InferenceServer,
        options: ServerOptions,
        shared_memory: SharedMemoryRegistry,
    ) -> None:
        pattern = options.grpc_header_forward_pattern
        self._front_end = InferFrontEnd(
            server, shared_memory, header_pattern(pattern) if pattern else None
        )
        self._servicer = Servicer(
            server,
            shared_memory,
            self._front_end,
            restricted=dict(options.grpc_restricted_protocol),
            max_unsent=options.grpc_max_response_pool_size,
        )
        self._server = server
        self._options = options
        self._transport: Transport | None = None

    @property
    def port(self) -> int:
        """Bound port, known after `start`."""
        assert self._transport is not None
        return self._transport.port

    async def start(self) -> None:
        """Bind the port and serve.

        Raises:
            UnavailableError: the port is taken.
            InvalidArgumentError: unreadable certificates, or a transport that cannot do this.
        """
        options = await asyncio.to_thread(transport_options, self._options)
        name = choose_transport(self._options.grpc_server, options)
        transport = _factory(name)(
            self._servicer.methods(),
            options,
            self._server.loop,
            self._server.buffer_pool.lease,
        )
        try:
            await transport.start()
        except OSError as error:
            raise UnavailableError(_bind_text(options, error)) from error
        logger.info("gRPC is served by %s", name)
        self._transport = transport

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, let accepted ones end for up to `grace_s` seconds."""
        if self._transport is not None:
            await self._transport.stop(grace_s, self._front_end.stop)


def choose_transport(wanted: str, options: TransportOptions) -> str:
    """The transport to use: `wanted`, or for "auto" the fastest that fits.

    Raises:
        InvalidArgumentError: the wanted one is not installed or cannot do what the options ask.
    """
    if wanted == "auto":
        for name in _MODULES:
            if not _obstacle(name, options):
                return name
        wanted = "grpcio"  # for its reason
    reason = _obstacle(wanted, options)
    if reason:
        raise InvalidArgumentError(f"--grpc-server={wanted}: {reason}")
    return wanted


def _obstacle(name: str, options: TransportOptions) -> str:
    """Why a transport cannot be used; "" if it can."""
    module = _MODULES[name]
    if importlib.util.find_spec(module) is None:
        return f"the package that provides '{module}' is not installed"
    if name != "grpcio" and options.tls:
        return "TLS is served by grpcio only"
    if name == "native" and options.max_connection_age_ms is not None:
        return "pygrpc-native does not close connections by age"
    if name == "native" and options.compression_level != "none":
        return "pygrpc-native does not compress responses"
    return ""


def _factory(name: str) -> TransportFactory:
    if name == "nghttp2":
        from npuserve.protocol.grpc.nghttp2_transport import Nghttp2Transport

        return Nghttp2Transport
    from npuserve.protocol.grpc.grpcio_transport import GrpcioTransport, native_transport

    return native_transport if name == "native" else GrpcioTransport


def transport_options(options: ServerOptions) -> TransportOptions:
    """What transports need of the server's options; reads the certificates.

    Raises:
        InvalidArgumentError: a PEM file cannot be read.
    """
    chain = key = roots = b""
    if options.grpc_use_ssl or options.grpc_use_ssl_mutual:
        chain = _read_pem("grpc-server-cert", options.grpc_server_cert)
        key = _read_pem("grpc-server-key", options.grpc_server_key)
        if options.grpc_use_ssl_mutual:
            roots = _read_pem("grpc-root-cert", options.grpc_root_cert)
    return TransportOptions(
        address=options.grpc_address,
        port=options.grpc_port,
        reuse_port=options.reuse_grpc_port,
        max_message_bytes=options.grpc_max_message_bytes,
        compression_level=options.grpc_infer_response_compression_level,
        keepalive_time_ms=options.grpc_keepalive_time,
        keepalive_timeout_ms=options.grpc_keepalive_timeout,
        keepalive_permit_without_calls=options.grpc_keepalive_permit_without_calls,
        max_pings_without_data=options.grpc_http2_max_pings_without_data,
        min_recv_ping_interval_ms=options.grpc_http2_min_recv_ping_interval_without_data,
        max_ping_strikes=options.grpc_http2_max_ping_strikes,
        max_connection_age_ms=options.grpc_max_connection_age or None,
        max_connection_age_grace_ms=options.grpc_max_connection_age_grace or None,
        certificate_chain=chain,
        private_key=key,
        root_certificates=roots,
    )


def _read_pem(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"--{flag}: cannot read '{path}': {error.strerror or error}"
        ) from error


def _bind_text(options: TransportOptions, error: OSError) -> str:
    where = f"{options.address}:{options.port}"
    if error.errno == errno.EADDRINUSE or "bind" in str(error):
        return f"Socket '{where}' already in use "
    return f"Socket '{where}' cannot be opened: {error.strerror or error}"
