"""A stand-in for InferenceServer: models whose answers the test decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from npuserve.buffer_pool import BufferPool
from npuserve.errors import InvalidArgumentError, NotFoundError, RequestCancelledError
from npuserve.log import LogSettings
from npuserve.model_config import ModelConfig
from npuserve.options import ServerOptions
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.metadata import (
    ModelIndexEntry,
    ModelMetadata,
    ServerMetadata,
    TensorMetadata,
)
from npuserve.server.statistics import ModelStatistics
from npuserve.server.trace import Tracer
from npuserve.tensor import Tensor

Behaviour = Callable[[InferenceRequest], None]


def echo(request: InferenceRequest) -> None:
    """Answer at once with the inputs as outputs."""
    request.deliver(response_of(request), True)


def response_of(request: InferenceRequest) -> InferenceResponse:
    """The inputs of a request, INPUT<n> named OUTPUT<n>."""
    outputs = [
        Tensor(tensor.name.replace("INPUT", "OUTPUT"), tensor.datatype, tensor.shape, tensor.data)
        for tensor in request.inputs.values()
    ]
    return InferenceResponse(outputs, model_name=request.model_name, model_version="1")


class FakeModel:
    """A model version with a behaviour instead of a scheduler."""

    def __init__(self, name: str, behave: Behaviour, decoupled: bool = False) -> None:
        self.name = name
        self.version = 1
        self.behave = behave
        self.decoupled = decoupled
        self.max_batch_size = 0
        self.statistics = ModelStatistics()
        self.config = ModelConfig(name=name, backend="fake")

    def labels(self, output: str) -> list[str]:
        """The third element has a label."""
        return ["", "", "two"]


class FakeServer:
    """Models by name; `held` collects the requests of the model "hold" until the test answers."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.buffer_pool = BufferPool()
        self.held: asyncio.Queue[InferenceRequest] = asyncio.Queue()
        self.cancelled: asyncio.Queue[InferenceRequest] = asyncio.Queue()
        self.loads: list[tuple[str, str | None, Any]] = []
        self.is_ready = True
        options = ServerOptions(model_repository=("unused",))
        self.tracer = Tracer(options)
        self.log_settings = LogSettings.from_options(options)
        self.table = {
            model.name: model
            for model in (
                FakeModel("echo", echo),
                FakeModel("hold", self._hold),
                FakeModel("stream", self._hold, decoupled=True),
            )
        }
        self._tasks: set[asyncio.Task[None]] = set()

    def _hold(self, request: InferenceRequest) -> None:
        request.on_cancel = self._on_cancel
        self.held.put_nowait(request)

    def _on_cancel(self, request: InferenceRequest) -> None:
        self.cancelled.put_nowait(request)
        request.deliver(InferenceResponse.from_error(RequestCancelledError("cancelled")), True)

    def infer(self, request: InferenceRequest) -> None:
        """Let the model behave."""
        model = self.model(request.model_name, request.model_version)
        request.model = model
        if "BAD" in request.inputs:
            raise InvalidArgumentError("unexpected inference input 'BAD'")
        model.behave(request)

    def model(self, name: str, version: int = -1) -> FakeModel:
        """Look a model up."""
        if name not in self.table:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        return self.table[name]

    @staticmethod
    def parse_version(text: str) -> int:
        """As the core does."""
        try:
            return int(text) if text else -1
        except ValueError as error:
            raise InvalidArgumentError(f"bad version '{text}'") from error

    def live(self) -> bool:
        """Always."""
        return True

    def ready(self) -> bool:
        """As the test says."""
        return self.is_ready

    async def model_ready(self, name: str, version_text: str = "") -> bool:
        """Known names are ready."""
        self.parse_version(version_text)
        return name in self.table

    def server_metadata(self) -> ServerMetadata:
        """Fixed values."""
        return ServerMetadata("npuserve", "2.51.0", ("statistics",))

    def model_metadata(self, name: str, version_text: str = "") -> ModelMetadata:
        """Fixed tensors."""
        self.model(name)
        tensor = TensorMetadata("INPUT0", "FP32", [-1, 4])
        return ModelMetadata(name, ["1"], "fake", [tensor], [])

    def model_config(self, name: str, version_text: str = "") -> ModelConfig:
        """The model's configuration."""
        return self.model(name).config

    def model_statistics(self, name: str = "", version_text: str = "") -> list[FakeModel]:
        """One model or all."""
        return [self.model(name)] if name else list(self.table.values())

    async def repository_index(self, ready_only: bool = False) -> list[ModelIndexEntry]:
        """All models are ready."""
        return [ModelIndexEntry(name, "1", "READY") for name in self.table]

    async def load_model(
        self, name: str, config_json: str | None = None, files: Any = None
    ) -> None:
        """Remember what was asked."""
        self.loads.append((name, config_json, files))

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Remember what was asked."""
        self.loads.append((name, None, unload_dependents))

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> Awaitable[None]:
        """Run it and keep it."""
        task = self.loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
