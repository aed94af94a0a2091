"""ModelStreamInfer over real connections, the same on every transport."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest

from npuserve._proto import grpc_service_pb2 as pb
from npuserve.errors import InternalError
from npuserve.protocol.grpc import stream as stream_module
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from tests.protocol.grpc.conftest import Rig, request, running
from tests.protocol.grpc.fakes import FakeModel, response_of

Start = Callable[..., Awaitable[Rig]]


def final_flags(responses: list[pb.ModelStreamInferResponse]) -> list[bool]:
    """`triton_final_response` of each."""
    return [
        each.infer_response.parameters["triton_final_response"].bool_param for each in responses
    ]


def ids(responses: list[pb.ModelStreamInferResponse]) -> list[str]:
    """The request id of each."""
    return [each.infer_response.id for each in responses]


async def test_every_request_gets_its_answer(rig: Rig) -> None:
    """Requests of a plain model are answered once each, marked as final."""
    stream = rig.stream()
    await stream.write(*(request(id=str(number)) for number in range(20)))
    answers = await stream.rest()
    assert ids(answers) == [str(number) for number in range(20)]
    assert all(final_flags(answers))
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_stream_without_requests_ends_well(rig: Rig) -> None:
    """Half-closing at once gives no messages and OK."""
    stream = rig.stream()
    assert await stream.rest() == []
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_plain_answers_keep_the_order_of_requests(rig: Rig) -> None:
    """Answers that are ready too early wait for those before them."""
    stream = rig.stream()
    await stream.write(request("hold", id="a"), request("hold", id="b"), request(id="c"))
    first, second = await rig.core.held.get(), await rig.core.held.get()
    second.deliver(response_of(second), True)
    first.deliver(response_of(first), True)
    assert ids(await stream.rest()) == ["a", "b", "c"]


async def test_requests_start_before_the_former_is_answered(rig: Rig) -> None:
    """A stream does not serialise execution."""
    stream = rig.stream()
    await stream.write(request("hold", id="a"), request("hold", id="b"))
    held = [await rig.core.held.get() for _ in range(2)]
    for each in held:
        each.deliver(response_of(each), True)
    assert ids(await stream.rest()) == ["a", "b"]


async def test_decoupled_answers_leave_as_they_come(rig: Rig) -> None:
    """Responses of a decoupled model overtake everything, in order within a request."""
    stream = rig.stream()
    await stream.write(request("hold", id="plain"), request("stream", id="many"))
    plain, many = await rig.core.held.get(), await rig.core.held.get()
    for final in (False, False, True):
        many.deliver(response_of(many), final)
    got = [await stream.read() for _ in range(3)]
    assert ids(got) == ["many"] * 3
    assert final_flags(got) == [False, False, True]
    plain.deliver(response_of(plain), True)
    assert ids(await stream.rest()) == ["plain"]


async def test_a_separate_final_flag_is_silent(rig: Rig) -> None:
    """A final flag without a response sends nothing by default."""
    stream = rig.stream()
    await stream.write(request("stream", id="x"))
    held = await rig.core.held.get()
    held.deliver(response_of(held), False)
    held.deliver(None, True)
    assert final_flags(await stream.rest()) == [False]


async def test_an_empty_final_response_on_demand(rig: Rig) -> None:
    """With `triton_enable_empty_final_response` the final flag comes as a bare message."""
    stream = rig.stream()
    await stream.write(request("stream", id="x", triton_enable_empty_final_response=True))
    held = await rig.core.held.get()
    held.deliver(None, True)
    (answer,) = await stream.rest()
    assert answer.infer_response == pb.ModelInferResponse(
        model_name="stream",
        id="x",
        parameters={"triton_final_response": pb.InferParameter(bool_param=True)},
    )


async def test_a_refused_request_does_not_end_the_stream(rig: Rig) -> None:
    """Errors before execution come as messages, in order, with nothing but the id."""
    stream = rig.stream()
    await stream.write(request(id="1"), request("nope", id="2"), request(id="3"))
    answers = await stream.rest()
    assert ids(answers) == ["1", "2", "3"]
    assert "unknown model: 'nope'" in answers[1].error_message
    assert answers[1].infer_response == pb.ModelInferResponse(id="2")


async def test_an_error_of_the_core_is_a_message(rig: Rig) -> None:
    """A request that validation refuses is answered on the stream, for decoupled models too."""
    bad = request("stream", id="1")
    bad.inputs[0].name = "BAD"
    stream = rig.stream()
    await stream.write(bad, request(id="2"))
    answers = await stream.rest()
    assert ids(answers) == ["1", "2"]
    assert answers[0].error_message == "unexpected inference input 'BAD'"


async def test_an_error_of_the_execution_names_the_model(rig: Rig) -> None:
    """Errors of a model carry model name and final flag; a decoupled model may go on."""
    stream = rig.stream()
    await stream.write(request("stream", id="e"))
    held = await rig.core.held.get()
    held.deliver(InferenceResponse.from_error(InternalError("hiccup")), False)
    held.deliver(response_of(held), True)
    answers = await stream.rest()
    assert [answer.error_message for answer in answers] == ["hiccup", ""]
    assert answers[0].infer_response.model_name == "stream"
    assert final_flags(answers) == [False, True]


async def test_garbage_on_a_stream_is_answered(rig: Rig) -> None:
    """Bytes that are no message get an error message; the stream goes on."""
    stream = rig.stream()
    await stream.call.write(b"\xff\xff")
    await stream.write(request(id="2"))
    answers = await stream.rest()
    assert "failed to parse" in answers[0].error_message
    assert ids(answers) == ["", "2"]


async def test_strict_mode_ends_the_stream_with_the_status(rig: Rig) -> None:
    """With `triton_grpc_error: true` an execution error is the RPC's, and the rest is cancelled."""

    def fail(inference: InferenceRequest) -> None:
        inference.deliver(InferenceResponse.from_error(InternalError("broken")), True)

    rig.core.table["fail"] = FakeModel("fail", fail)
    stream = rig.stream(metadata=(("triton_grpc_error", "true"),))
    await stream.write(request("nope", id="0"))
    assert (await stream.read()).error_message
    await stream.write(request("hold", id="1"), request("fail", id="2"))
    assert await stream.call.code() is grpc.StatusCode.INTERNAL
    assert await stream.call.details() == "broken"
    assert (await rig.core.cancelled.get()).id == "1"


