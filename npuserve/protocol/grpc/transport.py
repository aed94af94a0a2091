"""What the servicer needs of a transport, and what a transport needs of the servicer.

grpcio, pygrpc-native and the libnghttp2 transport implement `Call` and drive the `Method` table;
nothing above this file knows which of them is at work. Everything happens on the event loop's
thread, and nothing here is a coroutine: a unary call costs no task and no future of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from npuserve.protocol.grpc.framing import shortened
from npuserve.protocol.status import grpc_status

if TYPE_CHECKING:
    import asyncio

    from npuserve.errors import NpuserveError
    from npuserve.protocol.grpc.codec import Parts
    from npuserve.tensor import Buffer

# Of one connection; a client with more waits.
# Differs from Triton: it sets no limit, and a flood of streams fills the memory.
MAX_CONCURRENT_STREAMS = 10_000
SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."

# Headers of gRPC and HTTP/2 themselves; not part of a call's metadata.
_TRANSPORT_HEADERS = frozenset({"te", "content-type", "user-agent"})


class Call(Protocol):
    """One RPC in progress, seen from the server.

    Attributes:
        on_cancel: called once if the client gives up or its deadline passes before `finish`;
            afterwards `send` and `finish` do nothing.
        on_sent: called after messages left for the network; streams only.
    """

    on_cancel: Callable[[], None] | None
    on_sent: Callable[[], None] | None

    @property
    def metadata(self) -> Mapping[str, str]:
        """Text metadata by lower-case key; of a repeated key one value."""

    @property
    def unsent(self) -> int:
        """Messages of this stream that wait for a slow reader."""

    @property
    def unsent_bytes(self) -> int:
        """Their size."""

    def send(self, message: Parts) -> None:
        """Send one message; never blocks, the transport keeps it until the peer takes it."""

    def finish(self, status: int = 0, details: str = "") -> None:
        """End the call with a gRPC status, after all messages sent so far."""

    def pause_reading(self) -> None:
        """Deliver no further messages of this stream and let the client's window fill up."""

    def resume_reading(self) -> None:
        """Go on delivering messages."""


class StreamReceiver(Protocol):
    """The server's end of one bidirectional stream."""

    def receive(self, message: Buffer) -> None:
        """One message of the client."""

    def half_closed(self) -> None:
        """The client will send no more."""


@dataclass(frozen=True)
class Method:
    """One RPC: exactly one of `unary` and `stream` is set.

    Attributes:
        path: "/package.Service/Method".
        unary: answers a message by `Call.send` and `Call.finish`, now or later.
        stream: begins a bidirectional stream.
        compress: responses are compressed as `--grpc-infer-response-compression-level` says.
    """

    path: str
    unary: Callable[[Buffer, Call], None] | None = None
    stream: Callable[[Call], StreamReceiver] | None = None
    compress: bool = False


@dataclass(frozen=True)
class TransportOptions:
    """The part of `ServerOptions` that transports look at, in gRPC's units.

    Attributes:
        compression_level: none, low, medium or high.
        *_ms: milliseconds; `max_connection_age_ms` and its grace None for no limit.
        certificate_chain, private_key, root_certificates: PEM; empty without TLS. With root
            certificates, clients must show one of theirs.
    """

    address: str
    port: int
    reuse_port: bool
    max_message_bytes: int
    compression_level: str
    keepalive_time_ms: int
    keepalive_timeout_ms: int
    keepalive_permit_without_calls: bool
    max_pings_without_data: int
    min_recv_ping_interval_ms: int
    max_ping_strikes: int
    max_connection_age_ms: int | None
    max_connection_age_grace_ms: int | None
    certificate_chain: bytes = b""
    private_key: bytes = b""
    root_certificates: bytes = b""

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.certificate_chain)


class Transport(Protocol):
    """A listener that answers the methods it was made with."""

    @property
    def port(self) -> int:
        """Bound port, known after `start`."""

    async def start(self) -> None:
        """Bind and accept connections.

        Raises:
            OSError: the address cannot be bound.
        """

    async def stop(self, grace_s: float, refuse: Callable[[], None]) -> None:
        """Accept nothing new, let calls end for up to `grace_s` seconds, cut the rest.

        Args:
            refuse: called when the clients know of the end, or cannot be told: what they ask
                for on open streams from then on is to be refused. Until then they are served.
        """


# Every transport: (methods, options, loop, lease of large buffers) → Transport.
TransportFactory = Callable[
    [
        Iterable[Method],
        TransportOptions,
        "asyncio.AbstractEventLoop",
        Callable[[int], memoryview],
    ],
    Transport,
]


def fail(call: Call, error: NpuserveError) -> None:
    """End a call with the status and the text of an error."""
    call.finish(grpc_status(error.code), shortened(str(error)))


def text_metadata(pairs: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Metadata of a call without binary values and what belongs to the transport."""
    return {
        key: value if isinstance(value, str) else value.decode("latin-1")
        for key, value in pairs
        if not key.startswith((":", "grpc-"))
        and not key.endswith("-bin")
        and key not in _TRANSPORT_HEADERS
    }
