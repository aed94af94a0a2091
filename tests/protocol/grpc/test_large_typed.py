"""Requests whose decoding takes long: a thread does it, on every transport."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import grpc
import pytest

from npuserve._proto import grpc_service_pb2 as pb
from npuserve.protocol.grpc import codec
from npuserve.protocol.grpc.infer import InferFrontEnd
from npuserve.protocol.grpc.transport import Call
from npuserve.tensor import pack_strings
from tests.protocol.grpc.conftest import Rig, request
from tests.protocol.grpc.fakes import response_of

TEXTS = [b"%d" % number for number in range(50_000)]


def typed(model: str = "echo", *, id: str = "", datatype: str = "BYTES") -> pb.ModelInferRequest:
    """A request of many typed strings, whatever it says they are."""
    message = pb.ModelInferRequest(model_name=model, id=id)
    message.inputs.add(name="INPUT0", datatype=datatype, shape=[len(TEXTS)])
    message.inputs[0].contents.bytes_contents.extend(TEXTS)
    return message


class Gate:
    """Stands before the decoding of requests in threads; that on the loop goes on.

    Attributes:
        call: whose request came last.
    """

    call: Call

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._open = threading.Event()
        self._decode = codec.to_inference_request
        self._decode_in_thread = InferFrontEnd.decode_in_thread
        self.reached = asyncio.Event()

    def open(self) -> None:
        """Let all pass, now and later."""
        self._open.set()

    def decode(self, *arguments: Any) -> Any:
        """In place of `codec.to_inference_request`."""
        if threading.get_ident() != self._loop_thread:
            self._loop.call_soon_threadsafe(self.reached.set)
            self._open.wait()
        return self._decode(*arguments)

    def decode_in_thread(
        self, front: InferFrontEnd, decode: Any, plan: Any, call: Call, *rest: Any
    ) -> Any:
        """In place of `InferFrontEnd.decode_in_thread`."""
        self.call = call
        return self._decode_in_thread(front, decode, plan, call, *rest)

    def left(self) -> asyncio.Event:
        """Set when the server has learnt that the client of `call` gave up."""
        left, tell = asyncio.Event(), self.call.on_cancel
        assert tell is not None

        def cancelled() -> None:
            tell()
            left.set()

        self.call.on_cancel = cancelled
        return left


@pytest.fixture
async def gate(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(codec, "to_inference_request", gate.decode)
    monkeypatch.setattr(
        InferFrontEnd,
        "decode_in_thread",
        lambda front, *arguments: gate.decode_in_thread(front, *arguments),
    )
    yield gate
    gate.open()


async def test_others_are_served_meanwhile(rig: Rig, gate: Gate) -> None:
    """A request of many strings does not hold up the loop, and is answered rightly."""
    large = rig.infer(typed(id="1"))
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(large)
        await gate.reached.wait()
        await rig.infer(request())
        gate.open()
    assert answer.result().id == "1"
    assert answer.result().raw_output_contents[0] == pack_strings(TEXTS)


async def test_raw_strings_are_walked_through_in_the_thread(rig: Rig, gate: Gate) -> None:
    """So that the core need not do it."""
    message = request("hold", bytes(pack_strings(TEXTS)))
    message.inputs[0].datatype = "BYTES"
    message.inputs[0].shape[:] = [len(TEXTS)]
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.infer(message))
        await gate.reached.wait()
        gate.open()
        held = await rig.core.held.get()
        assert not held.inputs["INPUT0"].long_to_scan
        held.deliver(response_of(held), True)


async def test_a_stream_keeps_its_order(rig: Rig, gate: Gate) -> None:
    """The requests behind a large one wait for it, and so does the end of the stream."""
    stream = rig.stream()
    await stream.write(request("hold", id="a"), typed("hold", id="b"), request("hold", id="c"))
    async with asyncio.TaskGroup() as group:
        rest = group.create_task(stream.rest())
        await gate.reached.wait()
        held = [await rig.core.held.get()]
        await rig.infer(request())
        assert rig.core.held.empty()
        gate.open()
        held += [await rig.core.held.get() for _ in range(2)]
        assert [each.id for each in held] == ["a", "b", "c"]
        for each in held:
            each.deliver(response_of(each), True)
    assert [answer.infer_response.id for answer in rest.result()] == ["a", "b", "c"]


@pytest.mark.parametrize("unary", [True, False])
async def test_a_client_that_leaves_is_not_served(rig: Rig, gate: Gate, unary: bool) -> None:
    """Its request never reaches the core."""
    if unary:
        call = rig.unary("ModelInfer", typed("hold"))
    else:
        stream = rig.stream()
        call = stream.call
        await stream.write(typed("hold"))
    await gate.reached.wait()
    left = gate.left()
    call.cancel()
    await left.wait()
    gate.open()
    await rig.infer(typed())
    assert rig.core.held.empty()


@pytest.mark.parametrize("model", ["echo", "stream"])
async def test_errors_are_those_of_the_usual_way(rig: Rig, model: str) -> None:
    """Found in the thread or by the core, they answer this request alone."""
    stream = rig.stream()
    unknown = typed(model, id="2")
    unknown.inputs[0].name = "BAD"
    await stream.write(typed(model, id="1", datatype="INT32"), unknown, request(id="3"))
    answers = await stream.rest()
    assert "expected datatype 'INT32'" in answers[0].error_message
    assert answers[1].error_message == "unexpected inference input 'BAD'"
    assert [answer.infer_response.id for answer in answers] == ["1", "2", "3"]
    assert not answers[2].error_message


async def test_errors_of_a_unary_call(rig: Rig) -> None:
    """The status is that of the error."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.infer(typed(datatype="INT32"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_thread_reads_shared_memory(rig: Rig) -> None:
    """Another input of such a request may lie there."""
    memory = SharedMemory(create=True, size=8)
    try:
        assert memory.buf is not None
        memory.buf[:8] = b"abcdefgh"
        register = pb.SystemSharedMemoryRegisterRequest(
            name="r", key=f"/{memory.name}", byte_size=8
        )
        await rig.unary("SystemSharedMemoryRegister", register)
        message = typed()
        message.inputs.add(name="INPUT1", datatype="FP32", shape=[2])
        message.inputs[1].parameters["shared_memory_region"].string_param = "r"
        message.inputs[1].parameters["shared_memory_byte_size"].int64_param = 8
        answer = await rig.infer(message)
        assert answer.raw_output_contents[1] == b"abcdefgh"
    finally:
        memory.close()
        memory.unlink()
