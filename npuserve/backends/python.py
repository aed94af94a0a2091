"""The Python backend: models written as `model.py` for Triton's Python backend.

An instance runs in a worker process of its own (default) or in a thread of the server; see
`worker/settings.py` for what users can choose. The work is done in `worker/`.
"""

from __future__ import annotations

import asyncio
import re
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.backends.base import Backend, BackendModelContext, LoopInstance, ModelInstance
from npuserve.backends.worker import wire
from npuserve.backends.worker.call_graph import CallGraph, Instance
from npuserve.backends.worker.call_watch import CallWatch
from npuserve.backends.worker.connection import Connection
from npuserve.backends.worker.environment import interpreter_of, worker_environment
from npuserve.backends.worker.launcher import Launcher, model_spec, start_worker
from npuserve.backends.worker.parent import WorkerInstance, answer_call
from npuserve.backends.worker.process import ForkServer, Interpreter
from npuserve.backends.worker.services import ModelServices, error_of
from npuserve.backends.worker.settings import WorkerSettings
from npuserve.backends.worker.thread import (
    AsyncThreadInstance,
    LocalModel,
    ThreadModelInstance,
)
from npuserve.buffer_pool import BufferPool
from npuserve.errors import InternalError, InvalidConfigError
from npuserve.model_config import config_from_json

if TYPE_CHECKING:
    from npuserve.backends.base import Placement


# Environment of a backend written in Python, beside its file. Name: Triton's.
_ARCHIVE = "pb_exec_env_model.py.tar.gz"


