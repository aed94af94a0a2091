"""Traces: sampling, settings, Triton's file and OpenTelemetry spans."""

from __future__ import annotations

import http.client
import json
import select
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from npuserve.errors import InvalidArgumentError, NpuserveError, UnavailableError, UnsupportedError
from npuserve.flag_values import TraceOptions
from npuserve.options import ServerOptions
from npuserve.request import InferenceRequest
from npuserve.server.trace import Trace, TraceContext, Tracer
from npuserve.server.trace_file import GrowingFile, TraceFile, write_traces
from npuserve.server.trace_settings import Sampler, SettingValue, TraceSettings
from npuserve.tensor import Tensor
from tests.server.models import infer, serve, write_model


def tracer(**config: Any) -> Tracer:
    config.setdefault("file", "unused")
    return Tracer(ServerOptions(model_repository=("r",), trace_config=TraceOptions(**config)))


def sampled(tracer: Tracer, count: int, model: str = "m") -> list[int]:
    """Which of so many requests (from 1) are traced."""
    chosen = []
    for number in range(1, count + 1):
        request = InferenceRequest(model, {}, lambda *_: None)
        tracer.attach(request)
        if request.trace is not None:
            chosen.append(number)
    return chosen


def test_off_is_inactive() -> None:
    """Without a level nothing is asked of anybody."""
    assert not tracer().active
    assert tracer(level=("TIMESTAMPS",)).active


def test_every_rate_th_request_is_traced() -> None:
    """Rate 5: the 5th, 10th, 15th."""
    assert sampled(tracer(level=("TIMESTAMPS",), rate=5), 16) == [5, 10, 15]


def test_the_count_runs_down_and_can_be_read() -> None:
    """Two traces, then none, and the setting says 0."""
    subject = tracer(level=("TIMESTAMPS",), rate=1, count=2)
    assert sampled(subject, 4) == [1, 2]
    assert subject.settings()["trace_count"] == "0"


def test_a_plus_sign_is_a_sign() -> None:
    """As in Triton."""
    subject = tracer()
    subject.update({"trace_rate": "+7", "log_frequency": "2147483648"})
    shown = subject.settings()
    assert (shown["trace_rate"], shown["log_frequency"]) == ("7", "2147483648")


def test_settings_are_shown_in_triton_order() -> None:
    """Scalars are texts, the level is a list."""
    assert list(tracer(rate=7, log_frequency=3, file="f").settings().items()) == [
        ("trace_level", ["OFF"]),
        ("trace_rate", "7"),
        ("trace_count", "-1"),
        ("log_frequency", "3"),
        ("trace_file", "f"),
        ("trace_mode", "triton"),
    ]


def test_a_model_may_differ_and_falls_back_when_cleared() -> None:
    """A model's own setting hides the global one until it is cleared."""
    subject = tracer()
    subject.update({"trace_level": ["TIMESTAMPS"], "trace_rate": "2"})
    subject.update({"trace_rate": "1"}, "mine")
    assert sampled(subject, 4, "mine") == [1, 2, 3, 4]
    assert sampled(subject, 4) == [2, 4]
    subject.update({"trace_rate": "3"})
    assert subject.settings("mine")["trace_rate"] == "1"
    subject.update({"trace_rate": None}, "mine")
    assert subject.settings("mine")["trace_rate"] == "3"
    subject.update({"trace_rate": [], "trace_level": None})
    assert subject.settings()["trace_rate"] == "1000"
    assert not subject.active


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"trace_file": "x"}, UnsupportedError, "can not be updated through network protocol"),
        ({"trace_rate": "x"}, InvalidArgumentError, "Unable to parse 'trace_rate', got: x"),
        ({"trace_rate": "²"}, InvalidArgumentError, "Unable to parse 'trace_rate', got: ²"),
        (
            {"trace_count": "9" * 5000},
            InvalidArgumentError,
            "Unable to parse 'trace_count', got: 9",
        ),
        *(
            (
                {"trace_count": text},
                InvalidArgumentError,
                rf"range \[ -1, {2**31 - 1} \], got: {text}",
            )
            for text in ("2147483648", "9" * 20)
        ),
        *(
            (
                {"trace_rate": text},
                InvalidArgumentError,
                f"Unable to parse 'trace_rate', got: {text}",
            )
            for text in (" 1", "1.5", "0x10")
        ),
        ({"trace_rate": "-1"}, InvalidArgumentError, r"out of range \[ 0, 4294967295 \], got: -1"),
        ({"trace_rate": "0"}, InvalidArgumentError, "setting :sample rate must be non-zero"),
        ({"trace_count": "-2"}, InvalidArgumentError, "Expecting value >= -1, got:-2"),
        ({"trace_rate": ["1", "2"]}, InvalidArgumentError, "expect only 1 value for 'trace_rate'"),
        *(
            (
                {"trace_level": levels},
                InvalidArgumentError,
                "Expect only one trace level 'OFF' is specified",
            )
            for levels in (["OFF", "TIMESTAMPS"], ["x", "OFF"], ["OFF", "OFF"])
        ),
    ],
)
def test_updates_that_are_refused_change_nothing(
    changes: dict[str, SettingValue | None], error: type[NpuserveError], message: str
) -> None:
    """Triton's texts; other settings of the same call are not applied."""
    subject = tracer()
    before = subject.settings()
    with pytest.raises(error, match=message):
        subject.update({"log_frequency": "9", **changes})
    assert subject.settings() == before


