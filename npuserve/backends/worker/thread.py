"""Thread execution: the model host within the server's process, in its instance's thread.

Lower latency than a worker process, and large tensors are not even mapped; in exchange the model
shares the interpreter and its lock with the server, and a crash of native code ends both. What
models may expect of each other's modules is in `loader.PrivateNamespace`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npuserve.backends.base import ExecutionBatch, LoopInstance, ModelInstance, settle
from npuserve.backends.worker import wire
from npuserve.backends.worker.call_graph import Batch, Report
from npuserve.backends.worker.forks import FORKS, leave
from npuserve.backends.worker.host import ModelFailedError, ModelHost
from npuserve.backends.worker.launcher import line_writer, model_spec
from npuserve.backends.worker.loader import PrivateNamespace
from npuserve.backends.worker.local_port import LocalPort, model_tensor
from npuserve.backends.worker.parent import request_fields
from npuserve.backends.worker.services import ModelServices
from npuserve.backends.worker.stdio import Printer
from npuserve.backends.worker.waiting import NOT_BEGUN, Executing, report
from npuserve.errors import InternalError, NpuserveError, RequestCancelledError

if TYPE_CHECKING:
    from npuserve.backends.base import BackendModelContext, Placement
    from npuserve.backends.worker.call_graph import Instance
    from npuserve.backends.worker.call_watch import CallWatch
    from npuserve.backends.worker.pb_request import InferenceRequest
    from npuserve.buffer_pool import BufferPool
    from npuserve.request import InferenceRequest as ServerRequest
    from npuserve.response import InferenceResponse

logger = logging.getLogger(__name__)

_now_ns = time.monotonic_ns


class LocalModel:
    """A model host in the server's process, with what it needs there.

    Args:
        node: the instance in the graph of calls between models.
        watch: told of calls.

    Attributes:
        executing: batches that the model executes, or that wait for their turn, by number.
    """

    def __init__(
        self,
        context: BackendModelContext,
        placement: Placement,
        file: Path,
        node: Instance,
        watch: CallWatch,
        pool: BufferPool,
    ) -> None:
        self._context = context
        self.node = node
        node.ask = self._look
        self.port = LocalPort(ModelServices(context, node, watch), pool)
        self.executing: dict[int, Executing] = {}
        self._thread_id = 0
        self._numbers = itertools.count(1)
        self._log_line = line_writer(context.log, placement.name)
        self._print = Printer(self._write_line)
        self._namespace: PrivateNamespace | None = None
        self.host = ModelHost(model_spec(context, placement, file), self.port, self._import)

    def _import(self, path: str, pb_utils: ModuleType) -> ModuleType:
        self._namespace = PrivateNamespace(path, pb_utils, self._print)
        return self._namespace.load()

    def _write_line(self, line: str) -> None:
        self.port.write_line(self._log_line, line)

    def initialize(self) -> None:
        """Import and initialise the model.

        Raises:
            InternalError: with the model's traceback.
        """
        FORKS.register(self.port, self.host)
        try:
            self.host.initialize()
        except ModelFailedError as error:
            raise InternalError(str(error)) from None
        finally:
            self.leave_if_forked()
        self._thread_id = threading.get_ident()

    def leave_if_forked(self) -> None:
        """A process forked by the model came out of the model's method: it must not serve."""
        if self.port.forked:
            leave()

    def is_ready(self) -> bool:
        """See `ModelInstance.is_ready`."""
        try:
            return self.host.is_ready()
        except ModelFailedError as error:
            raise InternalError(str(error)) from None
        finally:
            self.leave_if_forked()

    async def is_ready_async(self) -> bool:
        """`is_ready` on the model's own loop."""
        try:
            return await self.host.is_ready_async()
        except ModelFailedError as error:
            raise InternalError(str(error)) from None
        finally:
            self.leave_if_forked()

    def number(self, batch: ExecutionBatch) -> int:
        """Number a batch, and tell the calls it is executed for."""
        number = next(self._numbers)
        for request in batch.requests:
            if request.for_model is not None:
                self.port.mailbox.post(request.for_model.taken, Batch(self.node, number))
        return number

    def requests(self, batch: ExecutionBatch) -> list[InferenceRequest]:
        """The requests of a batch as the model sees them."""
        return [self._request(batch, request) for request in batch.requests]

    def _look(self) -> None:
        """See `call_graph.Instance.ask`; the server's thread, while those of the model run."""
        found = report(
            self.port.waiting,
            self._thread_id,
            dict(self.executing),
            self.port.model_loop,
            home=str(self._context.model_dir) + os.sep,
        )
        # On the way of what they sent before: who waits for a response that came goes on.
        self.port.mailbox.post(setattr, self.node, "report", Report.of(*found))

    def _request(self, batch: ExecutionBatch, request: ServerRequest) -> InferenceRequest:
        copy = request.inputs_shared
        tensors = [model_tensor(tensor, copy) for tensor in request.inputs.values()]
        return self.host.request((batch, request), tensors, request_fields(request))

    def response(self, asked: InferenceRequest, outcome: Any) -> InferenceResponse:
        """A response of the model as the server's."""
        return self.port.response(outcome, self.host.kept_outputs(asked))

    def finalize(self) -> None:
        """Finalise the model and let go of everything."""
        try:
            self.host.finalize()
        except ModelFailedError as error:
            self._context.log.error("finalize failed: %s", error)
        finally:
            if self._namespace is not None:
                self._namespace.unload()
            self._print.finish()
            FORKS.forget(self.port)
            self.port.close()
            self.port.mailbox.post(self.node.leave)


