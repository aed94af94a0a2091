"""A running front end over a fake inference server, on the fast and the slow path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop

from npuserve.options import ServerOptions
from npuserve.protocol.http.server import HttpServer
from npuserve.protocol.shared_memory import SharedMemoryRegistry
from tests.protocol.http.fakes import Client, FakeModel, FakeServer


class Running:
    """A front end that listens.

    Attributes:
        server: the fake behind it.
        http: the front end.
    """

    def __init__(self, server: FakeServer, http: HttpServer, stack: AsyncExitStack) -> None:
        self.server = server
        self.http = http
        self._stack = stack

    async def connect(self) -> Client:
        client = await Client.connect(self.http.port)
        self._stack.push_async_callback(client.close)
        return client


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The tests of this folder run on the loop that the server runs on."""
    return {"uvloop": uvloop.new_event_loop}


Start = Callable[..., Awaitable[Running]]


@pytest.fixture(params=[True, False], ids=["fast", "slow"])
def fast_path(request: pytest.FixtureRequest) -> bool:
    """Both ways an infer request may take; the replies must be the same."""
    return bool(request.param)


@pytest.fixture
async def start(fast_path: bool) -> AsyncIterator[Start]:
    """Start a front end: models, and options as keywords."""
    async with AsyncExitStack() as stack:

        async def starter(*models: FakeModel, **settings: Any) -> Running:
            server = FakeServer(*models)
            options = ServerOptions(**{"http_address": "127.0.0.1", "http_port": 0, **settings})
            registry = SharedMemoryRegistry(options.allow_client_shm, server.buffer_pool.lease)
            http = HttpServer(server, options, registry, fast_path=fast_path)  # type: ignore[arg-type]
            await http.start()
            stack.callback(registry.close)
            stack.push_async_callback(http.stop, 1)
            return Running(server, http, stack)

        yield starter