def test_levels_that_the_protocol_does_not_have_are_ignored() -> None:
    """As in Triton, where the deprecated ones are known on the command line only."""
    subject = tracer()
    subject.update({"trace_level": ["MIN", "x"]})
    assert subject.settings()["trace_level"] == ["OFF"]
    subject.update({"trace_level": ["MAX", "TENSORS", "TENSORS"]})
    assert subject.settings()["trace_level"] == ["TENSORS"]


def test_a_level_needs_a_file() -> None:
    """Triton mode without a file name refuses to start tracing."""
    with pytest.raises(InvalidArgumentError, match="trace file name is not given"):
        tracer(file="").update({"trace_level": ["TIMESTAMPS"]})


async def traced(tmp_path: Path, **config: Any) -> list[dict[str, Any]]:
    """The trace file after two requests, the second with an id."""
    repository = tmp_path / "repository"
    write_model(repository, "m", "dynamic_batching { }")
    file = tmp_path / "trace.json"
    options = TraceOptions(**{"rate": 1, "file": str(file), **config})
    async with serve(repository, trace_config=options) as server:
        await infer(server, "m")
        await infer(server, "m", id="second")
    written = [tmp_path / "trace.json.0", tmp_path / "trace.json.1"]
    files = written if config.get("log_frequency") else [file]
    return [part for path in files for part in json.loads(path.read_text())]


async def test_timestamps_are_complete_and_in_order(tmp_path: Path) -> None:
    """A request's moments, from its start to its end."""
    parts = await traced(tmp_path, level=("TIMESTAMPS",))
    headers = [part for part in parts if "model_name" in part]
    assert headers == [
        {"id": 1, "model_name": "m", "model_version": 1},
        {"id": 2, "model_name": "m", "model_version": 1, "request_id": "second"},
    ]
    marks = [part["timestamps"][0] for part in parts if part["id"] == 1 and "timestamps" in part]
    assert [mark["name"] for mark in marks if mark["name"] != "INFER_RESPONSE_COMPLETE"] == [
        "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END",
        "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END",
    ]  # fmt: skip
    assert [mark["ns"] for mark in marks] == sorted(mark["ns"] for mark in marks)


async def test_the_log_frequency_splits_the_file(tmp_path: Path) -> None:
    """With 1, each trace has a numbered file of its own."""
    parts = await traced(tmp_path, level=("TIMESTAMPS",), log_frequency=1)
    assert [part["id"] for part in parts if "model_name" in part] == [1, 2]


async def test_tensors_are_written_with_their_values(tmp_path: Path) -> None:
    """Level TENSORS alone: inputs as queued and executed, outputs, and no timestamps."""
    parts = await traced(tmp_path, level=("TENSORS",))
    tensors = [part for part in parts if part["id"] == 1 and "activity" in part]
    assert [part["activity"] for part in tensors] == [
        "TENSOR_QUEUE_INPUT",
        "TENSOR_BACKEND_INPUT",
        "TENSOR_BACKEND_OUTPUT",
    ]
    assert tensors[0]["tensor"] == {
        "name": "X", "data": "1.0,1.0", "shape": "1,2", "dtype": "FP32"
    }  # fmt: skip
    assert not any("timestamps" in part for part in parts)


