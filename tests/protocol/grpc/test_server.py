"""GrpcServer: choice of the transport, ports, TLS."""

from __future__ import annotations

import asyncio
import importlib.util
import struct
import subprocess
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from npuserve.errors import InvalidArgumentError, UnavailableError
from npuserve.protocol.grpc.server import choose_transport
from npuserve.protocol.grpc.transport import TransportOptions
from tests.protocol.grpc.conftest import SERVICE, TRANSPORTS, Rig, request, running


def options(**changes: Any) -> TransportOptions:
    """Default options of a transport."""
    values: dict[str, Any] = {
        "address": "127.0.0.1", "port": 0, "reuse_port": False, "max_message_bytes": 2**31 - 1,
        "compression_level": "none", "keepalive_time_ms": 7_200_000,
        "keepalive_timeout_ms": 20_000, "keepalive_permit_without_calls": False,
        "max_pings_without_data": 2, "min_recv_ping_interval_ms": 300_000,
        "max_ping_strikes": 2, "max_connection_age_ms": None,
        "max_connection_age_grace_ms": None,
    }  # fmt: skip
    return TransportOptions(**(values | changes))


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make packages look uninstalled."""
    find_spec = importlib.util.find_spec

    def hide(*names: str) -> None:
        def find(name: str, package: str | None = None) -> Any:
            return None if name in names else find_spec(name, package)

        monkeypatch.setattr(importlib.util, "find_spec", find)

    return hide


def test_auto_takes_the_fastest_installed(without: Any) -> None:
    """nghttp2, then native, then grpcio."""
    assert choose_transport("auto", options()) == "nghttp2"
    without("ngh2")
    assert choose_transport("auto", options()) == "native"
    without("ngh2", "pygrpc_native")
    assert choose_transport("auto", options()) == "grpcio"


def test_auto_takes_what_can_do_the_options(without: Any) -> None:
    """TLS is grpcio's; compression and connection age are not for pygrpc-native."""
    assert choose_transport("auto", options(certificate_chain=b"x")) == "grpcio"
    assert choose_transport("auto", options(compression_level="low")) == "nghttp2"
    without("ngh2")
    assert choose_transport("auto", options(compression_level="low")) == "grpcio"
    assert choose_transport("auto", options(max_connection_age_ms=5)) == "grpcio"


def test_a_wish_that_cannot_be_granted_is_an_error(without: Any) -> None:
    """An explicit choice is never silently replaced."""
    with pytest.raises(InvalidArgumentError, match="--grpc-server=nghttp2: TLS"):
        choose_transport("nghttp2", options(certificate_chain=b"x"))
    without("ngh2")
    with pytest.raises(InvalidArgumentError, match="'ngh2' is not installed"):
        choose_transport("nghttp2", options())


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_taken_port_is_told(transport: str) -> None:
    """A second server on the same port fails with Triton's text."""
    async with running(transport) as first:
        port = first.front.port
        with pytest.raises(UnavailableError) as caught:
            async with running(transport, grpc_port=port):
                pass
        assert str(caught.value) == f"Socket '127.0.0.1:{port}' already in use "


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_port_can_be_shared(transport: str) -> None:
    """With `--reuse-grpc-port` two servers listen on one port."""
    async with (
        running(transport, reuse_grpc_port=True) as first,
        running(transport, reuse_grpc_port=True, grpc_port=first.front.port) as second,
    ):
        assert first.front.port == second.front.port
        await second.infer(request())


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_ipv6(transport: str) -> None:
    """An IPv6 address is an address like any other."""
    async with (
        running(transport, grpc_address="::1") as rig,
        grpc.aio.insecure_channel(f"[::1]:{rig.front.port}") as channel,
    ):
        assert await channel.unary_unary(SERVICE + "ServerLive")(b"")


_FORBIDDEN = {"spaces": ("key", " value "), "connection": ("connection", "close")}
_TAKEN = {"nghttp2": (), "native": ("spaces",), "grpcio": ("spaces", "connection")}


@pytest.mark.parametrize("kind", _FORBIDDEN)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_metadata_that_http2_forbids(transport: str, kind: str) -> None:
    """A transport that refuses it resets that call only (RFC 9113, section 8.2)."""
    metadata = [_FORBIDDEN[kind]]
    async with running(transport) as rig:
        if kind in _TAKEN[transport]:
            await rig.infer(request(), metadata=metadata)
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="RST_STREAM with error code 1"):
                await rig.infer(request(), metadata=metadata)
        await rig.infer(request())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost; it is its own root."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
            "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
            "-keyout", folder / "key.pem", "-out", folder / "cert.pem",
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls(certificates: Path, mutual: bool) -> None:
    """Over TLS a client with the root is served; with mutual TLS it must show its own too."""
    settings = {
        "grpc_use_ssl": True,
        "grpc_use_ssl_mutual": mutual,
        "grpc_server_cert": str(certificates / "cert.pem"),
        "grpc_server_key": str(certificates / "key.pem"),
        "grpc_root_cert": str(certificates / "cert.pem"),
    }
    certificate = (certificates / "cert.pem").read_bytes()
    key = (certificates / "key.pem").read_bytes()
    async with running("auto", **settings) as rig:
        full = grpc.ssl_channel_credentials(certificate, key, certificate)
        bare = grpc.ssl_channel_credentials(certificate)
        for credentials, welcome in ((full, True), (bare, not mutual)):
            async with grpc.aio.secure_channel(
                f"localhost:{rig.front.port}", credentials
            ) as channel:
                call = channel.unary_unary(SERVICE + "ModelInfer")
                if welcome:
                    assert await call(request().SerializeToString(), timeout=5)
                else:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call(request().SerializeToString(), timeout=5)


async def test_unreadable_certificates_are_told() -> None:
    """A certificate that is not there stops the start, naming the flag."""
    with pytest.raises(InvalidArgumentError, match="--grpc-server-cert: cannot read 'nowhere'"):
        async with running("auto", grpc_use_ssl=True, grpc_server_cert="nowhere"):
            pass


async def test_the_streams_of_a_connection_are_limited(rig: Rig) -> None:
    """The server's first frame says so, on every transport."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.front.port)
    no_settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + no_settings)
    head = await reader.readexactly(9)
    settings = dict(struct.iter_unpack(">HI", await reader.readexactly(int.from_bytes(head[:3]))))
    writer.close()
    await writer.wait_closed()
    assert settings[3] == 10_000  # SETTINGS_MAX_CONCURRENT_STREAMS
