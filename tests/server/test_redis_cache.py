"""The response cache in a real Redis server, and in its stand-in where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from npuserve.errors import InvalidArgumentError
from npuserve.options import ServerOptions
from npuserve.server import response_cache
from npuserve.server.response_cache import Store, create_cache
from tests.server.test_response_cache import Model

PROGRAM = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(PROGRAM is None, reason="there is no redis-server")


class RedisServer:
    """`redis-server` on a port of 127.0.0.1 that was free; starts on entry, ends on exit."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._directory = directory
        self._options = options
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when it takes connections; after the first time on the same port."""
        while not self._try(self.port or free_port()):
            assert not self.port, "the port was taken meanwhile"

    def _try(self, port: int) -> bool:
        command = [PROGRAM or "", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        self.process = subprocess.Popen(
            [*command, *self._options], cwd=self._directory, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        if any("Ready to accept connections" in line for line in self.process.stdout):
            self.port = port
            return True
        self.stop()
        return False

    def stop(self, number: int = signal.SIGKILL) -> None:
        """End the process, as a crash does."""
        process, self.process = self.process, None
        if process is not None and process.stdout is not None:
            process.send_signal(number)
            process.wait()
            process.stdout.close()

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def stand_in() -> Iterator[int]:
    """A server of fakeredis on a free port."""
    fakeredis = pytest.importorskip("fakeredis")
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(params=["stand-in", pytest.param("redis-server", marks=needs_redis)])
def redis_port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """Where a Redis server listens."""
    if request.param == "stand-in":
        with stand_in() as port:
            yield port
    else:
        with RedisServer(tmp_path) as server:
            yield server.port


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that did not answer is asked again at once."""
    monkeypatch.setattr(response_cache, "_REDIS_PAUSE_NS", 0)


def connect(port: int, **settings: str) -> Store:
    settings = {"host": "127.0.0.1", "port": str(port), **settings}
    options = ServerOptions(model_repository=("r",), cache_config={"redis": settings})
    store = create_cache(options)
    assert store is not None
    return store


async def send(model: Model, data: bytes = b"x") -> int | str:
    """Send one request; the number of the execution its answer comes from."""
    before = len(model.answers)
    model.send(data)
    await model.wait_for_answers(before + 1)
    return model.answers[-1]


async def stored(store: Store, key: bytes) -> bytes | None:
    """What the server has, when it has done what was asked for before."""
    answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
    store.get(key, answer.set_result)
    return await answer


async def test_redis_answers_a_second_server(redis_port: int) -> None:
    """What one server stored is a hit in another one."""
    for execution in (1, 0):
        store = connect(redis_port)
        model = Model(store)
        for _ in range(2):  # the second lookup comes after the insertion
            await send(model)
        assert len(model.pool.executed) == execution
        store.close()


async def test_what_something_else_has_stored_is_a_miss(
    redis_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is executed, and its answer takes the place."""
    store = connect(redis_port)
    model = Model(store)
    keys: list[bytes] = []
    get = store.get

    def listening(key: bytes, found: Callable[[bytes | None], None]) -> None:
        keys.append(key)
        get(key, found)

    monkeypatch.setattr(store, "get", listening)
    assert await send(model) == 1
    for execution, foreign in enumerate((b"", b"x", b"\2\0\0\0{}", b"\4\0\0\0null"), start=2):
        store.put(keys[0], foreign)
        assert [await send(model) for _ in range(2)] == [execution, execution]
    store.close()


async def test_a_redis_server_that_is_gone_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    """Requests are executed as without a cache, and the log says so once."""
    store = connect(1)
    model = Model(store)
    for _ in range(3):
        model.send()
    await model.wait_for_answers(3)
    model.send()
    store.close()
    assert model.answers == [1, 2, 3, 4]
    assert caplog.text.count("cannot be used") == 1


@needs_redis
@pytest.mark.usefixtures("impatient")
async def test_a_server_that_goes_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Executed while it is gone; afterwards the cache works again, from empty."""
    with RedisServer(tmp_path) as server:
        store = connect(server.port)
        model = Model(store)
        assert [await send(model) for _ in range(2)] == [1, 1]
        server.stop()
        assert [await send(model) for _ in range(2)] == [2, 3]
        server.start()
        assert [await send(model) for _ in range(2)] == [4, 4]
        store.close()
    assert caplog.text.count("cannot be used") == 1


@needs_redis
async def test_a_server_that_hangs_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many lookups are queued, all end with the first time-out."""
    monkeypatch.setattr(response_cache, "_REDIS_PAUSE_NS", 1 << 60)
    with RedisServer(tmp_path) as server:
        store = connect(server.port, socket_timeout="200")
        assert await stored(store, b"k") is None
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        model = Model(store)
        for _ in range(100):
            model.send()
        await model.wait_for_answers(100)
        assert model.answers == list(range(1, 101))
        store.close()


@needs_redis
@pytest.mark.parametrize(
    "settings", [{}, {"password": "guess"}, {"user": "u", "password": "right"}]
)
async def test_a_wrong_password_is_said_at_the_start(
    tmp_path: Path, settings: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Without telling it; requests are executed."""
    with RedisServer(tmp_path, "--requirepass", "right") as server:
        store = connect(server.port, **settings)
        model = Model(store)
        assert [await send(model) for _ in range(2)] == [1, 2]
        store.close()
        (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert "uthenticat" in record.message or "password" in record.message
        assert "guess" not in record.message
        store = connect(server.port, password="right")
        assert [await send(Model(store)) for _ in range(2)] == [1, 1]
        store.close()


@needs_redis
async def test_a_full_server_that_evicts_goes_on_storing(tmp_path: Path) -> None:
    """The oldest entries are misses again, the newest a hit."""
    options = ("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    with RedisServer(tmp_path, *options) as server:
        store = connect(server.port)
        for number in range(100):
            store.put(b"%d" % number, bytes(200_000))
        assert await stored(store, b"0") is None
        assert await stored(store, b"99") == bytes(200_000)
        store.close()


@needs_redis
async def test_a_full_server_that_evicts_nothing_still_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was stored stays a hit; that no more is stored is said once."""
    options = ("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    with RedisServer(tmp_path, *options) as server:
        store = connect(server.port)
        for number in range(100):
            store.put(b"%d" % number, bytes(200_000))
        assert await stored(store, b"0") == bytes(200_000)
        assert await stored(store, b"99") is None
        store.close()
    assert caplog.text.count("refuses 'set'") == 1
    assert "cannot be used" not in caplog.text


@pytest.mark.parametrize("name", ["port", "db", "wait_timeout", "socket_timeout"])
def test_a_setting_that_is_no_number(name: str) -> None:
    """It is named."""
    settings = {"host": "h", name: "many"}
    options = ServerOptions(model_repository=("r",), cache_config={"redis": settings})
    with pytest.raises(InvalidArgumentError, match=f"redis,{name}=many must be a number"):
        create_cache(options, lambda *_: None)
