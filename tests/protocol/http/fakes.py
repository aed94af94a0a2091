"""An inference server that answers at once, and raw-socket helpers, for tests of the front end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from npuserve.buffer_pool import BufferPool
from npuserve.errors import InvalidArgumentError, NotFoundError
from npuserve.log import LogSettings
from npuserve.model_config import config_from_json
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.custom_metrics import CustomMetrics
from npuserve.server.metadata import (
    ModelIndexEntry,
    ModelMetadata,
    ServerMetadata,
    TensorMetadata,
)
from npuserve.server.statistics import ModelStatistics

Answer = Callable[[InferenceRequest], None]


def echo(request: InferenceRequest) -> None:
    """Answer with the inputs, renamed INPUT… → OUTPUT…, in the same loop iteration."""
    outputs = list(request.inputs.values())
    for tensor in outputs:
        tensor.name = tensor.name.replace("INPUT", "OUTPUT")
    request.deliver(InferenceResponse(outputs), final=True)


class FakeModel:
    """What the front end reads of a Model."""

    def __init__(
        self,
        name: str = "echo",
        *,
        inputs: dict[str, tuple[str, list[int]]] | None = None,
        max_batch_size: int = 0,
        decoupled: bool = False,
        answer: Answer = echo,
        labels: list[str] | None = None,
    ) -> None:
        self.name = name
        self.version = 1
        self.ready = True
        self.decoupled = decoupled
        self.max_batch_size = max_batch_size
        self.input_specs = inputs or {"INPUT0": ("FP32", [-1])}
        self.config = config_from_json(json.dumps({"name": name, "backend": "python"}))
        self.statistics = ModelStatistics()
        self.answer = answer
        self._labels = labels or []

    def labels(self, output: str) -> list[str]:
        return self._labels


class FakeServer:
    """The part of InferenceServer that front ends call.

    Attributes:
        requests: every request that came, in order.
    """

    def __init__(self, *models: FakeModel) -> None:
        self.loop = asyncio.get_running_loop()
        self.buffer_pool = BufferPool()
        self.log_settings = LogSettings()
        self.stopping = False
        self.is_ready = True
        self.tracer = FakeTracer()
        self.custom_metrics = CustomMetrics()
        self.requests: list[InferenceRequest] = []
        self.calls: list[tuple[Any, ...]] = []
        self._models = {model.name: model for model in models or (FakeModel(),)}

    def infer(self, request: InferenceRequest) -> None:
        model = request.model = self.model(request.model_name, request.model_version)
        for name in request.inputs:
            if name not in model.input_specs:
                raise InvalidArgumentError(f"unexpected inference input '{name}'")
        self.requests.append(request)
        model.answer(request)

    def model(self, name: str, version: int = -1) -> FakeModel:
        if name not in self._models:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        if version not in (-1, 1):
            raise NotFoundError(f"Request for unknown model: '{name}' version {version}")
        return self._models[name]

    @staticmethod
    def parse_version(text: str) -> int:
        return int(text) if text else -1

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return self.is_ready

    async def model_ready(self, name: str, version_text: str = "") -> bool:
        return name in self._models and version_text in ("", "1")

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata("triton", "2.51.0", ("classification",))

    def model_metadata(self, name: str, version_text: str = "") -> ModelMetadata:
        model = self.model(name, self.parse_version(version_text))
        head = [-1] if model.max_batch_size else []
        inputs = [
            TensorMetadata(key, datatype, head + list(dims))
            for key, (datatype, dims) in model.input_specs.items()
        ]
        return ModelMetadata(name, ["1"], "python", inputs, [])

    def model_config(self, name: str, version_text: str = "") -> Any:
        return self.model(name, self.parse_version(version_text)).config

    def model_statistics(self, name: str = "", version_text: str = "") -> list[FakeModel]:
        if name and name not in self._models:
            raise InvalidArgumentError(f"requested model '{name}' is not available")
        return [self._models[name]] if name else list(self._models.values())

    async def load_model(
        self, name: str, config_json: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        self.calls.append(("load", name, config_json, files))

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        self.calls.append(("unload", name, unload_dependents))

    async def repository_index(self, ready_only: bool = False) -> list[ModelIndexEntry]:
        entries = [ModelIndexEntry("never_loaded"), ModelIndexEntry("echo", "1", "READY")]
        return entries[1:] if ready_only else entries


class FakeTracer:
    """Settings of one trace for all models; nothing is traced."""

    active = False

    def __init__(self) -> None:
        self.values: dict[str, str | list[str]] = {"trace_level": ["OFF"], "trace_rate": "1000"}

    def settings(self, model: str = "") -> dict[str, str | list[str]]:
        return self.values

    def update(self, changes: Mapping[str, list[str] | None], model: str = "") -> None:
        for key, value in changes.items():
            if value is not None:
                self.values[key] = value if key == "trace_level" else value[0]


class Held:
    """Holds requests until the test answers them."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[InferenceRequest] = asyncio.Queue()

    def __call__(self, request: InferenceRequest) -> None:
        self.requests.put_nowait(request)


class Reply:
    """One parsed HTTP reply."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(self.json()["error"])


class Client:
    """One connection to the server under test, byte by byte as the test wants it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self, *, head_only: bool = False) -> Reply:
        """The next reply; 100 Continue counts as one without a body."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = head.split("\r\n")
        headers = {
            key.lower(): value for key, value in (line.split(": ", 1) for line in lines if line)
        }
        status = int(status_line.split(" ")[1])
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        elif not head_only:
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Reply(status, headers, body)

    async def ask(self, data: bytes) -> Reply:
        await self.send(data)
        return await self.reply()

    async def is_closed(self) -> bool:
        """Wait until the server closes; True if nothing else came."""
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):  # the server was faster
            await self.writer.wait_closed()


def post(path: str, body: bytes = b"", *headers: str) -> bytes:
    """A POST request with its length."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    """A request without a body."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: test", *headers]).encode() + b"\r\n\r\n"


def infer_json(
    values: Any, datatype: str = "FP32", shape: list[int] | None = None, **fields: Any
) -> bytes:
    """The JSON of an infer request with one input."""
    shape = [len(values)] if shape is None else shape
    entry = {"name": "INPUT0", "datatype": datatype, "shape": shape, "data": values}
    return json.dumps({**fields, "inputs": [entry]}).encode()


def infer_binary(
    blob: bytes, datatype: str = "FP32", shape: list[int] | None = None, **fields: Any
) -> tuple[bytes, bytes]:
    """JSON and binary part of an infer request with one input; outputs are binary."""
    entry = {
        "name": "INPUT0",
        "datatype": datatype,
        "shape": [len(blob) // 4] if shape is None else shape,
        "parameters": {"binary_data_size": len(blob)},
    }
    head = {"parameters": {"binary_data_output": True}, **fields, "inputs": [entry]}
    return json.dumps(head).encode(), blob


def post_binary(
    head: bytes, blob: bytes, *headers: str, path: str = "/v2/models/echo/infer"
) -> bytes:
    """A POST request with binary data behind the JSON."""
    return post(path, head + blob, f"Inference-Header-Content-Length: {len(head)}", *headers)
