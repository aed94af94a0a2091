"""Unary inference over real connections, the same on every transport."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest

from npuserve._proto import grpc_service_pb2 as pb
from npuserve.errors import ERROR_BY_CODE, InvalidArgumentError, StatusCode, WorkerDiedError
from npuserve.protocol.status import grpc_status
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from tests.protocol.grpc.conftest import Rig, request
from tests.protocol.grpc.fakes import FakeModel, response_of

Start = Callable[..., Awaitable[Rig]]


async def test_the_answer_carries_the_tensor(rig: Rig) -> None:
    """A raw input comes back as raw output with name, datatype, shape and request id."""
    answer = await rig.infer(request(data=b"abcdefgh", id="7"))
    assert answer.id == "7"
    assert answer.model_name == "echo"
    assert answer.model_version == "1"
    assert [(o.name, o.datatype, list(o.shape)) for o in answer.outputs] == [
        ("OUTPUT0", "FP32", [2])
    ]
    assert list(answer.raw_output_contents) == [b"abcdefgh"]
    assert not answer.parameters


@pytest.mark.parametrize("size", [0, 4, 16_380, 32_768, 65_536, 5_000_000, 20_000_000])
async def test_messages_of_any_size_survive(rig: Rig, size: int) -> None:
    """Small and large messages, beyond every window and frame size, come back unchanged."""
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    answer = await rig.infer(request(data=data))
    assert answer.raw_output_contents[0] == data


async def test_many_large_messages_at_once(rig: Rig) -> None:
    """Uploads that share one connection's window all arrive."""
    blocks = [bytes([index]) * 3_000_000 for index in range(12)]
    answers = await asyncio.gather(*(rig.infer(request(data=block)) for block in blocks))
    assert [answer.raw_output_contents[0] for answer in answers] == blocks


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests_are_understood(
    rig: Rig, transport: str, compression: grpc.Compression
) -> None:
    """A request with gRPC's message compression is like any other."""
    if (transport, compression) == ("native", grpc.Compression.Deflate):
        pytest.skip("pygrpc-native does not know deflate")
    answer = await rig.infer(request(data=b"z" * 100_000), compression=compression)
    assert answer.raw_output_contents[0] == b"z" * 100_000


@pytest.mark.parametrize("transport", ["nghttp2", "grpcio"])
async def test_responses_can_be_compressed(start: Start) -> None:
    """With a compression level set, a client that takes gzip still reads the same answer."""
    rig = await start(grpc_infer_response_compression_level="medium")
    data = b"q" * 400_000
    answer = await rig.infer(request(data=data))
    assert answer.raw_output_contents[0] == data


@pytest.mark.parametrize("value", ["\ud800", 1 << 64])
async def test_a_response_that_cannot_be_encoded_is_an_error(rig: Rig, value: str | int) -> None:
    """Whatever a model puts into its parameters, the client gets an answer; on a stream too."""

    def answer(inference: InferenceRequest) -> None:
        response = response_of(inference)
        response.parameters = {"odd": value}
        inference.deliver(response, True)

    rig.core.table["odd"] = FakeModel("odd", answer)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.infer(request("odd"), timeout=20)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert str(caught.value.details()).startswith("the response cannot be sent: ")
    stream = rig.stream()
    await stream.write(request("odd"), request())
    first, second = await stream.rest()
    assert first.error_message.startswith("the response cannot be sent: ")
    assert not second.error_message


async def test_an_error_that_is_no_unicode_reaches_a_stream(rig: Rig) -> None:
    """Lone surrogates in a text are replaced."""

    def fail(inference: InferenceRequest) -> None:
        inference.deliver(InferenceResponse.from_error(InvalidArgumentError("a\ud800b")), True)

    rig.core.table["fail"] = FakeModel("fail", fail)
    stream = rig.stream()
    await stream.write(request("fail"))
    (answer,) = await stream.rest()
    assert answer.error_message == "a?b"


@pytest.mark.parametrize("code", StatusCode)
async def test_every_error_code_reaches_the_client(rig: Rig, code: StatusCode) -> None:
    """A model's error arrives with its gRPC status and its text, whatever characters it has."""
    text = f"bad thing: 100% – 模型 {code.value}"

    def fail(inference: InferenceRequest) -> None:
        inference.deliver(InferenceResponse.from_error(ERROR_BY_CODE[code](text)), True)

    rig.core.table["fail"] = FakeModel("fail", fail)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.infer(request("fail"))
    assert caught.value.code().value[0] == grpc_status(code)
    assert caught.value.details() == text