def test_a_tensor_that_is_none_spoils_no_file(tmp_path: Path) -> None:
    """What a model wrote wrongly is named in its place; the other traces are there."""
    traces = []
    for number, data in enumerate((b"\x09\0\0\0cut", b"\x03\0\0\0all")):
        request = InferenceRequest("m", {}, lambda *_: None)
        trace = Trace(number, None, request, Sampler(TraceSettings()), cast("Any", None))
        trace.tensors.append(("TENSOR_BACKEND_OUTPUT", Tensor("Y", "BYTES", (1,), data)))
        traces.append(trace)
    write_traces(GrowingFile(str(tmp_path / "trace.json")), traces)
    parts = json.loads((tmp_path / "trace.json").read_text())
    shown = [part["tensor"]["data"] for part in parts if "tensor" in part]
    assert shown[1] == "all"
    assert "incomplete" in shown[0]


def test_a_trace_that_cannot_be_written_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody would learn of it otherwise."""
    request = InferenceRequest("m", {}, lambda *_: None, id="\ud800")
    trace = Trace(1, None, request, Sampler(TraceSettings()), cast("Any", None))
    write_traces(GrowingFile(str(tmp_path / "t")), [trace])
    assert "failed to write the trace file" in caplog.text


def write_ensemble(repository: Path) -> None:
    """An ensemble `whole` of one step, and its `member`."""
    write_model(repository, "member")
    (repository / "whole" / "1").mkdir(parents=True)
    (repository / "whole" / "config.pbtxt").write_text("""
        platform: "ensemble" max_batch_size: 8
        input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
        output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
        ensemble_scheduling { step [ { model_name: "member" model_version: -1
          input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } ] }""")


def headers(file: Path) -> list[dict[str, Any]]:
    """The traces of a file without their activities."""
    return [part for part in json.loads(file.read_text()) if "model_name" in part]


def shown(folder: Path, field: str) -> dict[str, list[Any]]:
    """A field of the traces of every file there."""
    return {
        file.name: [part[field] for part in headers(file)]
        for file in folder.iterdir()
        if file.is_file()
    }


async def test_members_of_an_ensemble_are_children(tmp_path: Path) -> None:
    """A sampled ensemble request brings traces of its steps, whatever their own rate is."""
    repository = tmp_path / "repository"
    write_ensemble(repository)
    file = tmp_path / "trace.json"
    options = TraceOptions(level=("TIMESTAMPS",), rate=1, file=str(file))
    async with serve(repository, trace_config=options) as server:
        await infer(server, "whole")
    by_name = {part["model_name"]: part for part in headers(file)}
    assert by_name["member"]["parent_id"] == by_name["whole"]["id"]
    assert "parent_id" not in by_name["whole"]


async def test_a_request_and_those_made_for_it_are_in_one_file(tmp_path: Path) -> None:
    """The log frequency counts requests of clients; what is left has a number, too."""
    repository = tmp_path / "repository"
    write_ensemble(repository)
    options = TraceOptions(level=("TIMESTAMPS",), rate=1, log_frequency=2, file=str(tmp_path / "t"))
    async with serve(repository, trace_config=options) as server:
        for model in ("whole", "member", "whole"):
            await infer(server, model)
    names = {name: sorted(models) for name, models in shown(tmp_path, "model_name").items()}
    assert names == {"t.0": ["member", "member", "whole"], "t.1": ["member", "whole"]}


async def test_a_count_has_a_numbered_file(tmp_path: Path) -> None:
    """Written when the last of the traces is there, while the server goes on."""
    repository = tmp_path / "repository"
    write_model(repository, "m")
    options = TraceOptions(level=("TIMESTAMPS",), rate=1, count=2, file=str(tmp_path / "t"))
    async with serve(repository, trace_config=options) as server:
        for _ in range(3):
            await infer(server, "m")
    assert shown(tmp_path, "id") == {"t.0": [1, 2]}


async def test_what_former_settings_brought_is_not_counted_by_later_ones(tmp_path: Path) -> None:
    """As in Triton, each setting has its own traces; so has each model that differs."""
    repository = tmp_path / "repository"
    for name in ("m", "own"):
        write_model(repository, name)
    options = TraceOptions(level=("TIMESTAMPS",), rate=1, file=str(tmp_path / "t"))
    async with serve(repository, trace_config=options) as server:
        server.tracer.update({"log_frequency": "1"}, "own")
        await infer(server, "m", id="before")
        await infer(server, "own", id="own")
        server.tracer.update({"log_frequency": "2"})
        for name in ("first", "second", "last"):
            await infer(server, "m", id=name)
    assert shown(tmp_path, "request_id") == {
        "t": ["before"], "t.0": ["own"], "t.1": ["first", "second"], "t.2": ["last"]
    }  # fmt: skip


async def test_a_refused_request_is_traced_to_its_end(tmp_path: Path) -> None:
    """It has no response, and is one of those that were asked for."""
    repository = tmp_path / "repository"
    write_model(repository, "m", "dynamic_batching { default_queue_policy { max_queue_size: 1 } }")
    options = TraceOptions(level=("TIMESTAMPS",), rate=1, count=2, file=str(tmp_path / "t"))
    async with serve(repository, trace_config=options) as server:
        scheduler = server.model("m").scheduler

        def refuse(_: InferenceRequest) -> None:
            raise UnavailableError("Exceeds maximum queue size")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "enqueue", refuse)
            with pytest.raises(UnavailableError):
                await infer(server, "m", id="refused")
        await infer(server, "m", id="served")
    assert [part["request_id"] for part in headers(tmp_path / "t.0")] == ["refused", "served"]


def test_many_traces_are_written_while_more_come(tmp_path: Path) -> None:
    """Without a log frequency as well: memory has an end; the file is good at any time."""
    file = tmp_path / "t"
    exporter = TraceFile(str(file))
    sampler = Sampler(TraceSettings(levels=("TIMESTAMPS",), rate=1))
    kept = [end_trace(number, sampler, exporter) for number in range(1, 251)]
    exporter._writer.submit(int).result()  # what was handed to the writer is done
    assert [part["id"] for part in headers(file)] == list(range(1, 201))
    exporter.close()
    assert [part["id"] for part in headers(file)] == kept


def test_few_traces_with_large_tensors_are_many(tmp_path: Path) -> None:
    """They are counted in bytes."""
    exporter = TraceFile(str(tmp_path / "t"))
    sampler = Sampler(TraceSettings(levels=("TENSORS",), rate=1))
    image = Tensor("X", "UINT8", (1 << 19,), bytes(1 << 19))
    for number in (1, 2, 3):
        end_trace(number, sampler, exporter, image)
    exporter._writer.submit(int).result()
    assert [part["id"] for part in headers(tmp_path / "t")] == [1, 2]
    exporter.close()


def end_trace(
    number: int, sampler: Sampler, exporter: TraceFile, tensor: Tensor | None = None
) -> int:
    """Let one request be traced to its end."""
    assert sampler.sample()
    request = InferenceRequest("m", {}, lambda *_: None)
    trace = Trace(number, None, request, sampler, exporter)
    if tensor is not None:
        trace.tensors.append(("TENSOR_QUEUE_INPUT", tensor))
    trace.end(request)
    return number


def test_a_file_that_was_moved_away_begins_anew(tmp_path: Path) -> None:
    """As programs do that rotate logs."""
    file = GrowingFile(str(tmp_path / "t"))
    for number in (1, 2):
        file.append([{"id": number}])
    (tmp_path / "t").rename(tmp_path / "old")
    file.append([{"id": 3}])
    assert json.loads((tmp_path / "old").read_text()) == [{"id": 1}, {"id": 2}]
    assert json.loads((tmp_path / "t").read_text()) == [{"id": 3}]


def test_open_telemetry_needs_its_sdk_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is told at once, and the first traced request waits for no import."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidArgumentError, match="pip install"):
        tracer(mode="opentelemetry")


@pytest.mark.parametrize(
    ("key", "text"), [("bsp_max_queue_size", "x"), ("bsp_schedule_delay", "-5")]
)
def test_settings_of_open_telemetry_are_numbers(key: str, text: str) -> None:
    """Others end the start with the flag."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with pytest.raises(InvalidArgumentError, match=f"--trace-config opentelemetry,{key}={text}: "):
        tracer(mode="opentelemetry", opentelemetry=((key, text),))


