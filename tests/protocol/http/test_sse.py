"""The generate extension."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from npuserve.errors import InternalError, InvalidArgumentError
from npuserve.protocol.http import generate as generate_module
from npuserve.protocol.http.sse import decode_generate, encode_generate
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.metadata import TensorMetadata
from npuserve.tensor import Tensor
from tests.protocol.http.conftest import Start
from tests.protocol.http.fakes import FakeModel, Held, post

PATH = "/v2/models/echo/generate"
STREAM = PATH + "_stream"


@pytest.mark.parametrize(
    ("shape", "value", "expected"),
    [
        ([1], 5, [1]), ([-1], 5, [1]), ([-1, 4], list(range(8)), [2, 4]),
        ([-1, -1], [1, 2], [1, 2]), ([2, -1, 2], list(range(12)), [2, 3, 2]), ([-1], [], [0]),
    ],
)  # fmt: skip
def test_the_shape_follows_from_the_number_of_elements(
    shape: list[int], value: Any, expected: list[int]
) -> None:
    """Fixed dimensions first, the innermost variable one takes the rest."""
    message = decode_generate({"x": value}, [TensorMetadata("x", "INT32", shape)])
    assert list(message.inputs["x"].shape) == expected


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ([], "non-object"),
        ({"id": 5}, "'id'"),
        ({"x": [1, 2, 3]}, "can not convert input 'x' to tensor with proper shape"),
        ({"x": [[1, 2]]}, "can not convert input 'x'"),
        ({"x": ["a", "b"]}, "non-integer"),
        ({"parameters": 5}, "Expected JSON object for keyword: 'parameters'"),
        ({"other": [1]}, "parameter 'other' has invalid type"),
        (
            {"parameters": {"parameters": {"a": 1}}},
            "Converting keyword: 'parameters': parameter 'parameters' has invalid type",
        ),
        (
            {"id": "7", "x": [1, 2], "parameters": {"x": [1, 2]}},
            r"Converting keyword: 'parameters': \[request id: 7\] input 'x' already exists",
        ),
        (
            {"parameters": {"x": [1, 2]}, "x": [1, 2]},
            r"^\[request id: <id_unknown>\] input 'x' alr",
        ),
    ],
)
def test_malformed_requests(document: Any, text: str) -> None:
    """Each mistake has its message."""
    with pytest.raises(InvalidArgumentError, match=text):
        decode_generate(document, [TensorMetadata("x", "INT32", [2])])


def test_members_that_are_no_input_are_parameters() -> None:
    """Also those of `parameters`; the id is both."""
    message = decode_generate({"id": "g", "a": 1, "parameters": {"b": "c"}}, [])
    assert message.id == "g"
    assert message.parameters == {"id": "g", "a": 1, "b": "c"}


def test_parameters_that_json_does_not_know_are_written_as_triton_does() -> None:
    """Python's json reads them."""
    response = InferenceResponse([], parameters={"a": -math.inf, "b": math.nan, "c": 1})
    assert b'"a":-Infinity,"b":NaN,"c":1,' in encode_generate(response, "")


def text_model(answer: Any) -> FakeModel:
    return FakeModel(inputs={"text": ("BYTES", [1])}, answer=answer)


def text_response(text: str) -> InferenceResponse:
    data = len(text).to_bytes(4, "little") + text.encode()
    return InferenceResponse([Tensor("text", "BYTES", [1], data)])


async def test_generate_gives_one_flat_object(start: Start) -> None:
    """Members in ASCII order, one element as a scalar."""
    client = await (
        await start(text_model(lambda r: r.deliver(text_response("hi"), True)))
    ).connect()
    reply = await client.ask(post(PATH, b'{"text":"hello","id":"g"}'))
    assert reply.status == 200
    assert list(reply.json().items()) == [
        ("id", "g"), ("model_name", "echo"), ("model_version", "1"), ("text", "hi"),
    ]  # fmt: skip


async def test_generate_needs_exactly_one_response(start: Start) -> None:
    """None and two are told to use the stream."""

    def two(request: InferenceRequest) -> None:
        request.deliver(text_response("a"), final=False)
        request.deliver(text_response("b"), final=True)

    client = await (await start(text_model(two))).connect()
    reply = await client.ask(post(PATH, b'{"text":"x"}'))
    assert reply.status == 200
    assert "exactly 1 response" in reply.error


async def test_responses_stream_as_they_come(start: Start) -> None:
    """The client sees the first event while the model still works."""
    held = Held()
    client = await (await start(text_model(held))).connect()
    await client.send(post(STREAM, b'{"text":"x"}'))
    request = await held.requests.get()
    request.deliver(text_response("one"), final=False)
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert b"text/event-stream; charset=utf-8" in head
    size = int(await client.reader.readuntil(b"\r\n"), 16)
    first = await client.reader.readexactly(size)
    assert json.loads(first.removeprefix(b"data: "))["text"] == "one"
    request.deliver(InferenceResponse.from_error(InternalError("broke")), final=False)
    request.deliver(None, final=True)
    rest = await client.reader.readuntil(b"0\r\n\r\n")
    assert b'data: {"error":"broke"}\n\n' in rest


async def test_an_error_first_fixes_the_status(start: Start) -> None:
    """A failing model is a 400 here, as with Triton."""

    def fail(request: InferenceRequest) -> None:
        request.deliver(InferenceResponse.from_error(InternalError("broke")), final=True)

    client = await (await start(text_model(fail))).connect()
    reply = await client.ask(post(STREAM, b'{"text":"x"}'))
    assert (reply.status, reply.body) == (400, b'data: {"error":"broke"}\n\n')


