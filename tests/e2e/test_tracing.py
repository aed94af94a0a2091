"""Traces of requests that came over the network, in Triton's file and at a collector."""

from __future__ import annotations

import http.server
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from npuserve.options import TraceOptions
from npuserve.testing.serve import RunningServer, serve

CONFIG = """
backend: "identity"
max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_FP32 dims: 2 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 2 }
"""
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
CORE = [
    "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START",
    "COMPUTE_END", "INFER_RESPONSE_COMPLETE", "REQUEST_END",
]  # fmt: skip
FRONT_END = {
    "http": ["HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"],
    "grpc": ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END"],
}
CLIENTS = {"http": tritonclient.http, "grpc": tritonclient.grpc}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model."""
    (tmp_path / "repository" / "echo" / "1").mkdir(parents=True)
    (tmp_path / "repository" / "echo" / "config.pbtxt").write_text(CONFIG)
    return tmp_path / "repository"


def infer(server: RunningServer, protocol: str, *, stream: bool = False) -> None:
    """One request with a W3C context."""
    module = CLIENTS[protocol]
    with module.InferenceServerClient(getattr(server, f"{protocol}_url")) as client:
        tensor = module.InferInput("INPUT0", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 2), np.float32))
        headers = {"traceparent": PARENT}
        if not stream:
            client.infer("echo", [tensor], request_id="r", headers=headers)
            return
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error), headers=headers)
        client.async_stream_infer("echo", [tensor], request_id="r")
        assert answers.get() is None
        client.stop_stream()


@pytest.mark.parametrize(("protocol", "stream"), [("http", False), ("grpc", False), ("grpc", True)])
def test_a_trace_tells_when_the_front_end_read_and_wrote(
    tmp_path: Path, repository: Path, protocol: str, stream: bool
) -> None:
    """Triton's names, in a sensible order, also for requests on a stream."""
    file = tmp_path / "trace.json"
    options = TraceOptions(level=("TIMESTAMPS",), rate=1, file=str(file))
    with serve(repository, trace_config=options) as server:
        infer(server, protocol, stream=stream)
    parts = json.loads(file.read_text())
    assert parts[0] == {"id": 1, "model_name": "echo", "model_version": 1, "request_id": "r"}
    times = {mark["name"]: mark["ns"] for part in parts[1:] for mark in part["timestamps"]}
    assert set(times) == {*CORE, *FRONT_END[protocol]}
    read_begin, read_end, send_begin, send_end = (times[name] for name in FRONT_END[protocol])
    assert read_begin <= read_end <= send_begin <= send_end
    assert read_begin <= times["REQUEST_START"] <= times["COMPUTE_START"] <= send_end


@contextmanager
def collector() -> Iterator[tuple[str, queue.Queue[Any]]]:
    """An OTLP collector: its URL, and the requests it gets."""
    trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    received: queue.Queue[Any] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.put((self.path, trace_service.ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            """Nothing on the terminal."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("protocol", "scheme"), [(protocol, "") for protocol in CLIENTS] + [("http", "http://")]
)
def test_a_collector_gets_the_spans(repository: Path, protocol: str, scheme: str) -> None:
    """Over OTLP/HTTP, under the trace that the client began; without a scheme that is http."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with collector() as (url, received):
        options = TraceOptions(
            mode="opentelemetry",
            level=("TIMESTAMPS",),
            rate=1,
            opentelemetry=(
                ("url", url if scheme else url.removeprefix("http://")),
                ("resource", "service.name=mine"),
                ("bsp_schedule_delay", "50"),
            ),
        )  # fmt: skip
        with serve(repository, trace_config=options) as server:
            infer(server, protocol)
            path, request = received.get(timeout=20)
    assert path == "/v1/traces"
    (resource,) = request.resource_spans
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert names["service.name"] == "mine"
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert set(spans) == {"InferRequest", "echo", "compute"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    assert spans["InferRequest"].parent_span_id.hex() == "b7ad6b7169203331"
    assert spans["echo"].parent_span_id == spans["InferRequest"].span_id
    assert [event.name for event in spans["InferRequest"].events] == FRONT_END[protocol]
