"""A model.py gives the same in a worker process and in a thread of the server.

Two servers serve one repository, each with the other execution. Every case asks both over HTTP and
gRPC and compares all that comes back: bodies, headers, status and messages, what the metrics and
statistics counted, and what the model wrote to the log.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import pytest

from npuserve._proto import grpc_service_pb2 as pb
from npuserve.tensor import Tensor
from npuserve.testing.serve import RunningServer, serve
from tests.e2e.models.executions import PAIRS
from tests.e2e.models.repository import DATATYPES, MODELS, write_models
from tests.protocol.grpc.conftest import SERVICE


@dataclass
class Ask:
    """One request.

    Attributes:
        ways: how it is sent: "http", "grpc", "stream" (gRPC), "generate" (HTTP, a stream).
    """

    model: str
    id: str = ""
    inputs: Mapping[str, Any] = field(default_factory=lambda: {"IN": np.ones(2, np.float32)})
    outputs: Sequence[str] = ()
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    ways: Sequence[str] = ("http", "grpc", "stream")


@dataclass
class Both:
    """A server for each execution."""

    process: RunningServer
    thread: RunningServer


class Client:
    """Asks one server and keeps everything that comes back in a form that can be compared."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.begun = threading.Event()  # a model said so in the log

    def ask(self, ask: Ask) -> dict[str, Any]:
        """The answers over all the ways."""
        return {way: getattr(self, way)(ask) for way in ask.ways}

    def get(self, path: str, method: str = "GET") -> Any:
        """Status, headers and body of a request without a body."""
        return self._http(method, path, None, {})

    def _http(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.http_port, timeout=15)
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            kept = [(k.lower(), v) for k, v in reply.getheaders() if k.lower() != "date"]
            return reply.status, kept, reply.read()
        finally:
            connection.close()

    def http(self, ask: Ask) -> Any:
        """KServe infer with binary tensors."""
        tensors = [Tensor.from_numpy(name, value) if not isinstance(value, Tensor) else value
                   for name, value in ask.inputs.items()]  # fmt: skip
        head = json.dumps({
            "id": ask.id,
            "parameters": {"binary_data_output": True, **ask.parameters},
            "inputs": [
                {"name": t.name, "datatype": t.datatype, "shape": list(t.shape),
                 "parameters": {"binary_data_size": len(t.data)}} for t in tensors
            ],
            **({"outputs": [{"name": name} for name in ask.outputs]} if ask.outputs else {}),
        }).encode()  # fmt: skip
        body = head + b"".join(bytes(t.data) for t in tensors)
        return self._http(
            "POST", f"/v2/models/{ask.model}/infer", body,
            {"Inference-Header-Content-Length": str(len(head))},
        )  # fmt: skip

    def generate(self, ask: Ask) -> Any:
        """Triton's generate_stream."""
        body = {"id": ask.id, **{name: value.tolist() for name, value in ask.inputs.items()}}
        return self._http(
            "POST", f"/v2/models/{ask.model}/generate_stream", json.dumps(body).encode(), {}
        )

    def grpc(self, ask: Ask) -> Any:
        """ModelInfer."""
        with grpc.insecure_channel(self.server.grpc_url) as channel:
            call = channel.unary_unary(SERVICE + "ModelInfer")
            try:
                data, details = call.with_call(_message(ask), timeout=15)
            except grpc.RpcError as error:
                return str(error.code()), error.details()
            trailing = details.trailing_metadata()
            return str(pb.ModelInferResponse.FromString(data)), trailing

    def stream(self, ask: Ask) -> Any:
        """ModelStreamInfer with one request that wants to see its end."""
        with grpc.insecure_channel(self.server.grpc_url) as channel:
            call = channel.stream_stream(SERVICE + "ModelStreamInfer")
            answers = call(iter([_message(ask, stream=True)]), timeout=15)
            return [str(pb.ModelStreamInferResponse.FromString(data)) for data in answers]

    def pair(self, ask: Ask) -> Any:
        """ModelStreamInfer with two requests at once, "a" and "b"."""
        messages = [_message(replace(ask, id=id)) for id in "ab"]
        with grpc.insecure_channel(self.server.grpc_url) as channel:
            call = channel.stream_stream(SERVICE + "ModelStreamInfer")
            answers = call(iter(messages), timeout=15)
            return sorted(str(pb.ModelStreamInferResponse.FromString(data)) for data in answers)

    def left(self, ask: Ask) -> Any:
        """ModelStreamInfer by a client that goes after the first response."""
        with grpc.insecure_channel(self.server.grpc_url) as channel:
            call = channel.stream_stream(SERVICE + "ModelStreamInfer")
            answers = call(iter([_message(ask)]), timeout=15)
            first = str(pb.ModelStreamInferResponse.FromString(next(answers)))
            answers.cancel()
            return first

    def cancelled(self, ask: Ask) -> Any:
        """ModelInfer by a client that cancels while the model executes."""
        with grpc.insecure_channel(self.server.grpc_url) as channel:
            call = channel.unary_unary(SERVICE + "ModelInfer").future(_message(ask))
            self.begun.wait()
            self.begun.clear()
            call.cancel()
        self.idle()

    def hung_up(self, ask: Ask) -> Any:
        """KServe infer by a client that closes the connection while the model executes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.http_port)
        x = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
        body = json.dumps({"id": ask.id, "inputs": [x]})
        connection.request("POST", f"/v2/models/{ask.model}/infer", body)
        self.begun.wait()
        self.begun.clear()
        connection.close()
        self.idle()

    def idle(self) -> None:
        """Return once no model executes anything."""

        async def wait() -> None:
            for model in self.server.core.models:
                await model.pool.wait_idle()

        asyncio.run_coroutine_threadsafe(wait(), self.server.loop).result(15)

    def settled(self) -> None:
        """Return once no model is being unloaded."""
        while b'"UNLOADING"' in self.get("/v2/repository/index", "POST")[2]:
            pass

    def counts(self) -> dict[str, float]:
        """What was counted, without times."""
        with urllib.request.urlopen(self.server.metrics_url) as reply:
            lines = reply.read().decode().splitlines()
        counted = dict(line.rsplit(" ", 1) for line in lines if not _TIMES.match(line))
        numbers = {name: float(value) for name, value in counted.items()}
        for model in json.loads(self.get("/v2/models/stats")[2])["model_stats"]:
            numbers.update(_numbers(model["name"], model))
        return numbers


# Times, memory, and what belongs to the whole machine or to the process of both servers.
_TIMES = re.compile(
    r"(# |nv_cpu|nv_gpu|nv_energy|npu_|nv_\w+_(us|ms|summary\w*|duration\w*|time\w*)\b|process_|"
    r"nv_model_load_time|python_)|nv_pinned"
)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """All numbers in a JSON value by their place, without times."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        place = f"{name}.{key}"
        if isinstance(inner, dict | list):
            yield from _numbers(place, inner)
        elif isinstance(inner, int) and key not in ("ns", "last_inference"):
            yield place, inner


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """The numbers that changed, came or went; what differed before is not of this case."""
    gone = dict.fromkeys(before.keys() - after.keys(), "gone")
    changed = {name: value - before.get(name, 0) for name, value in after.items()}
    return gone | {n: v for n, v in changed.items() if v or n not in before}


