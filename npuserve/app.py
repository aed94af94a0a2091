"""Composition root: builds the parts in order, waits for a signal, takes them down in order.

The only file that knows all layers. Reading `serve` from top to bottom is the life of the
process: load the models, open the ports, wait, close the ports, drain, unload.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

from npuserve import log
from npuserve.errors import InternalError, NpuserveError
from npuserve.server.core import InferenceServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from npuserve.options import ServerOptions

logger = logging.getLogger(__name__)

# Young garbage is looked for as often as by default, in everything that is alive ten times less
# often: with 100,000 requests in the queue that takes the loop half a second, each time their
# number has grown by a quarter. What is left of old cycles goes when the server is idle.
_GC_THRESHOLDS = (700, 10, 100)

_METRICS = "Metrics Service"


class FrontEnd(Protocol):
    """A listener: HTTP, gRPC, metrics, SageMaker or Vertex AI."""

    @property
    def port(self) -> int:
        """The port that was bound."""

    async def start(self) -> None:
        """Bind and serve. Raises UnavailableError if the port is taken."""

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new, finish what was accepted, give up after `grace_s` seconds."""


def main(options: ServerOptions) -> int:
    """Run the server until SIGINT or SIGTERM; returns the process's exit code."""
    log.configure(options)
    if options.npu_simulator:
        from npuserve.testing import simulator

        simulator.install(cards=options.npu_simulator)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(serve(options))
    _finalize_acl()
    _leave_if_threads_linger(code)
    return code


async def serve(options: ServerOptions) -> int:
    """Load, serve and drain; returns the exit code.

    Raises:
        NpuserveError: a repository cannot be read, or a start-up model failed and
            --exit-on-error is on.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    main_task = asyncio.current_task()
    assert main_task is not None
    for number in (signal.SIGINT, signal.SIGTERM):  # while models load, give up loading
        loop.add_signal_handler(number, main_task.cancel)
    expiry: asyncio.TimerHandle | None = None
    imports = loop.run_in_executor(None, _import_front_ends, options)
    try:
        async with InferenceServer(options) as server:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, _stop, number, stop)
            log.print_startup_tables(server)
            if server.lifecycle.failed_startup and options.exit_on_error:
                raise InternalError("failed to load all models")
            await imports
            # Everything alive now stays: later collections need not look at it, and a full one
            # costs a request no longer than the others.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_GC_THRESHOLDS)
            async with front_ends(server):
                await stop.wait()
                server.stop_loads()
                logger.info("Waiting for in-flight requests to complete.")
                _report_in_flight(server, options.exit_timeout_secs)
                expiry = loop.call_later(options.exit_timeout_secs, _exit_now, server)
    except asyncio.CancelledError:
        logger.info("stopped while the models were loading")
    except _FrontEndFailedError:  # reported where it happened
        return 1
    if expiry is not None:
        expiry.cancel()
    return 0


@asynccontextmanager
async def front_ends(server: InferenceServer) -> AsyncIterator[list[FrontEnd]]:
    """The listeners that the options ask for: open inside, closed and drained on leaving.

    Raises:
        _FrontEndFailedError: a port could not be opened.
    """
    answering: list[FrontEnd] = []
    watching: list[FrontEnd] = []
    grace_s = server.options.exit_timeout_secs
    try:
        for listener in _listeners(server):
            service = listener.service
            try:
                await service.start()
            except NpuserveError as error:
                text = f"failed to start {listener.short_name}: {error.code.value} - {error}"
                logger.error(text)
                raise _FrontEndFailedError(text) from error
            (watching if listener.name == _METRICS else answering).append(service)
            # Log scrapers wait for these lines; they are Triton's.
            logger.info("Started %s at %s:%d", listener.name, listener.address, service.port)
        yield [*answering, *watching]
    finally:
        for services in (answering, watching):  # what is answered last is counted, too
            await asyncio.gather(*(service.stop(grace_s) for service in services))


class _Listener(NamedTuple):
    name: str
    short_name: str
    address: str
    service: FrontEnd


def _listeners(server: InferenceServer) -> Iterator[_Listener]:
    from npuserve.protocol.shared_memory import SharedMemoryRegistry

    options = server.options
    regions = SharedMemoryRegistry(options.allow_client_shm, server.buffer_pool.lease)
    if options.allow_grpc:
        from npuserve.protocol.grpc.server import GrpcServer

        grpc = GrpcServer(server, options, regions)
        yield _Listener("GRPCInferenceService", "GRPC service", options.grpc_address, grpc)
    if options.allow_http:
        from npuserve.protocol.http.server import HttpServer

        http = HttpServer(server, options, regions)
        yield _Listener("HTTPService", "HTTP service", options.http_address, http)
    if options.allow_sagemaker:
        from npuserve.protocol.http.sagemaker import SageMakerServer

        sagemaker = SageMakerServer(server, options, regions, os.environ)
        yield _Listener("Sagemaker service", "Sagemaker service", options.http_address, sagemaker)
    if options.allow_vertex_ai:
        from npuserve.protocol.http.vertex import VertexAiServer

        vertex = VertexAiServer(server, options, regions, os.environ)
        yield _Listener("Vertex AI service", "Vertex AI service", options.http_address, vertex)
    if options.allow_metrics:
        from npuserve.protocol.http.metrics import MetricsServer

        metrics = MetricsServer(server, options)
        yield _Listener(_METRICS, "Metrics service", options.metrics_address, metrics)


def _import_front_ends(options: ServerOptions) -> None:
    """Import what takes long (FastAPI, gRPC) in a helper thread, while the models load."""
    if options.allow_grpc:
        import_module("npuserve.protocol.grpc.server")
    if options.allow_http:
        import_module("npuserve.protocol.http.server")


class _FrontEndFailedError(Exception):
    """A port could not be opened."""


def _stop(number: int, stop: asyncio.Event) -> None:
    """The log says who ended the server."""
    logger.info("Signal (%d) received.", number)
    stop.set()


def _report_in_flight(server: InferenceServer, seconds_left: float) -> None:
    """What the exit waits for, in Triton's words."""
    busy = server.lifecycle.busy_models()
    logger.info(
        "Timeout %d: Found %d model versions that have in-flight inferences",
        seconds_left, len(busy),
    )  # fmt: skip
    for model in busy:
        logger.info(
            "Model '%s' (version %d) has %d in-flight inferences",
            model.name, model.version, model.inflight,
        )  # fmt: skip


def _exit_now(server: InferenceServer) -> None:
    """The drain took longer than --exit-timeout-secs. Workers see the closed pipe and go."""
    _report_in_flight(server, 0)
    logger.error("Exit timeout expired. Exiting immediately.")
    logging.shutdown()
    os._exit(1)


def _finalize_acl() -> None:
    """Finalize the Ascend runtime where a model used it: leaving by `os._exit` would not."""
    library = sys.modules.get("npuserve.backends.acl.library")
    if library is not None:
        library.shutdown()


def _leave_if_threads_linger(code: int) -> None:
    """A thread that user code left running (thread execution) must not hold the process."""
    lingering = [
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.daemon
    ]
    if lingering:
        logger.warning("leaving %d thread(s) of model code behind", len(lingering))
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
