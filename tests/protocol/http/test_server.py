"""The listener: addresses, stopping, TLS; and whole connections on both paths."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import uvloop

from npuserve.errors import InvalidArgumentError, UnavailableError
from npuserve.protocol.http import listener
from npuserve.protocol.http.session import HttpSession
from npuserve.response import InferenceResponse
from tests.protocol.http.conftest import Start
from tests.protocol.http.fakes import Client, FakeModel, Held, get, infer_json, post

PATH = "/v2/models/echo/infer"


async def test_the_loop_is_the_servers() -> None:
    """Buffers and back-pressure are tested with the event loop that is used."""
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)


async def test_a_taken_port_is_named(start: Start) -> None:
    """With the text Triton's log has."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"^Socket '127.0.0.1:{port}' already in use $"):
            await start(http_port=port)


async def test_a_shared_port(start: Start) -> None:
    """Two servers listen at one port when both allow it."""
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first.bind(("127.0.0.1", 0))
        running = await start(http_port=first.getsockname()[1], reuse_http_port=True)
        assert running.http.port == first.getsockname()[1]


async def test_stopping_waits_for_the_request_in_progress(start: Start) -> None:
    """It gets its reply, then the connection closes; idle connections close at once."""
    held = Held()
    running = await start(FakeModel(answer=held))
    busy, idle = await running.connect(), await running.connect()
    assert (await idle.ask(get("/v2"))).status == 200
    await busy.send(post(PATH, infer_json([1])))
    request = await held.requests.get()
    stopping = asyncio.ensure_future(running.http.stop(10))  # the test awaits it below
    assert await idle.is_closed()
    request.deliver(InferenceResponse([]), final=True)
    reply = await busy.reply()
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    assert await busy.is_closed()
    await stopping
    with pytest.raises(ConnectionRefusedError):
        await Client.connect(running.http.port)


async def test_a_request_that_has_arrived_when_the_stop_begins_is_answered(start: Start) -> None:
    """It lies in the socket, not yet read; closing would reset the connection."""
    running = await start()
    client = await running.connect()
    assert (await client.ask(get("/v2"))).status == 200
    client.writer.write(get("/v2"))
    await running.http.stop(10)
    assert (await client.reply()).status == 200


async def test_stopping_has_an_end(start: Start) -> None:
    """What is not answered within the grace is cut off and cancelled."""
    held = Held()
    running = await start(FakeModel(answer=held))
    client = await running.connect()
    await client.send(post(PATH, infer_json([1])))
    request = await held.requests.get()
    await running.http.stop(0)
    assert await client.is_closed()
    assert request.cancelled