class ThreadModelInstance(ModelInstance):
    """One instance of a Python model in a thread of the server."""

    holds_gil = True

    def __init__(self, model: LocalModel) -> None:
        self._model = model
        self._loop: asyncio.AbstractEventLoop | None = None
        self.node = model.node

    def initialize(self) -> None:
        """See `ModelInstance.initialize`."""
        self._model.port.mailbox = self.mailbox
        # As in the main thread of a worker, where `asyncio.get_event_loop` has one to give.
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._model.initialize()
        self.has_readiness = self._model.host.has_readiness

    def is_ready(self) -> bool:
        """See `ModelInstance.is_ready`."""
        return self._model.is_ready()

    def execute(self, batch: ExecutionBatch) -> None:
        """See `ModelInstance.execute`."""
        number = self._model.number(batch)
        requests = self._model.requests(batch)
        batch.input_ready()
        host = self._model.host
        self._model.executing[number] = Executing(requests)
        try:
            if host.is_async:  # inherited, so that the text of model.py did not show it
                assert self._loop is not None
                outcomes = self._loop.run_until_complete(host.execute_async(requests))
            else:
                outcomes = host.execute(requests)
        except ModelFailedError as error:
            raise InternalError(str(error)) from None
        finally:
            self._model.leave_if_forked()
            del self._model.executing[number]
        batch.output_ready()
        for request, asked, outcome in zip(batch.requests, requests, outcomes, strict=False):
            if outcome is wire.LATER:
                batch.keep_open(request)
            elif type(outcome) is int:
                batch.reschedule(request)
            else:
                batch.send(request, self._model.response(asked, outcome), True)

    def finalize(self) -> None:
        """See `ModelInstance.finalize`."""
        try:
            self._model.finalize()
        finally:
            if self._loop is not None:
                self._loop.close()


class AsyncThreadInstance(LoopInstance):
    """One instance of a model with `async def execute`, on an event loop in a thread of its own.

    Its batches overlap. What it answers is handed to the server's loop.
    """

    def __init__(self, model: LocalModel, name: str, max_inflight: int) -> None:
        self._model = model
        self.node = model.node
        self._name = name
        self.max_inflight = max_inflight
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._ended: asyncio.Future[None] | None = None

    async def initialize(self) -> None:
        """See `LoopInstance.initialize`."""
        self._model.port.mailbox = self.mailbox
        self._model.port.model_loop = self._loop
        server_loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = server_loop.create_future()
        self._ended = server_loop.create_future()
        threading.Thread(
            target=self._serve, args=(ready,), name=f"instance-{self._name}", daemon=True
        ).start()
        await ready
        if self._model.node.places:
            self._model.node.places = self.max_inflight
        self.has_readiness = self._model.host.has_readiness

    def hold(self, held: bool) -> None:
        """See `LoopInstance.hold`."""
        self._model.port.hold(held)

    async def is_ready(self) -> bool:
        """See `LoopInstance.is_ready`."""
        question = asyncio.run_coroutine_threadsafe(self._model.is_ready_async(), self._loop)
        return await asyncio.wrap_future(question)

    def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            self._model.initialize()
        except Exception as error:
            self.mailbox.post(settle, ready, error)
        else:
            self.mailbox.post(settle, ready, None)
        asyncio.set_event_loop(self._loop)
        while not self._stopping:  # the model may stop the loop, or leave it by sys.exit in a task
            try:
                self._loop.run_forever()
            except BaseException:
                logger.exception("a task of model instance %s left its event loop", self._name)
        try:
            self._model.finalize()
        finally:  # the unload waits for it
            self._loop.close()
            assert self._ended is not None
            self.mailbox.post(settle, self._ended, None)

    def start(self, batch: ExecutionBatch) -> None:
        """See `LoopInstance.start`."""
        number = self._model.number(batch)
        self._model.executing[number] = NOT_BEGUN
        self._loop.call_soon_threadsafe(self._begin, batch, number)

    def _begin(self, batch: ExecutionBatch, number: int) -> None:
        task = self._loop.create_task(self._execute(batch, number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _execute(self, batch: ExecutionBatch, number: int) -> None:
        input_ready = 0
        error: NpuserveError | None = None
        answers: list[Any] = []
        try:
            requests = self._model.requests(batch)
            input_ready = _now_ns()
            first, *others = batch.requests
            if first.cancelled and all(request.cancelled for request in others):
                self._model.host.abandon(requests)  # while the model kept its event loop busy
                raise RequestCancelledError("the request was cancelled before its execution")
            self._model.executing[number] = Executing(requests, asyncio.current_task())
            outcomes = await self._model.host.execute_async(requests)
            answers = [
                outcome
                if outcome is wire.LATER or type(outcome) is int
                else self._model.response(asked, outcome)
                for asked, outcome in zip(requests, outcomes, strict=False)
            ]
        except (ModelFailedError, OSError, MemoryError) as failure:  # no room for its tensors
            error = InternalError(str(failure))
        except RequestCancelledError as cancelled:
            error = cancelled
        finally:
            self._model.leave_if_forked()
            del self._model.executing[number]
        times = (input_ready, _now_ns())
        self.mailbox.post(_finish, batch, answers, times, error)

    async def finalize(self) -> None:
        """See `LoopInstance.finalize`."""
        if self._ended is None:
            return
        self._loop.call_soon_threadsafe(self._stop)
        await self._ended

    def _stop(self) -> None:
        self._stopping = True
        self._loop.stop()


def _finish(
    batch: ExecutionBatch,
    answers: list[Any],
    times: tuple[int, int],
    error: NpuserveError | None,
) -> None:
    """On the server's loop: deliver what an execution gave and end it."""
    batch.set_times(*times)
    for request, answer in zip(batch.requests, answers, strict=False):
        if answer is wire.LATER:
            batch.keep_open(request)
        elif type(answer) is int:
            batch.reschedule(request)
        else:
            batch.send(request, answer, True)
    batch.done(error)