class PythonBackend(Backend):
    """Serves `<model>/<version>/model.py`.

    Args:
        model_file: the file of a backend that is itself written in Python, which serves models
            that have no model.py of their own.
    """

    def __init__(self, model_file: Path | None = None) -> None:
        self._model_file = model_file
        self._archive = model_file.with_name(_ARCHIVE) if model_file else None
        self._graph = CallGraph()
        self._watch = CallWatch(self._graph)
        self._pool = BufferPool()
        # Re-entrant: the garbage collector may end a context while this thread holds it.
        self._lock = threading.RLock()
        # invariant: a fork server is here as long as a context of `_users` needs it.
        self._fork_servers: dict[Interpreter, ForkServer] = {}
        self._users: dict[int, Interpreter] = {}  # id(context) → what its workers run on

    # -- Backend ------------------------------------------------------------------------------

    def auto_complete(self, context: BackendModelContext) -> None:
        """See `Backend.auto_complete`: runs the model's auto_complete_config in a process."""
        file = self._file(context)
        if not _may_complete(file.read_text("utf-8", "replace")):
            return
        try:
            config = _run(context, self._complete(context, file))
        except BaseException:
            self._release(id(context))  # the load ends here, so nobody unloads it
            raise
        context.config.CopyFrom(config_from_json(config))

    def load(self, context: BackendModelContext) -> Sequence[ModelInstance | LoopInstance]:
        """See `Backend.load`."""
        file = self._file(context)
        settings = _settings(context)
        if settings.execution == "thread":
            return [self._thread(context, placement, file) for placement in context.placements]
        fork_server = self._fork_server(context)
        return [
            WorkerInstance(
                Launcher(
                    context,
                    placement,
                    file,
                    settings,
                    fork_server,
                    self._buffer_pool(context),
                    self._node(context, placement),
                    self._watch,
                    worker_environment(context, placement),
                )
            )
            for placement in context.placements
        ]

    def unload(self, context: BackendModelContext) -> None:
        """See `Backend.unload`."""
        self._release(id(context))

    # -- parts --------------------------------------------------------------------------------

    def _fork_server(self, context: BackendModelContext) -> ForkServer:
        """The fork server of the context's interpreter, kept until the context is unloaded.

        Or until it dies: a load that fails between auto-completion and `load` is not unloaded.
        """
        interpreter = interpreter_of(context, self._archive)
        with self._lock:
            if id(context) not in self._users:
                self._users[id(context)] = interpreter
                weakref.finalize(context, self._release, id(context)).atexit = False
            if interpreter not in self._fork_servers:
                self._fork_servers[interpreter] = ForkServer(interpreter)
            return self._fork_servers[interpreter]

    def _release(self, user: int) -> None:
        with self._lock:
            interpreter = self._users.pop(user, None)
            if interpreter is None or interpreter in self._users.values():
                return
            fork_server = self._fork_servers.pop(interpreter)
        fork_server.close_soon()

    def _node(self, context: BackendModelContext, placement: Placement) -> Instance:
        return Instance(self._graph, context, takes=not placement.passive)

    def _buffer_pool(self, context: BackendModelContext) -> BufferPool:
        return self._pool if context.services is None else context.services.buffer_pool

    def _thread(
        self, context: BackendModelContext, placement: Placement, file: Path
    ) -> ModelInstance | LoopInstance:
        model = LocalModel(
            context,
            placement,
            file,
            self._node(context, placement),
            self._watch,
            self._buffer_pool(context),
        )
        if re.search(
            r"^\s+async\s+def\s+execute\b", file.read_text("utf-8", "replace"), re.MULTILINE
        ):
            settings = _settings(context)
            return AsyncThreadInstance(model, placement.name, settings.async_batches)
        return ThreadModelInstance(model)

    def _file(self, context: BackendModelContext) -> Path:
        """The file with the model's class.

        Raises:
            InternalError, InvalidArgumentError: with Triton's texts.
        """
        name = context.config.default_model_filename or "model.py"
        if not name.endswith(".py"):
            text = f"Model name must end with '.py'. Model name is \"{name}\"."
            raise InvalidConfigError(text, "default_model_filename")
        file = context.version_dir / name
        if file.is_file():
            return file
        if self._model_file is not None:
            return self._model_file
        raise InternalError(f"Python model file not found in '{file}'")

    async def _complete(self, context: BackendModelContext, file: Path) -> str:
        """Run auto_complete_config in a worker of its own; gives the configuration as JSON."""
        settings = _settings(context)
        fork_server = await asyncio.to_thread(self._fork_server, context)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[int, Any]] = loop.create_future()

        # It may do anything but call models, so it needs no place in the graph of calls.
        alone = Instance(CallGraph(), context, takes=False)
        services = ModelServices(context, alone, self._watch)

        def arrived(kind: int, payload: Any) -> None:
            if kind == wire.LOG:
                services.log(*payload)
            elif kind == wire.CALL:  # such as for metrics that the file makes when it is imported
                call_id, method, args = payload
                services.call(method, args, partial(answer_call, connection, call_id))
            elif kind in (wire.READY, wire.FAILED) and not answer.done():
                answer.set_result((kind, payload))

        def lost() -> None:
            if not answer.done():
                answer.set_exception(InternalError(f"Auto-complete failed for {context.name}"))

        connection = Connection(loop, self._pool, arrived, lost)
        try:
            process, output = await start_worker(
                fork_server,
                connection.peer,
                settings.start_timeout_s,
                context.log,
                context.name,
            )
            try:
                spec = model_spec(context, None, file)
                connection.send(wire.INIT, {"mode": "auto_complete", "spec": spec, "env": {}})
                kind, payload = await asyncio.wait_for(
                    answer, settings.initialize_timeout_s or None
                )
            finally:
                process.kill()
                output.drain()
                output.close()
        finally:
            connection.close()
            services.close()
        if kind == wire.FAILED:
            raise error_of(payload)
        config: str = payload["config"]
        return config


def _settings(context: BackendModelContext) -> WorkerSettings:
    settings = WorkerSettings.of(context.parameters, context.backend_options)
    batching = context.config.sequence_batching
    if context.config.HasField("sequence_batching") and not batching.HasField("oldest"):
        # The direct strategy gives an instance one batch at a time.
        settings = replace(settings, async_batches=1)
    return settings


def _may_complete(source: str) -> bool:
    """Whether the class may have auto_complete_config: it is named, or could be inherited.

    Running a model's file twice is expensive when it imports a framework.
    """
    plain = re.search(
        r"^class\s+TritonPythonModel\s*(\(\s*(object)?\s*\))?\s*:", source, re.MULTILINE
    )
    return "auto_complete_config" in source or plain is None


def _run(context: BackendModelContext, coroutine: Any) -> Any:
    """Run a coroutine on the server's loop, from a helper thread."""
    if context.services is None:
        return asyncio.run(coroutine)
    return asyncio.run_coroutine_threadsafe(coroutine, context.services.loop).result()