async def test_no_response_is_an_empty_stream(start: Start) -> None:
    """200 without an event."""
    client = await (await start(text_model(lambda r: r.deliver(None, True)))).connect()
    reply = await client.ask(post(STREAM, b'{"text":"x"}'))
    assert (reply.status, reply.body) == (200, b"")


@pytest.mark.parametrize("path", [PATH, STREAM])
@pytest.mark.parametrize("started", [False, True])
async def test_a_client_that_leaves_cancels(start: Start, path: str, started: bool) -> None:
    """Before the first response and after it."""
    held = Held()
    running = await start(text_model(held))
    client = await running.connect()
    await client.send(post(path, b'{"text":"x"}'))
    request = await held.requests.get()
    cancelled = running.server.loop.create_future()
    request.on_cancel = cancelled.set_result
    if started:
        request.deliver(text_response("one"), final=False)
    await client.close()
    assert await cancelled is request


async def test_a_slow_reader_has_a_limit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses do not pile up without end: the request is cancelled, the client told."""
    monkeypatch.setattr(generate_module, "_MAX_PENDING_BYTES", 1000)
    requests: list[InferenceRequest] = []

    def flood(request: InferenceRequest) -> None:
        requests.append(request)
        for _ in range(100):
            request.deliver(text_response("x" * 100), final=False)

    client = await (await start(text_model(flood))).connect()
    reply = await client.ask(post(STREAM, b'{"text":"x"}'))
    events = reply.body.split(b"\n\n")
    assert len(events) < 15
    assert b"reads too slowly" in events[-2]
    assert requests[0].cancelled


async def test_a_slow_reader_holds_the_model_back(start: Start) -> None:
    """It is asked to wait while much is unread, to go on afterwards, and nothing is lost."""
    model = Held()
    client = await (await start(text_model(model))).connect()
    await client.send(post(STREAM, b'{"text":"x"}'))
    request = await model.requests.get()
    holds: list[bool] = []
    request.on_hold = holds.append
    sent = 0
    while not holds:  # the sockets' buffers take some first
        request.deliver(text_response(str(sent).ljust(1 << 16, "x")), final=False)
        sent += 1
    request.deliver(None, final=True)
    assert holds == [True, False]  # the end lets go
    reply = await client.reply()
    events = [json.loads(event[6:])["text"] for event in reply.body.split(b"\n\n") if event]
    assert [event.rstrip("x") for event in events] == [str(number) for number in range(sent)]


async def test_a_reader_that_catches_up_lets_the_model_go_on(start: Start) -> None:
    """Not only the end of the request does."""
    model = Held()
    client = await (await start(text_model(model))).connect()
    await client.send(post(STREAM, b'{"text":"x"}'))
    request = await model.requests.get()
    going_on = asyncio.Event()
    request.on_hold = lambda held: None if held else going_on.set()
    while not request.held:
        request.deliver(text_response("x" * (1 << 16)), final=False)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(client.reply(), name="read")
        await going_on.wait()
        assert not request.finished
        request.deliver(None, final=True)
    assert reading.result().status == 200


async def test_generate_keeps_no_more_than_it_needs(start: Start) -> None:
    """A model of many responses fills no memory when only one is wanted."""

    def flood(request: InferenceRequest) -> None:
        for _ in range(1000):
            request.deliver(text_response("x" * (1 << 17)), final=False)
        assert not request.held
        request.deliver(None, final=True)

    client = await (await start(text_model(flood))).connect()
    reply = await client.ask(post(PATH, b'{"text":"x"}'))
    assert reply.status == 200
    assert "exactly 1 response" in reply.error


@pytest.mark.parametrize("path", [PATH, STREAM])
async def test_the_load_report_is_a_header(start: Start, path: str) -> None:
    """Only for who asks, from the metrics of the model."""
    running = await start(text_model(lambda r: r.deliver(text_response("hi"), True)))
    metrics = running.server.custom_metrics
    family = metrics.create_family("nv_trt_llm_kv_cache_block_metrics", "blocks", "GAUGE")
    for kind, value in (("used", 30), ("max", 120), ("tokens_per", 64)):
        metrics.set(metrics.create_metric(family, {"kv_cache_block_type": kind}), value)
    client = await running.connect()
    reports = {}
    for wanted in ("text", "json", "other", ""):
        header = (f"Endpoint-Load-Metrics-Format: {wanted}",) if wanted else ()
        reply = await client.ask(post(path, b'{"text":"x"}', *header))
        reports[wanted] = reply.headers.get("endpoint-load-metrics")
    assert reports == {
        "text": "TEXT named_metrics.kv_cache_utilization=0.25, "
        "named_metrics.max_token_capacity=7680",
        "json": 'JSON {"named_metrics": {"kv_cache_utilization": 0.25, '
        '"max_token_capacity": 7680}}',
        "other": None,
        "": None,
    }  # fmt: skip


@pytest.mark.parametrize("path", [PATH, STREAM])
async def test_mistakes_are_ordinary_errors(start: Start, path: str) -> None:
    """Nothing streams before the request is accepted."""
    client = await (await start(text_model(Held()))).connect()
    for body, status in ((b"", 400), (b"{", 400), (b'{"text":5}', 400)):
        reply = await client.ask(post(path, body))
        assert reply.status == status
        assert reply.headers["content-type"] == "application/json"
    packed = await client.ask(post(path, b"{}", "Content-Encoding: gzip"))
    assert "only 'identity' is supported" in packed.error
    unknown = await client.ask(post(path.replace("echo", "none"), b"{}"))
    assert unknown.status == 404