async def test_spans_are_stamped_by_the_clock_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may have been set right since the server started."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from npuserve.server import trace_opentelemetry

    memory = InMemorySpanExporter()
    monkeypatch.setattr(trace_opentelemetry, "_otlp_exporter", lambda _: memory)
    hour_ns = 3_600_000_000_000
    began_ns = time.time_ns()
    write_model(tmp_path, "m")
    options = TraceOptions(mode="opentelemetry", level=("TIMESTAMPS",), rate=1)
    async with serve(tmp_path, trace_config=options) as server:
        later = SimpleNamespace(
            time_ns=lambda: time.time_ns() + hour_ns, monotonic_ns=time.monotonic_ns
        )
        monkeypatch.setattr(trace_opentelemetry, "time", later)
        await infer(server, "m")
    root = memory.get_finished_spans()[-1]
    assert root.start_time is not None
    assert root.start_time >= began_ns + hour_ns


async def test_open_telemetry_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """InferRequest, the model, its compute; the client's context is the parent of all."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from npuserve.server import trace_opentelemetry

    memory = InMemorySpanExporter()
    monkeypatch.setattr(trace_opentelemetry, "_otlp_exporter", lambda _: memory)
    write_model(tmp_path, "m")
    options = TraceOptions(
        mode="opentelemetry",
        level=("TIMESTAMPS",),
        rate=1,
        opentelemetry=(("resource", "service.name=mine"), ("url", "http://localhost:1/")),
    )
    async with serve(tmp_path, trace_config=options) as server:
        assert server.tracer.settings()["url"] == "http://localhost:1/"
        assert "trace_file" not in server.tracer.settings()
        server.tracer.attach = _with_context(server.tracer)  # type: ignore[method-assign]
        await infer(server, "m", id="r")
    spans = {span.name: span for span in memory.get_finished_spans()}
    assert set(spans) == {"InferRequest", "m", "compute"}
    root, model, compute = spans["InferRequest"], spans["m"], spans["compute"]
    assert root.resource.attributes["service.name"] == "mine"
    assert root.parent is not None
    assert f"{root.parent.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert model.parent is not None
    assert model.parent.span_id == root.context.span_id
    assert compute.parent is not None
    assert compute.parent.span_id == model.context.span_id
    assert model.attributes is not None
    assert model.attributes["triton.request_id"] == "r"
    assert [event.name for event in compute.events] == [
        "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END",
    ]  # fmt: skip


async def test_a_collector_that_does_not_answer_does_not_hold_the_exit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up while it has the spans, and the log tells how many were lost."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from npuserve.server import trace_opentelemetry

    monkeypatch.setattr(trace_opentelemetry, "_LAST_EXPORT_S", 0.1)
    write_model(tmp_path, "m")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        options = TraceOptions(
            mode="opentelemetry", level=("TIMESTAMPS",), rate=1, opentelemetry=(("url", url),)
        )
        async with serve(tmp_path, trace_config=options) as server:
            await infer(server, "m")
        assert f"3 of 3 OpenTelemetry spans did not reach {url}" in caplog.text
        assert waits_for_an_answer(listener)


def waits_for_an_answer(listener: socket.socket) -> bool:
    """Whether the one client has sent its request and is still there; it is answered then."""
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as stream:
        assert stream.readline().startswith(b"POST")
        headers = http.client.parse_headers(stream)
        stream.read(int(headers["Content-Length"]))
        gone, _, _ = select.select([connection], [], [], 0)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    return not gone


def _with_context(tracer: Tracer) -> Any:
    """What a front end does when a client sends `traceparent`."""
    attach = tracer.attach

    def attach_with_context(request: InferenceRequest) -> None:
        request.trace = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        attach(request)

    return attach_with_context