@pytest.mark.parametrize("text", ["x" * 100_000, "模型" * 20_000])
async def test_a_long_error_text_is_cut(rig: Rig, text: str) -> None:
    """Texts longer than clients take in a header arrive shortened, with the right status."""

    def fail(inference: InferenceRequest) -> None:
        inference.deliver(InferenceResponse.from_error(InvalidArgumentError(text)), True)

    rig.core.table["fail"] = FakeModel("fail", fail)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.infer(request("fail"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = str(caught.value.details())
    assert details.endswith(" …")
    assert details[:500] == text[:500]


async def test_a_dead_worker_is_internal(rig: Rig) -> None:
    """A subclass of an error has the status of its base."""

    def fail(inference: InferenceRequest) -> None:
        inference.deliver(InferenceResponse.from_error(WorkerDiedError("signal 11")), True)

    rig.core.table["fail"] = FakeModel("fail", fail)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.infer(request("fail"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_an_unexpected_exception_is_internal(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug under the front end is logged and answered; the connection lives on."""

    def explode(inference: InferenceRequest) -> None:
        raise ZeroDivisionError("oops")

    rig.core.table["explode"] = FakeModel("explode", explode)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.infer(request("explode"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "oops" in str(caught.value.details())
    assert "ZeroDivisionError" in caplog.text
    await rig.infer(request())


async def test_a_response_that_never_came_is_an_error(rig: Rig) -> None:
    """A model that ends a request without any response gives INTERNAL, not silence."""
    rig.core.table["mute"] = FakeModel("mute", lambda inference: inference.deliver(None, True))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.infer(request("mute"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("message", "status", "text"),
    [
        (request("nope"), grpc.StatusCode.NOT_FOUND, "unknown model: 'nope'"),
        (
            pb.ModelInferRequest(model_name="echo", model_version="x"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "bad version",
        ),
        (
            request("stream"),
            grpc.StatusCode.UNIMPLEMENTED,
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
        ),
        (
            request(triton_x=1),
            grpc.StatusCode.INVALID_ARGUMENT,
            "reserved for Triton usage",
        ),
    ],
)
async def test_refusals(
    rig: Rig, message: pb.ModelInferRequest, status: grpc.StatusCode, text: str
) -> None:
    """What cannot be run is refused with Triton's status and text."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.infer(message)
    assert caught.value.code() is status
    assert text in str(caught.value.details())


async def test_garbage_is_an_invalid_argument(rig: Rig) -> None:
    """Bytes that are no protobuf message are the client's error."""
    call = rig.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\xff\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_method_is_unimplemented(rig: Rig) -> None:
    """An RPC that does not exist is told apart from a failing one."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.unary("Nothing", pb.ServerLiveRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_deadline_cancels_the_request(rig: Rig) -> None:
    """When the client's deadline passes, the queued request is cancelled."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.infer(request("hold"), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    cancelled = await rig.core.cancelled.get()
    assert cancelled.cancelled


async def test_a_cancelled_call_cancels_the_request(rig: Rig) -> None:
    """A client that gives up lets its request go."""
    call = rig.unary("ModelInfer", request("hold"))
    await rig.core.held.get()
    call.cancel()
    await rig.core.cancelled.get()
    await rig.infer(request())


async def test_a_lost_connection_cancels_its_requests(rig: Rig) -> None:
    """A client that vanishes lets all its requests go."""
    calls = [rig.unary("ModelInfer", request("hold")) for _ in range(5)]
    for _ in calls:
        await rig.core.held.get()
    await rig.channel.close()
    for _ in calls:
        await rig.core.cancelled.get()
    for call in calls:
        call.cancel()


async def test_late_answers_after_a_cancel_are_dropped(rig: Rig) -> None:
    """A model that answers a request nobody waits for disturbs nothing."""
    call = rig.unary("ModelInfer", request("hold"))
    held = await rig.core.held.get()
    held.on_cancel = None  # running: the model decides
    call.cancel()
    await rig.infer(request())
    held.deliver(response_of(held), True)
    await rig.infer(request())


async def test_answers_leave_in_the_order_of_completion(rig: Rig) -> None:
    """Calls on one connection do not wait for each other."""
    slow = asyncio.ensure_future(rig.infer(request("hold", id="slow")))
    held = await rig.core.held.get()
    assert (await rig.infer(request(id="fast"))).id == "fast"
    held.deliver(response_of(held), True)
    assert (await slow).id == "slow"


# pygrpc-native 0.5 may close the socket before it has written the last response.
@pytest.mark.parametrize("transport", ["nghttp2", "grpcio"])
async def test_stop_waits_for_running_calls_and_refuses_new_ones(rig: Rig) -> None:
    """A graceful stop answers what was accepted and turns away the rest, once clients know."""
    running = asyncio.ensure_future(rig.infer(request("hold")))
    held = await rig.core.held.get()
    stopping = asyncio.ensure_future(rig.front.stop(10))
    await asyncio.sleep(0)  # the stop begins
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.until_refused()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    held.deliver(response_of(held), True)
    assert (await running).model_name == "hold"
    await stopping


async def test_stop_cuts_what_takes_too_long(rig: Rig) -> None:
    """After the grace period running calls end with an error and their requests are cancelled."""
    running = asyncio.ensure_future(rig.infer(request("hold")))
    await rig.core.held.get()
    await rig.front.stop(0.05)
    with pytest.raises(grpc.aio.AioRpcError):
        await running
    await rig.core.cancelled.get()


async def test_forwarded_headers_become_parameters(start: Start) -> None:
    """Metadata that the pattern finds is visible to the model, other metadata is not."""
    rig = await start(grpc_header_forward_pattern="x-fwd-.*")
    await_answer = rig.unary(
        "ModelInfer", request("hold", p=1), metadata=[("x-fwd-a", "1"), ("other", "2")]
    )
    held = await rig.core.held.get()
    assert held.parameters == {"p": 1, "x-fwd-a": "1"}
    held.deliver(response_of(held), True)
    await await_answer


async def test_a_restricted_group_needs_its_key(start: Start) -> None:
    """Calls of a restricted group are refused without the right metadata, others go on."""
    rig = await start(grpc_restricted_protocol={"inference": ("key", "ok")})
    for metadata in ((), (("triton-grpc-protocol-key", "no"),)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.infer(request(), metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == (
            "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
        )
    await rig.infer(request(), metadata=(("triton-grpc-protocol-key", "ok"),))
    await rig.unary("ServerLive", pb.ServerLiveRequest())


async def test_a_message_over_the_limit_is_refused(start: Start) -> None:
    """`--grpc-max-message-bytes` bounds requests."""
    rig = await start(grpc_max_message_bytes=1_000_000)
    for size in (2_000_000, 40_000_000):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.infer(request(data=b"x" * size))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await rig.infer(request())


async def test_a_response_over_the_limit_is_refused(start: Start) -> None:
    """`--grpc-max-message-bytes` bounds responses too; the connection lives on."""
    rig = await start(grpc_max_message_bytes=1_000_000)

    def grow(inference: InferenceRequest) -> None:
        response = response_of(inference)
        response.outputs[0].data = b"x" * 2_000_000
        inference.deliver(response, True)

    rig.core.table["grow"] = FakeModel("grow", grow)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.infer(request("grow"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await rig.infer(request())


async def test_response_parameters_arrive(rig: Rig) -> None:
    """Parameters that a model sets on a response come with their types."""

    def answer(inference: InferenceRequest) -> None:
        response = response_of(inference)
        response.parameters = {"b": True, "i": -3, "f": 0.5, "s": "x", "u": 2**63}
        inference.deliver(response, True)

    rig.core.table["parameters"] = FakeModel("parameters", answer)
    got = (await rig.infer(request("parameters"))).parameters
    assert got["b"].bool_param is True
    assert got["i"].int64_param == -3
    assert got["f"].double_param == 0.5
    assert got["s"].string_param == "x"
    assert got["u"].uint64_param == 2**63


async def test_classification(rig: Rig) -> None:
    """An output with a class count comes back as `value:index:label` texts."""
    message = request(data=b"\0\0\0\0\0\0\x80\x3f\0\0\0\x40")
    output = message.outputs.add(name="OUTPUT0")
    output.parameters["classification"].int64_param = 2
    answer = await rig.infer(message)
    assert answer.outputs[0].datatype == "BYTES"
    assert b"2.000000:2:two" in answer.raw_output_contents[0]


async def test_an_error_while_encoding_is_answered(rig: Rig) -> None:
    """Outputs that cannot be written as asked give the reason."""
    message = request()
    output = message.outputs.add(name="OUTPUT0")
    output.parameters["shared_memory_region"].string_param = "nowhere"
    output.parameters["shared_memory_byte_size"].int64_param = 16
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.infer(message)
    assert caught.value.details() == "Unable to find shared memory region: 'nowhere'"
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