async def test_an_error_does_not_end_the_search_for_stalled_clients(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the other connections nor for those of later."""
    looked_at: Counter[HttpSession] = Counter()
    again = asyncio.Event()

    def expire(session: HttpSession, now: float) -> None:
        looked_at[session] += 1
        if len(looked_at) == 2 and min(looked_at.values()) > 1:
            again.set()
        raise RuntimeError("a fault")

    monkeypatch.setattr(listener, "_SWEEP_SECONDS", 0.001)
    monkeypatch.setattr(HttpSession, "expire", expire)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    running = await start()
    for _ in range(2):
        await (await running.connect()).ask(get("/v2"))
    await again.wait()


async def test_more_connections_than_allowed(start: Start) -> None:
    """The one too many gets 503, the others work on."""
    running = await start(http_limit_connections=1)
    first = await running.connect()
    assert (await first.ask(get("/v2"))).status == 200
    for request in (get("/v2"), post(PATH, infer_json([1]))):
        second = await running.connect()
        assert (await second.ask(request)).status == 503
        assert await second.is_closed()
    assert (await first.ask(post(PATH, infer_json([1])))).status == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /v2/health/live HTTP/1.0\r\n\r\n",
        f"POST {PATH} HTTP/1.0\r\nContent-Length: {len(infer_json([1]))}\r\n\r\n".encode()
        + infer_json([1]),
        get("/v2/health/live", "Connection: close"),
        post(PATH, infer_json([1]), "Connection: close"),
    ],
    ids=["1.0", "1.0-infer", "close", "close-infer"],
)
async def test_connections_that_are_not_kept(start: Start, request_bytes: bytes) -> None:
    """A reply with a length, then the end."""
    client = await (await start()).connect()
    reply = await client.ask(request_bytes)
    assert reply.status == 200
    assert "transfer-encoding" not in reply.headers
    assert await client.is_closed()


async def test_different_requests_in_one_packet(start: Start) -> None:
    """Infer and others are answered in their order."""
    client = await (await start()).connect()
    await client.send(
        get("/v2/health/ready")
        + post(PATH, infer_json([1], id="a"))
        + get("/v2")
        + post(PATH, infer_json([1], id="b"))
    )
    assert (await client.reply()).body == b""
    assert (await client.reply()).json()["id"] == "a"
    assert (await client.reply()).json()["name"] == "triton"
    assert (await client.reply()).json()["id"] == "b"


async def test_a_client_that_leaves_cancels(start: Start) -> None:
    """Also when it is the only sign."""
    held = Held()
    running = await start(FakeModel(answer=held))
    client = await running.connect()
    await client.send(post(PATH, infer_json([1])))
    request = await held.requests.get()
    cancelled = running.server.loop.create_future()
    request.on_cancel = cancelled.set_result
    await client.close()
    assert await cancelled is request


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/models/echo/versions/1/infer", 200),
        ("/v2/models/%65ch%6F/infer?tenant=a", 200),
        ("/v2/models/none/infer", 404),
        ("/v2/models/echo/versions/7/infer", 404),
        ("/v2/models/echo/versions/one/infer", 404),
        ("/v2/models/echo/infer/", 404),
        ("/v2/models/a%2Fb/infer", 404),
        ("/v2/models/%/infer", 404),
    ],
)
async def test_paths_of_infer(start: Start, path: str, status: int) -> None:
    """Names may be percent-encoded; a query is ignored; a version is digits."""
    client = await (await start()).connect()
    assert (await client.ask(post(path, infer_json([1])))).status == status


async def test_decoupled_models_are_refused_before_the_body(start: Start) -> None:
    """Whatever the body says."""
    client = await (await start(FakeModel(decoupled=True))).connect()
    reply = await client.ask(post(PATH, b"{bad"))
    assert reply.status == 501
    assert "decoupled transaction policy" in reply.error


@pytest.mark.parametrize("length", ["abc", "-5", "100000", "", "9" * 30])
async def test_wrong_header_lengths(start: Start, length: str) -> None:
    """400 each, and the next request of the connection works."""
    client = await (await start()).connect()
    header = f"Inference-Header-Content-Length: {length}"
    assert (await client.ask(post(PATH, infer_json([1]), header))).status == 400
    assert (await client.ask(post(PATH, infer_json([1])))).status == 200


async def test_an_empty_body_is_a_raw_request(start: Start) -> None:
    """As with Triton: the only input gets no elements."""
    running = await start()
    client = await running.connect()
    assert (await client.ask(post(PATH))).status == 200
    (tensor,) = running.server.requests[0].inputs.values()
    assert list(tensor.shape) == [0]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x",
        "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


async def test_unusable_certificates_are_told(
    start: Start, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    """A path that is wrong, or a file that is no certificate, has one line for the operator."""
    _, key = certificate
    missing = tmp_path / "missing.pem"
    for path, text in (
        (missing, f"--http-ssl-certfile: cannot read '{missing}': No such file"),
        (key, "--http-ssl-certfile, -keyfile or -ca-certs cannot be used: "),
    ):
        with pytest.raises(InvalidArgumentError, match=re.escape(text)):
            await start(http_ssl_certfile=str(path), http_ssl_keyfile=str(key))


async def test_tls(start: Start, certificate: tuple[Path, Path]) -> None:
    """Both kinds of requests, and a large body, over TLS."""
    cert, key = certificate
    running = await start(http_ssl_certfile=str(cert), http_ssl_keyfile=str(key))
    context = ssl.create_default_context(cafile=str(cert))
    streams = await asyncio.open_connection("127.0.0.1", running.http.port, ssl=context)
    client = Client(*streams)
    assert (await client.ask(get("/v2"))).status == 200
    reply = await client.ask(post(PATH, infer_json([0.5] * 20_000)))
    assert reply.json()["outputs"][0]["data"] == [0.5] * 20_000
    values = [0.5] * 500_000
    reply = await client.ask(post(PATH, infer_json(values), "Connection: close"))
    assert reply.json()["outputs"][0]["data"] == values
    assert await client.is_closed()
    await client.close()


async def test_a_client_that_leaves_while_it_sends_is_no_error(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no news for the log, whatever it was about to ask."""
    running = await start()
    for path in ("/v2/repository/index", "/v2/models/echo/generate", "/v2/models/echo/infer"):
        client = await running.connect()
        await client.send(f"POST {path} HTTP/1.1\r\nContent-Length: 9000\r\n\r\n{{".encode())
        client.writer.transport.abort()
    await running.http.stop(1)
    assert caplog.text == ""
