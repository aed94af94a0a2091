"""A gRPC front end over a fake core, on every transport, and channels to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from npuserve._proto import grpc_service_pb2 as pb
from npuserve.options import ServerOptions
from npuserve.protocol.grpc.server import GrpcServer
from npuserve.protocol.shared_memory import SharedMemoryRegistry
from tests.protocol.grpc.fakes import FakeServer

SERVICE = "/inference.GRPCInferenceService/"
TRANSPORTS = ("nghttp2", "grpcio", "native")


class Rig:
    """One running front end, its core and a channel of stock grpcio."""

    def __init__(self, core: FakeServer, front: GrpcServer, channel: grpc.aio.Channel) -> None:
        self.core = core
        self.front = front
        self.channel = channel

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.front.port}"

    def unary(self, method: str, request: Any, **options: Any) -> Any:
        """Call an RPC of the inference service; the response comes as bytes."""
        call = self.channel.unary_unary(
            method if method.startswith("/") else SERVICE + method,
            request_serializer=lambda message: message.SerializeToString(),
        )
        return call(request, **options)

    async def infer(self, request: Any, **options: Any) -> pb.ModelInferResponse:
        """ModelInfer."""
        data = await self.unary("ModelInfer", request, **options)
        return pb.ModelInferResponse.FromString(data)

    async def until_refused(self) -> None:
        """Infer until a call fails, as during a shutdown once this client knows of it."""
        while True:
            await self.infer(request())

    def stream(self, **options: Any) -> Stream:
        """Open ModelStreamInfer."""
        call = self.channel.stream_stream(SERVICE + "ModelStreamInfer")
        return Stream(call(**options))


class Stream:
    """A ModelStreamInfer call that is written and read by hand."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def write(self, *requests: pb.ModelInferRequest) -> None:
        """Send requests."""
        for request in requests:
            await self.call.write(request.SerializeToString())

    async def read(self) -> pb.ModelStreamInferResponse:
        """The next response."""
        data = await self.call.read()
        assert data is not grpc.aio.EOF, "the stream has ended"
        return pb.ModelStreamInferResponse.FromString(data)

    async def rest(self) -> list[pb.ModelStreamInferResponse]:
        """Half-close and read to the end."""
        await self.call.done_writing()
        responses = []
        while (data := await self.call.read()) is not grpc.aio.EOF:
            responses.append(pb.ModelStreamInferResponse.FromString(data))
        return responses


def request(
    model: str = "echo", data: bytes = b"\0" * 16, *, id: str = "", **parameters: Any
) -> pb.ModelInferRequest:
    """A request with one FP32 input."""
    message = pb.ModelInferRequest(model_name=model, id=id)
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[len(data) // 4])
    message.raw_input_contents.append(data)
    for key, value in parameters.items():
        target = message.parameters[key]
        field = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(target, field, value)
    return message


@asynccontextmanager
async def running(transport: str, **options: Any) -> AsyncIterator[Rig]:
    """A front end on `transport`; drained on exit."""
    core = FakeServer()
    settings: dict[str, Any] = {
        "model_repository": ("unused",),
        "grpc_server": transport,
        "grpc_address": "127.0.0.1",
        "grpc_port": 0,
        **options,
    }
    chosen = ServerOptions(**settings)
    front = GrpcServer(core, chosen, SharedMemoryRegistry())  # type: ignore[arg-type]
    await front.start()
    unlimited = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
    ]
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{front.port}", options=unlimited)
    try:
        async with asyncio.timeout(15):
            yield Rig(core, front, channel)
    finally:
        await channel.close()
        await front.stop(0.5)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Name of the transport under test."""
    return str(request.param)


@pytest.fixture
async def start(transport: str) -> AsyncIterator[Callable[..., Awaitable[Rig]]]:
    """Start front ends with options of the test's choice."""
    async with AsyncExitStack() as stack:

        async def begin(**options: Any) -> Rig:
            return await stack.enter_async_context(running(transport, **options))

        yield begin


@pytest.fixture
async def rig(transport: str) -> AsyncIterator[Rig]:
    """A front end with default options."""
    async with running(transport) as started:
        yield started
