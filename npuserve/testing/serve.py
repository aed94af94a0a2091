"""A real server for tests: on free ports of 127.0.0.1, ready on entry, drained on exit.

    with serve(repository) as server:
        client = tritonclient.http.InferenceServerClient(server.http_url)

`serve` runs it in a thread of this process, which starts in no time and shows coverage and
tracebacks. `serve_process` runs the command line in a process of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import uvloop

from npuserve.app import FrontEnd, front_ends
from npuserve.errors import InternalError
from npuserve.options import ServerOptions
from npuserve.server.core import InferenceServer

HOST = "127.0.0.1"
_ADDRESSES = {f"{service}_address": HOST for service in ("http", "grpc", "metrics")}
_PORTS = {f"{service}_port": 0 for service in ("http", "grpc", "metrics")}
_FRONT_ENDS = {"HttpServer": "http", "GrpcServer": "grpc", "MetricsServer": "metrics"}
# Written by app.py for each listener, as tritonserver does; log scrapers wait for the same lines.
_STARTED = re.compile(r"Started (HTTPService|GRPCInferenceService|Metrics Service) at \S+:(\d+)")
_SWITCHED_OFF = re.compile(r"--allow-(http|grpc|metrics)=(false|off|0)")
_LOG_NAMES = {"HTTPService": "http", "GRPCInferenceService": "grpc", "Metrics Service": "metrics"}


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Where a server listens; a service that is switched off has port 0."""

    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0

    @property
    def http_url(self) -> str:
        """host:port, as tritonclient.http takes it."""
        return f"{HOST}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """host:port, as tritonclient.grpc takes it."""
        return f"{HOST}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """The address of the Prometheus text."""
        return f"http://{HOST}:{self.metrics_port}/metrics"


@dataclass(frozen=True, kw_only=True)
class RunningServer(Endpoints):
    """A server in a thread of this process.

    Attributes:
        core: to be used on `loop` only.
    """

    core: InferenceServer
    loop: asyncio.AbstractEventLoop


@dataclass(frozen=True, kw_only=True)
class ServerProcess(Endpoints):
    """A server in a process of its own.

    Attributes:
        log: what it wrote to stderr and stdout so far, line by line.
    """

    process: subprocess.Popen[str]
    log: Sequence[str]


@contextmanager
def serve(*repositories: str | Path, **options: Any) -> Iterator[RunningServer]:
    """Run a server in a thread.

    Args:
        repositories: model repositories.
        options: fields of `ServerOptions`; addresses and ports are set already.

    Raises:
        NpuserveError: it cannot start; as with the command line a model that fails to load is
            such a reason unless `exit_on_error=False`.
    """
    settings = ServerOptions(
        **(_ADDRESSES | _PORTS | options), model_repository=tuple(str(p) for p in repositories)
    )
    started: concurrent.futures.Future[RunningServer] = concurrent.futures.Future()
    stop = asyncio.Event()
    thread = threading.Thread(target=_run, args=(settings, started, stop), name="npuserve-test")
    thread.start()
    try:
        server = started.result()
    except BaseException:
        thread.join()
        raise
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(stop.set)
        thread.join()


@contextmanager
def serve_process(
    *repositories: str | Path,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """Run `npuserve` as a command; SIGTERM on exit, and its exit code must then be 0.

    Args:
        flags: further flags, after those for repositories, addresses and ports.
        env: the whole environment; None for this process's.

    Raises:
        InternalError: it ended before it was ready; the text holds its log.
    """
    command = [sys.executable, "-m", "npuserve"]
    command += [f"--model-repository={path}" for path in repositories]
    command += [f"--{name.replace('_', '-')}={v}" for name, v in (_ADDRESSES | _PORTS).items()]
    process = subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(env) if env is not None else None,
    )
    assert process.stdout is not None
    log: list[str] = []
    ports: dict[str, int] = {}
    ready = threading.Event()
    services = _services(flags)
    reader = threading.Thread(target=_read_log, args=(process.stdout, log, ports, services, ready))
    reader.start()
    try:
        ready.wait()
        if len(ports) < services:
            process.wait()
            raise InternalError(f"the server ended with code {process.returncode}:\n{''.join(log)}")
        yield ServerProcess(**ports, process=process, log=log)
    finally:
        process.terminate()
        code = process.wait()
        reader.join()
        process.stdout.close()
    if code:
        raise InternalError(f"the server ended with code {code}:\n{''.join(log)}")


def _run(
    options: ServerOptions,
    started: concurrent.futures.Future[RunningServer],
    stop: asyncio.Event,
) -> None:
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(options, started, stop))
    except BaseException as error:  # handed to whoever waits for the start
        if started.done():
            raise
        started.set_exception(error)


async def _serve(
    options: ServerOptions,
    started: concurrent.futures.Future[RunningServer],
    stop: asyncio.Event,
) -> None:
    async with InferenceServer(options) as core:
        failed = core.lifecycle.failed_startup
        if failed and options.exit_on_error:
            raise InternalError(f"failed to load {', '.join(failed)}: {_reasons(core, failed)}")
        async with front_ends(core) as listeners:
            loop = asyncio.get_running_loop()
            started.set_result(RunningServer(**_ports(listeners), core=core, loop=loop))
            await stop.wait()
            core.stopping = True


def _ports(listeners: Iterable[FrontEnd]) -> dict[str, int]:
    by_class = {type(listener).__name__: listener.port for listener in listeners}
    return {f"{name}_port": by_class[cls] for cls, name in _FRONT_ENDS.items() if cls in by_class}


def _reasons(core: InferenceServer, names: Iterable[str]) -> str:
    entries = [core.lifecycle.entries[name] for name in names]
    return "; ".join(
        entry.failure or "; ".join(status.reason for status in entry.versions.values())
        for entry in entries
    )


def _services(flags: Iterable[str]) -> int:
    """How many services will report a port."""
    return len(_LOG_NAMES) - len({flag for flag in flags if _SWITCHED_OFF.fullmatch(flag)})


def _read_log(
    stream: IO[str],
    log: list[str],
    ports: dict[str, int],
    services: int,
    ready: threading.Event,
) -> None:
    """Collect lines and ports; `ready` is set when all services listen, or at the end."""
    for line in stream:
        log.append(line)
        match = _STARTED.search(line)
        if match:
            service, port = match.groups()
            ports[f"{_LOG_NAMES[service]}_port"] = int(port)
            if len(ports) == services:
                ready.set()
    ready.set()
