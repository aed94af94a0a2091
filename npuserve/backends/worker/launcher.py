"""What one instance needs to start its worker: interpreter, environment, description."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve._proto.model_config_pb2 import ModelOptimizationPolicy
from npuserve.backends.worker.environment import device_number
from npuserve.backends.worker.process import ForkServer, OutputReader, WorkerProcess
from npuserve.backends.worker.services import ModelServices
from npuserve.model_config import config_to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npuserve.backends.base import BackendModelContext, Placement
    from npuserve.backends.worker.call_graph import Instance
    from npuserve.backends.worker.call_watch import CallWatch
    from npuserve.backends.worker.settings import WorkerSettings
    from npuserve.buffer_pool import BufferPool

# How much nicer than the server its workers are, by `optimization { priority }`. Each request
# needs the event loop for a moment; a loop that waits until a model has used up its time slice
# holds up all models.
# Differs from Triton: the priority means nothing to its python backend.
_NICENESS: Mapping[int, int] = {
    ModelOptimizationPolicy.PRIORITY_DEFAULT: 10,
    ModelOptimizationPolicy.PRIORITY_MAX: 0,
    ModelOptimizationPolicy.PRIORITY_MIN: 19,
}
_MOST_NICE = 19


def model_spec(context: BackendModelContext, placement: Placement | None, file: Path) -> Any:
    """The description of an instance that `ModelHost` reads: plain values.

    Args:
        placement: None for auto-completion, which belongs to no instance.
        file: of the model's class.
    """
    return {
        "name": context.name,
        "version": context.version,
        "model_dir": str(context.model_dir),
        "version_dir": str(context.version_dir),
        "file": str(file),
        "config": config_to_json(context.config),
        "instance_name": placement.name if placement else context.name,
        "kind": placement.kind if placement else "CPU",
        "device_id": placement.device_id if placement else 0,
    }


@dataclass
class Launcher:
    """How the worker of one instance is started, as often as needed.

    Attributes:
        node: the instance in the graph of calls between models.
    """

    context: BackendModelContext
    placement: Placement
    file: Path
    settings: WorkerSettings
    fork_server: ForkServer
    buffer_pool: BufferPool
    node: Instance
    watch: CallWatch
    environment: dict[str, str]

    def __post_init__(self) -> None:
        self.services = ModelServices(self.context, self.node, self.watch)

    @property
    def log(self) -> logging.Logger:
        """Logger of the model."""
        return self.context.log

    def init_message(self) -> dict[str, Any]:
        """Payload of the INIT message."""
        spec = model_spec(self.context, self.placement, self.file)
        spec["device_id"] = device_number(self.placement, self.environment)
        return {"mode": "serve", "spec": spec, "env": self.environment}

    async def start(self, peer: socket.socket) -> tuple[WorkerProcess, OutputReader]:
        """Fork a worker that has `peer` as its channel; takes over `peer`.

        Raises:
            InternalError: the interpreter does not come up.
        """
        process, output = await start_worker(
            self.fork_server, peer, self.settings.start_timeout_s, self.log, self.placement.name
        )
        with contextlib.suppress(ProcessLookupError):  # its death is noticed elsewhere
            self._schedule(process.pid)
        return process, output

    def _schedule(self, pid: int) -> None:
        """Set cores and niceness; before the INIT message, so that all its threads inherit them."""
        if self.placement.cpu_cores:
            os.sched_setaffinity(pid, self.placement.cpu_cores)
        niceness = _NICENESS[self.context.config.optimization.priority]
        own = os.getpriority(os.PRIO_PROCESS, 0)
        # Refused where the server was made less nice since it has its fork server, and where a
        # sandbox has no priorities; the worker is as nice as the fork server then.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, pid, min(own + niceness, _MOST_NICE))


async def start_worker(
    fork_server: ForkServer,
    peer: socket.socket,
    timeout_s: float,
    log: logging.Logger,
    name: str,
) -> tuple[WorkerProcess, OutputReader]:
    """Fork a worker; what it prints goes to `log` line by line. Takes over `peer`.

    Args:
        name: who prints, named by the log in the place of a source file.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    with contextlib.closing(peer):
        try:
            process = await fork_server.fork([peer.fileno(), writing], timeout_s)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
    output = OutputReader(fork_server.loop, reading, line_writer(log, name))
    return process, output


def line_writer(log: logging.Logger, name: str) -> Callable[[str], None]:
    """Writes printed lines to the log: `<name>:<number of the line>] "<text>"`."""
    numbers = itertools.count(1)

    def write(line: str) -> None:
        if log.isEnabledFor(logging.INFO):
            number = next(numbers)
            log.handle(log.makeRecord(log.name, logging.INFO, name, number, "%s", (line,), None))

    return write