def _message(ask: Ask, stream: bool = False) -> bytes:
    request = pb.ModelInferRequest(model_name=ask.model, id=ask.id)
    parameters = dict(ask.parameters)
    if stream:
        parameters["triton_enable_empty_final_response"] = True
    for key, value in parameters.items():
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(request.parameters[key], kinds[type(value)], value)
    for name, array in ask.inputs.items():
        tensor = array if isinstance(array, Tensor) else Tensor.from_numpy(name, array)
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=list(tensor.shape))
        request.raw_input_contents.append(bytes(tensor.data))
    for name in ask.outputs:
        request.outputs.add(name=name)
    data: bytes = request.SerializeToString()
    return data


class _Lines(logging.Handler):
    """What models write to the log, by model."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.lines: list[tuple[str, str, str, str, int]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Only what the model says: places in the server differ."""
        if record.getMessage() == "begun":
            self.begun.set()
        if record.filename in ("model.py", "shared_by_models.py", "prints_0_0"):
            self.lines.append((
                record.name, record.levelname, record.getMessage(), record.filename, record.lineno
            ))  # fmt: skip


@contextmanager
def model_log() -> Iterator[_Lines]:
    """Collects the lines of all models."""
    handler, logger = _Lines(), logging.getLogger("npuserve.model")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Both, dict[str, Any]]]:
    """The two servers, and what their models wrote while they were loaded."""
    root = tmp_path_factory.mktemp("models") / "models"
    write_models(root)
    servers, logs = {}, {}
    path = list(sys.path)
    with ExitStack() as stack:
        for execution in ("process", "thread"):
            with model_log() as log:
                servers[execution] = stack.enter_context(
                    serve(
                        root,
                        backend_config={"python": {"execution": execution}},
                        model_control_mode="explicit",
                        load_model=("*",),
                        exit_on_error=False,
                        strict_readiness=False,
                    )
                )
            logs[execution] = sorted(log.lines)
        yield Both(**servers), logs
    sys.path[:] = path  # changed by models that are executed in threads
    sys.modules.pop("shared_by_models", None)


