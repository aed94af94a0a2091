"""The Python backend: models written as `model.py` for Triton's Python backend.

An instance runs in a worker process of its own (default) or in a thread of the server; see
`worker/settings.py` for what users can choose. The work is done in `worker/`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.backends.base import Backend, BackendModelContext, LoopInstance, ModelInstance
from npuserve.backends.worker import wire
from npuserve.backends.worker.call_graph import Caller, CallGraph
from npuserve.backends.worker.connection import Connection
from npuserve.backends.worker.environment import interpreter_of, worker_environment
from npuserve.backends.worker.launcher import Launcher, model_spec, start_worker
from npuserve.backends.worker.parent import WorkerInstance
from npuserve.backends.worker.process import ForkServer, Interpreter
from npuserve.backends.worker.services import error_of
from npuserve.backends.worker.settings import WorkerSettings
from npuserve.backends.worker.thread import ThreadModelInstance
from npuserve.buffer_pool import BufferPool
from npuserve.errors import InternalError, InvalidArgumentError
from npuserve.model_config import config_from_json

if TYPE_CHECKING:
    from npuserve.backends.base import Placement


class PythonBackend(Backend):
    """Serves `<model>/<version>/model.py`.

    Args:
        model_file: the file of a backend that is itself written in Python, which serves models
            that have no model.py of their own.
    """

    def __init__(self, model_file: Path | None = None) -> None:
        self._model_file = model_file
        self._graph = CallGraph()
        self._pool = BufferPool()
        self._lock = threading.Lock()
        # invariant: a fork server runs as long as a model that is loaded needs it.
        self._fork_servers: dict[Interpreter, ForkServer] = {}
        self._users: dict[int, Interpreter] = {}  # id(context) → what its workers run on

    # -- Backend ------------------------------------------------------------------------------

    def auto_complete(self, context: BackendModelContext) -> None:
        """See `Backend.auto_complete`: runs the model's auto_complete_config in a process."""
        file = self._file(context)
        if "def auto_complete_config" not in file.read_text("utf-8", "replace"):
            return
        config = _run(context, self._complete(context, file))
        context.config.CopyFrom(config_from_json(config))

    def load(self, context: BackendModelContext) -> Sequence[ModelInstance | LoopInstance]:
        """See `Backend.load`."""
        file = self._file(context)
        settings = WorkerSettings.of(context.parameters, context.backend_options)
        if settings.execution == "thread":
            return [self._thread(context, placement, file) for placement in context.placements]
        interpreter = interpreter_of(context)
        with self._lock:
            fork_server = self._fork_servers.get(interpreter)
            if fork_server is None:
                fork_server = self._fork_servers[interpreter] = ForkServer(interpreter)
            self._users[id(context)] = interpreter
        return [
            WorkerInstance(
                Launcher(
                    context,
                    placement,
                    file,
                    settings,
                    fork_server,
                    self._buffer_pool(context),
                    Caller(self._graph, context.name),
                    worker_environment(context, placement),
                )
            )
            for placement in context.placements
        ]

    def unload(self, context: BackendModelContext) -> None:
        """See `Backend.unload`."""
        with self._lock:
            interpreter = self._users.pop(id(context), None)
            if interpreter is None or interpreter in self._users.values():
                return
            fork_server = self._fork_servers.pop(interpreter)
        fork_server.close_soon()

    # -- parts --------------------------------------------------------------------------------

    def _buffer_pool(self, context: BackendModelContext) -> BufferPool:
        return self._pool if context.services is None else context.services.buffer_pool

    def _thread(
        self, context: BackendModelContext, placement: Placement, file: Path
    ) -> ThreadModelInstance:
        return ThreadModelInstance(
            context,
            placement,
            file,
            Caller(self._graph, context.name),
            None if context.services is None else context.services.loop,
            self._buffer_pool(context),
        )

    def _file(self, context: BackendModelContext) -> Path:
        """The file with the model's class.

        Raises:
            InternalError, InvalidArgumentError: with Triton's texts.
        """
        name = context.config.default_model_filename or "model.py"
        if not name.endswith(".py"):
            raise InvalidArgumentError(f"Model name must end with '.py'. Model name is \"{name}\".")
        file = context.version_dir / name
        if file.is_file():
            return file
        if self._model_file is not None:
            return self._model_file
        raise InternalError(f"Python model file not found in '{file}'")

    async def _complete(self, context: BackendModelContext, file: Path) -> str:
        """Run auto_complete_config in a worker of its own; gives the configuration as JSON."""
        settings = WorkerSettings.of(context.parameters, context.backend_options)
        loop = asyncio.get_running_loop()
        fork_server = ForkServer(interpreter_of(context))
        answer: asyncio.Future[tuple[int, Any]] = loop.create_future()

        def arrived(kind: int, payload: Any) -> None:
            if kind in (wire.READY, wire.FAILED) and not answer.done():
                answer.set_result((kind, payload))

        def lost() -> None:
            if not answer.done():
                answer.set_exception(InternalError(f"Auto-complete failed for {context.name}"))

        connection = Connection(loop, self._pool, arrived, lost)
        process, output = await start_worker(
            fork_server, connection.peer, settings.start_timeout_s, context.log
        )
        try:
            spec = model_spec(context, None, file)
            connection.send(wire.INIT, {"mode": "auto_complete", "spec": spec, "env": {}})
            kind, payload = await asyncio.wait_for(answer, settings.initialize_timeout_s or None)
        finally:
            process.kill()
            connection.close()
            output.drain()
            output.close()
            fork_server.close()
        if kind == wire.FAILED:
            raise error_of(payload)
        config: str = payload["config"]
        return config


def _run(context: BackendModelContext, coroutine: Any) -> Any:
    """Run a coroutine on the server's loop, from a helper thread."""
    if context.services is None:
        return asyncio.run(coroutine)
    return asyncio.run_coroutine_threadsafe(coroutine, context.services.loop).result()