async def test_cancelling_a_stream_cancels_its_requests(rig: Rig) -> None:
    """A client that leaves lets all open requests of the stream go."""
    stream = rig.stream()
    await stream.write(request("hold", id="1"), request("stream", id="2"))
    held = {(await rig.core.held.get()).id for _ in range(2)}
    stream.call.cancel()
    assert held == {(await rig.core.cancelled.get()).id for _ in range(2)}
    await rig.infer(request())


async def test_a_deadline_ends_a_stream(rig: Rig) -> None:
    """A stream's deadline cancels its open requests."""
    stream = rig.stream(timeout=0.3)
    await stream.write(request("hold"))
    assert await stream.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await rig.core.cancelled.get()


async def test_large_messages_on_a_stream(rig: Rig) -> None:
    """Large requests and responses pass a stream unchanged."""
    stream = rig.stream()
    blocks = [bytes([number]) * 2_500_000 for number in range(8)]
    writing = asyncio.ensure_future(stream.write(*(request(data=block) for block in blocks)))
    for block in blocks:
        assert (await stream.read()).infer_response.raw_output_contents[0] == block
    await writing
    assert await stream.rest() == []


@pytest.mark.parametrize(
    ("options", "most_bytes"), [({"grpc_max_response_pool_size": 4}, 1 << 30), ({}, 4_000_000)]
)
async def test_a_slow_reader_holds_the_stream_up(
    start: Start, options: dict[str, int], most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are not read while too many responses, or too large ones, pile up."""
    monkeypatch.setattr(stream_module, "_MAX_UNSENT_BYTES", most_bytes)
    rig = await start(**options)
    seen = 0

    def count(inference: InferenceRequest) -> None:
        nonlocal seen
        seen += 1
        inference.deliver(response_of(inference), True)

    rig.core.table["count"] = FakeModel("count", count)
    stream = rig.stream()
    total = 200
    message = request("count", data=b"x" * 1_000_000)
    writing = asyncio.ensure_future(stream.write(*[message] * total))
    await stream.read()
    assert seen < total  # the rest is still with the client
    for _ in range(total - 1):
        await stream.read()
    await writing
    assert await stream.rest() == []
    assert seen == total


async def test_a_restricted_stream_is_refused(start: Start) -> None:
    """The inference group covers streams."""
    rig = await start(grpc_restricted_protocol={"inference": ("key", "ok")})
    stream = rig.stream()
    assert await stream.call.code() is grpc.StatusCode.UNAVAILABLE
    allowed = rig.stream(metadata=(("triton-grpc-protocol-key", "ok"),))
    await allowed.write(request(id="1"))
    assert ids(await allowed.rest()) == ["1"]


# pygrpc-native 0.5 may close the socket before it has written the last response.
@pytest.mark.parametrize("transport", ["nghttp2", "grpcio"])
async def test_requests_after_shutdown_began_are_refused_on_the_stream(rig: Rig) -> None:
    """An open stream gets the shutdown text for new requests and its pending answers."""
    stream = rig.stream()
    await stream.write(request("hold", id="1"))
    held = await rig.core.held.get()
    stopping = asyncio.ensure_future(rig.front.stop(10))
    await asyncio.sleep(0)
    with pytest.raises(grpc.aio.AioRpcError):
        await rig.until_refused()
    await stream.write(request(id="2"))
    held.deliver(response_of(held), True)
    answers = await stream.rest()
    assert ids(answers) == ["1", "2"]
    assert answers[1].error_message == (
        "GRPC server is shutting down and has stopped accepting new requests."
    )
    await stopping


async def test_a_client_that_leaves_is_not_logged(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients leave all the time; a flood of them must not fill the disk."""
    async with running(transport) as rig:
        stream = rig.stream()
        await stream.write(request("hold"))
        await rig.core.held.get()
        stream.call.cancel()
        await rig.core.cancelled.get()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