def cases() -> Iterator[Any]:
    """Every request of the table."""
    for model in ("plain", "stream", "async", "calls", "metrics"):
        code = MODELS[model][0]
        for name in re.findall(r"^    (?:async )?def (\w+)\(self, r(?:, sender)?\)", code, re.M):
            if name not in ("codes", "until_cancelled"):
                yield Ask(model, name)
    yield Ask("stream", "until_cancelled", ways=["left"])
    for model in ("plain", "async"):
        yield Ask(model, "until_cancelled", ways=["cancelled", "hung_up"])
    for code in ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED",
                 "ALREADY_EXISTS", "CANCELLED"):  # fmt: skip
        yield Ask("plain", "codes", parameters={"code": code})
    for name in ("several", "error", "raises", "nothing", "one", "not_asked"):
        yield Ask("stream", name, ways=["generate"])
    yield Ask("stream", "not_asked", outputs=["OUT"])
    yield Ask("plain", "other_outputs", outputs=["OUT"])
    yield Ask("plain", "other_outputs", outputs=["TEXT", "OUT"])
    yield Ask("plain", "fields", outputs=["TEXT"], parameters={
        "timeout": 5, "priority": 3, "a": 1, "b": True, "c": "语", "d": 0.5})  # fmt: skip
    yield Ask("plain", "echo", {"IN": np.zeros(0, np.float32)})
    yield Ask("plain", "echo", {"IN": np.arange(100_000, dtype=np.float32)})
    yield Ask("state")
    yield Ask("state", inputs={"IN": np.zeros(50_000, np.float32)})
    yield Ask("no_execute")
    yield Ask("inherited_async")
    yield Ask("logs")
    yield Ask("prints")
    for model in ("shares_a", "shares_b", "shares_a"):
        yield Ask(model)
    yield Ask("loops", "default_loop")
    yield Ask("batches", inputs={"IN": np.ones((3, 2), np.float32)})
    for mode in re.findall(r'mode == "(\w+)"', PAIRS):
        yield Ask("pairs", mode, {"IN": np.ones((1, 2), np.float32)}, parameters={"mode": mode},
                  ways=["pair"])  # fmt: skip
    for number in range(2):
        for flags in ({"sequence_start": True}, {}, {"sequence_end": True}):
            yield Ask("sequences", inputs={"IN": np.ones((1, 2), np.float32)}, outputs=["TEXT"],
                      parameters={"sequence_id": 5 + number, **flags})  # fmt: skip
    yield Ask("iterates", inputs={"IN": np.ones((1, 1), np.float32)})
    for name in ("", "lazy", "by_name", "fails", "missing", "raises", "pickle"):
        yield Ask("helped", name)
    for name, datatype in DATATYPES.items():
        values: Any = Tensor("IN", "BF16", [4], bytes(range(8)))
        if datatype == "BYTES":
            values = np.array([b"\xff", "语".encode(), b""], object)
        elif datatype != "BF16":
            values = np.arange(4).astype(Tensor("IN", datatype, [0], b"").as_numpy().dtype)
        for how in ("numpy", "dlpack", "same", "device"):
            yield Ask(f"type_{name.lower()}", how, {"IN": values})
    yield Ask("type_int64", "numpy", {"IN": np.arange(50_000)})
    yield Ask("type_string", "numpy", {"IN": np.array([b"x" * 50_000], object)})


# Newer Pythons warn of models that fork, in the thread of such a model.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("ask", list(cases()), ids=lambda ask: f"{ask.model}-{ask.id}")
def test_answers(both: tuple[Both, dict[str, Any]], ask: Ask) -> None:
    """The same answer, counts and log lines."""
    seen = {}
    for execution in ("process", "thread"):
        client = Client(getattr(both[0], execution))
        before = client.counts()
        with model_log() as log:
            client.begun = log.begun
            answers = client.ask(ask)
            client.idle()
        client.settled()
        # A worker prints into a pipe of its own, so only either kind of line keeps its order.
        lines = sorted(log.lines, key=lambda line: line[3])
        seen[execution] = (answers, _changes(before, client.counts()), lines)
    assert seen["thread"] == seen["process"]


def test_what_was_loaded(both: tuple[Both, dict[str, Any]]) -> None:
    """The same models, with the same reasons where they failed, and the same lines meanwhile."""
    index = {
        name: Client(server).get("/v2/repository/index", "POST")
        for name, server in vars(both[0]).items()
    }
    assert index["thread"] == index["process"]
    assert both[1]["thread"] == both[1]["process"]


@pytest.mark.parametrize("path", ["", "/config", "/ready"])
def test_what_is_said_of_the_models(both: tuple[Both, dict[str, Any]], path: str) -> None:
    """Metadata, configuration after auto-completion, and readiness."""
    for model in MODELS:
        process, thread = (
            Client(server).get(f"/v2/models/{model}{path}") for server in vars(both[0]).values()
        )
        assert thread == process


def test_what_the_end_brings(both: tuple[Both, dict[str, Any]]) -> None:
    """finalize, and the metrics that go with a model."""
    seen = []
    for server in vars(both[0]).values():
        client = Client(server)
        before = client.counts()
        with model_log() as log:
            for model in ("logs", "metrics", "async", "state"):
                client.get(f"/v2/repository/models/{model}/unload", "POST")
                client.settled()
        seen.append((log.lines, _changes(before, client.counts())))
    assert seen[0] == seen[1]
