"""InferenceServer: what front ends and embedders call. Step 4 of the walk.

Knows no wire format. Everything runs on the event loop's thread; `infer` is a plain function,
so that a request costs no task and no future on its way in.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from npuserve.buffer_pool import BufferPool
from npuserve.clock import LoopClock
from npuserve.errors import (
    InvalidArgumentError,
    NotFoundError,
    NpuserveError,
    UnavailableError,
)
from npuserve.log import LogSettings
from npuserve.model_config import datatype_name
from npuserve.model_repository import parse_config
from npuserve.server.core_sharing import CoreSharing, LinuxCores
from npuserve.server.custom_metrics import CustomMetrics
from npuserve.server.handover import Mailbox
from npuserve.server.idle_memory import IdleMemory, release_heap
from npuserve.server.lifecycle import Lifecycle
from npuserve.server.metadata import (
    ModelIndexEntry,
    ModelMetadata,
    ServerMetadata,
    TensorMetadata,
)
from npuserve.server.metrics import ServerMetrics
from npuserve.server.model_entry import ModelEntry, ModelState
from npuserve.server.rate_limiter import RateLimiter
from npuserve.server.response_cache import create_cache
from npuserve.server.trace import Tracer
from npuserve.server.validation import request_prefix

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping

    from npuserve.model_config import ModelConfig
    from npuserve.options import ServerOptions
    from npuserve.request import InferenceRequest
    from npuserve.server.instance import Instance
    from npuserve.server.model import Model

logger = logging.getLogger(__name__)

# The version of Triton whose protocol is spoken; clients and perf_analyzer look at it.
TRITON_VERSION = "2.51.0"

EXTENSIONS = (
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)",
    "schedule_policy", "model_configuration", "system_shared_memory", "cuda_shared_memory",
    "binary_tensor_data", "parameters", "statistics", "trace", "logging",
)  # fmt: skip

# As C's strtol reads a version: white space, a sign, digits; what follows is ignored.
_VERSION = re.compile(r"\s*([+-]?)(?=[0-9])0*+([0-9]{0,19}+)(?![0-9])", re.ASCII)
_MAX_VERSION = (1 << 63) - 1


class InferenceServer:
    """The server without its front ends.

    Use as an async context manager: entering loads the start-up models, leaving drains and
    frees everything.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.loop = asyncio.get_running_loop()
        self.clock = LoopClock(self.loop)
        self.mailbox = Mailbox(self.loop)
        self.buffer_pool = BufferPool()
        self.log_settings = LogSettings.from_options(options)
        self.cache = create_cache(options)
        self.rate_limiter = RateLimiter.from_options(options)
        self.card_load: Counter[int] = Counter()  # batches in flight by NPU card, over all models
        self.metrics = ServerMetrics(self)
        self.custom_metrics = CustomMetrics(self.metrics.kinds)
        self.tracer = Tracer(options)
        self.lifecycle = Lifecycle(self)
        self.stopping = False
        # Serving table of the hot path: name → requested version (-1: newest ready) → Model.
        self._serving: dict[str, dict[int, Model]] = {}
        self._serving_changes = 0
        self._stack = AsyncExitStack()
        self._tasks: asyncio.TaskGroup | None = None
        self._poll_task: asyncio.Task[None] | None = None
        self._idle_memory = IdleMemory(
            self.clock,
            self.buffer_pool,
            self._activity,
            lambda: self.loop.run_in_executor(None, release_heap),
        )
        self.core_sharing = CoreSharing(
            self.clock, self._instances_that_may_share, threading.get_native_id(), LinuxCores()
        )

    # ---------------------------------------------------------------- life of the server

    async def __aenter__(self) -> Self:
        """Scan the repositories and load the start-up models."""
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        try:
            self.mailbox.open()
            await self.metrics.start()
            self._idle_memory.start()
            if self.options.share_core:
                self.core_sharing.start()
            await self.lifecycle.start(self._startup_models())
        except BaseException:
            await self.__aexit__()
            raise
        if self.options.model_control_mode == "poll":
            poll = self.lifecycle.poll(self.options.repository_poll_secs)
            self._poll_task = self.spawn(poll, name="poll")
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Refuse new requests, answer the accepted ones, unload every model."""
        self.stop_loads()
        self._idle_memory.stop()
        self.core_sharing.stop()
        if self._poll_task is not None:
            self._poll_task.cancel()
        await self.lifecycle.stop()
        await self.metrics.stop()
        self.tracer.close()
        if self.cache is not None:
            self.cache.close()
        await self._stack.aclose()
        self.mailbox.close()
        self.buffer_pool.close()
        self.clock.close()

    def stop_loads(self) -> None:
        """Begin no load any more, and give up what those that have begun may do for long."""
        self.stopping = True
        for backend in self.lifecycle.factory.backends.loaded().values():
            backend.stop()

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run background work that the server owns; it must handle its own errors."""
        assert self._tasks is not None
        return self._tasks.create_task(coroutine, name=name)

    def _activity(self) -> tuple[int, int]:
        """Another value after an inference, a load or an unload."""
        times = (model.statistics.last_inference_ms for model in self.models)
        return self._serving_changes, max(times, default=0)

    def _instances_that_may_share(self) -> Iterator[Instance]:
        """Instances to which no host policy has given cores of their own."""
        for model in self.models:
            for instance in model.pool.instances:
                if instance.native_thread_id and not instance.placement.cpu_cores:
                    yield instance

    def _startup_models(self) -> list[str] | None:
        if self.options.model_control_mode != "explicit":
            return None
        names = list(self.options.load_model)
        return None if names == ["*"] else names

    # ---------------------------------------------------------------- inference

    def infer(self, request: InferenceRequest) -> None:
        """Queue a request; its responses arrive through `request.on_response`.

        Raises:
            NpuserveError: refused; `on_response` will not be called.
        """
        try:
            versions = self._serving.get(request.model_name)
            model = versions.get(request.model_version) if versions is not None else None
            if model is None:
                model = self.model(request.model_name, request.model_version)
            model.accept(request)
        except NpuserveError as error:
            # As Triton's front ends do with --log-verbose=1.
            logger.debug("%sInfer failed: %s", request_prefix(request.id), error)
            raise

    def model(self, name: str, version: int = -1) -> Model:
        """The ready model version; -1 means the newest.

        Raises:
            NotFoundError, UnavailableError: with Triton's texts.
            InvalidArgumentError: several models have the name (`--model-namespacing`).
        """
        versions = self._serving.get(name)
        if versions is not None:
            model = versions.get(version)
            if model is not None:
                return model
        if self.lifecycle.starting and versions is None and name not in self.lifecycle.entries:
            raise UnavailableError("Server not ready")
        ambiguity = self.lifecycle.ambiguity(name)
        if ambiguity:
            raise InvalidArgumentError(ambiguity)
        entry = self.lifecycle.entries.get(name)
        if entry is None or not entry.versions:
            detail = f" ({entry.failure})" if entry is not None and entry.failure else ""
            raise NotFoundError(f"Request for unknown model: '{name}' is not found{detail}")
        if version == -1:
            raise NotFoundError(f"Request for unknown model: '{name}' has no available versions")
        if version not in entry.versions:
            raise NotFoundError(
                f"Request for unknown model: '{name}' version {version} is not found"
            )
        raise UnavailableError(
            f"Request for unknown model: '{name}' version {version} is not at ready state"
        )

    @staticmethod
    def parse_version(text: str) -> int:
        """The version number of a path or message; "" is -1, the newest.

        Raises:
            InvalidArgumentError: not a number that a version can have.
        """
        if not text:
            return -1
        found = _VERSION.match(text)
        version = int(f"{found[1]}0{found[2]}") if found is not None else _MAX_VERSION + 1
        if not -_MAX_VERSION - 1 <= version <= _MAX_VERSION:
            raise InvalidArgumentError(
                f"failed to get model version from specified version string '{text}' (details: "
                "stol), version should be an integral value > 0"
            )
        if version < 0:
            raise InvalidArgumentError(
                f"invalid model version specified '{text}' , version should be an integral value "
                "> 0"
            )
        return version

    # ---------------------------------------------------------------- health and metadata

    def live(self) -> bool:
        """Whether the server runs; models may still be loading."""
        return True

    def ready(self) -> bool:
        """Whether traffic should come: strict readiness asks every known model."""
        if self.stopping or self.lifecycle.starting:
            return False
        if not self.options.strict_readiness:
            return True
        return all(self._entry_ready(entry) for entry in self.lifecycle.entries.values())

    @staticmethod
    def _entry_ready(entry: ModelEntry) -> bool:
        if entry.failure and not entry.loaded:
            return False
        for status in entry.versions.values():
            if status.state is ModelState.READY:
                if status.model is not None and not status.model.ready:
                    return False
            elif status.state is ModelState.UNAVAILABLE and status.reason != "unloaded":
                return False
        return True

    async def model_ready(self, name: str, version_text: str = "") -> bool:
        """Whether the version (the newest without one) can serve; unknown names are False.

        Unlike `ready` it asks the model itself, where the model wants to be asked.

        Raises:
            InvalidArgumentError: not a number that a version can have.
        """
        version = self.parse_version(version_text)
        try:
            model = self.model(name, version)
        except NpuserveError:
            return False
        return model.ready and await model.pool.is_ready()

    def server_metadata(self) -> ServerMetadata:
        """Name, version and extensions."""
        return ServerMetadata(self.options.id, TRITON_VERSION, EXTENSIONS)

    def model_metadata(self, name: str, version_text: str = "") -> ModelMetadata:
        """Inputs, outputs and ready versions. Raises as `model`."""
        version = self.parse_version(version_text)
        model = self.model(name, version)
        ready = [version] if version > 0 else sorted(v for v in self._serving[name] if v > 0)
        head = [-1] if model.max_batch_size > 0 else []
        return ModelMetadata(
            name=name,
            versions=[str(number) for number in ready],
            platform=model.config.platform or model.config.backend,
            inputs=[
                TensorMetadata(t.name, datatype_name(t.data_type), head + list(t.dims))
                for t in model.config.input
            ],
            outputs=[
                TensorMetadata(t.name, datatype_name(t.data_type), head + list(t.dims))
                for t in model.config.output
            ],
        )

    def model_config(self, name: str, version_text: str = "") -> ModelConfig:
        """The complete configuration. Raises as `model`."""
        return self.model(name, self.parse_version(version_text)).config

    def model_statistics(self, name: str = "", version_text: str = "") -> list[Model]:
        """The ready models asked for ("" is all), each with its `statistics`.

        Raises:
            InvalidArgumentError: no such model or version.
        """
        version = self.parse_version(version_text)
        if not name:
            return [m for n in sorted(self._serving) for m in self._versions(n)]
        models = self._versions(name)
        if not models:
            raise InvalidArgumentError(f"requested model '{name}' is not available")
        if version == -1:
            return models
        chosen = [model for model in models if model.version == version]
        if not chosen:
            raise InvalidArgumentError(
                f"requested model version is not available for model '{name}'"
            )
        return chosen

    def _versions(self, name: str) -> list[Model]:
        serving = self._serving.get(name, {})
        return [serving[version] for version in sorted(serving) if version > 0]

    @property
    def models(self) -> list[Model]:
        """Every ready model version."""
        return self.model_statistics()

    # ---------------------------------------------------------------- model control

    async def load_model(
        self, name: str, config_json: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load or reload a model by the control API; see `Lifecycle.load`.

        Raises:
            UnavailableError: the model control mode is not explicit.
        """
        self._check_explicit()
        await self.lifecycle.load(name, config_json, files)

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model by the control API; returns once new requests are refused.

        Raises:
            UnavailableError: the model control mode is not explicit.
        """
        self._check_explicit()
        await self.lifecycle.unload(name, unload_dependents)

    def _check_explicit(self) -> None:
        if self.options.model_control_mode != "explicit":
            raise UnavailableError(
                "explicit model load / unload is not allowed if polling is enabled: start the "
                "server with --model-control-mode=explicit"
            )

    async def repository_index(self, ready_only: bool = False) -> list[ModelIndexEntry]:
        """Every model of the repositories with the state of its versions, by name."""
        return await self.lifecycle.index(ready_only)

    @staticmethod
    def parse_config(text: str, source: str) -> ModelConfig:
        """The configuration that a config.pbtxt holds, for platforms that bring their own.

        Args:
            source: where the text is from, for errors.

        Raises:
            InvalidArgumentError: it does not parse.
        """
        return parse_config(text, source)

    # ---------------------------------------------------------------- called by the lifecycle

    def publish(self, entry: ModelEntry) -> None:
        """Make the READY versions of an entry reachable, and only those."""
        self._serving_changes += 1
        ready = entry.ready_models
        if ready:
            self._serving[entry.name] = {**ready, -1: ready[max(ready)]}
        else:
            self._serving.pop(entry.name, None)

    def model_loaded(self, model: Model, replaced: Model | None) -> None:
        """A version became READY, perhaps in place of another one of the same number."""
        self.metrics.model_loaded(model, replaced)

    def model_unloaded(self, model: Model) -> None:
        """A version answered its last request and was freed."""
        self.metrics.model_unloaded(model)
