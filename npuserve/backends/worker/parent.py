"""The server's end of a worker: a `LoopInstance` whose model runs in another process.

One message goes out per batch and one comes back. Tensors below `wire.INLINE_BYTES` travel
inside; a larger one is lent to the worker where it lies, if it lies in the server's buffer pool,
as a large request body does. A worker that dies fails what it held at once and is restarted,
after a growing pause if it keeps dying.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from npuserve.backends.base import ExecutionBatch, LoopInstance
from npuserve.backends.worker import wire
from npuserve.backends.worker.call_graph import Batch, Report
from npuserve.backends.worker.connection import Connection
from npuserve.backends.worker.polling import ReplyPolling
from npuserve.backends.worker.process import OutputReader, WorkerProcess, describe_exit
from npuserve.backends.worker.services import INDEX_OF_STATUS, ModelServices, Reply, error_of
from npuserve.errors import InternalError, NpuserveError, WorkerDiedError
from npuserve.response import InferenceResponse
from npuserve.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npuserve.backends.worker.launcher import Launcher
    from npuserve.backends.worker.shm import SharedMemoryLink
    from npuserve.request import InferenceRequest

# Pauses before a restart: none for the first death, then doubling.
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
# A worker that lived this long, or that executed this many batches, was healthy: the pauses
# start anew when it dies.
_HEALTHY_AFTER_S = 10.0
_HEALTHY_AFTER_BATCHES = 100

# How long the exit status may come after the end of the channel.
_EXIT_STATUS_WAIT_S = 0.2

# `parameters()` of a request is text, and models that look into it know how Triton writes it.
_PARAMETERS = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class WorkerInstance(LoopInstance):
    """One instance of a Python model in a process of its own."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._settings = launcher.settings
        self.name = launcher.placement.name
        self._connection: Connection | None = None
        self._process: WorkerProcess | None = None
        self._output: OutputReader | None = None
        self._services: ModelServices = launcher.services
        self.node = launcher.node
        self.node.ask = self._look
        self._asked = False
        self._batches: dict[int, ExecutionBatch] = {}  # being executed
        # Batch and its requests by index that are answered after their execution.
        self._open: dict[int, tuple[ExecutionBatch, dict[int, InferenceRequest]]] = {}
        self._deadlines: dict[int, asyncio.TimerHandle] = {}
        self._next_batch = 1
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._readiness: asyncio.Future[bool] | None = None  # the model's own answer
        self._stopped: asyncio.Future[None] | None = None
        self._stopping = False
        self._held = False  # readers of responses are behind
        self._timed_out = False
        self._pause_s = 0.0
        self._started_at = 0.0
        self._first_batch = 1  # of the running worker
        self._mourning: set[asyncio.Task[None]] = set()  # see `_after_death`
        self.available = True

    # -- life ---------------------------------------------------------------------------------

    async def initialize(self) -> None:
        """See `LoopInstance.initialize`."""
        self._loop = asyncio.get_running_loop()
        self._polling = ReplyPolling(self._loop.call_soon)
        facts = await self._launch()
        overlaps = bool(facts["async"])
        # A worker reads its next batch when it has sent the result of the last one.
        self.prefetches = not overlaps
        if overlaps and self.node.places:
            self.max_inflight = self.node.places = self._settings.async_batches

    async def _launch(self) -> dict[str, Any]:
        """Start a worker and wait until its model is initialised.

        Raises:
            InternalError: it is not, and the worker is gone again.
        """
        self._ready = self._loop.create_future()
        self._timed_out = self._asked = False
        connection = Connection(
            self._loop, self._launcher.buffer_pool, self._on_message, self._on_lost
        )
        self._connection = connection
        try:
            self._process, self._output = await self._launcher.start(connection.peer)
            self._process.exited.add_done_callback(lambda _status: connection.end())
            self.native_thread_id = self._process.pid
            connection.send(wire.INIT, self._launcher.init_message())
            timeout = self._settings.initialize_timeout_s or None
            try:
                async with asyncio.timeout(timeout):
                    return await self._ready
            except TimeoutError:
                raise InternalError(
                    f"model instance '{self.name}' was not initialised within {timeout:g} seconds "
                    "(initialize_timeout_seconds)"
                ) from None
        except BaseException:
            self._discard(connection)
            raise
        finally:
            self._started_at = self._loop.time()
            self._first_batch = self._next_batch

    def _discard(self, connection: Connection) -> None:
        """End what is left of a worker that did not become ready."""
        connection.close()
        connection.peer.close()
        if self._process is not None:
            self._process.kill()
        self._close_output()

    def _close_output(self) -> None:
        output, self._output = self._output, None
        if output is not None:
            output.drain()
            output.close()

    async def finalize(self) -> None:
        """See `LoopInstance.finalize`."""
        self._stopping = True
        for task in self._mourning:
            task.cancel()
        if self._mourning:
            await asyncio.wait(self._mourning)
        connection, process = self._connection, self._process
        if connection is not None and process is not None and not connection.closed:
            connection.send(wire.STOP, None)
            try:
                async with asyncio.timeout(self._settings.finalize_timeout_s):
                    await asyncio.shield(process.exited)
            except TimeoutError:
                self._launcher.log.warning(
                    "finalize of model instance '%s' took more than %g seconds: its process is "
                    "ended", self.name, self._settings.finalize_timeout_s,
                )  # fmt: skip
                process.kill()
                await process.exited
        self._close_output()
        if connection is not None:
            connection.close()
        self._fail_all(WorkerDiedError(f"Stub process '{self.name}' is not healthy."))
        self._services.close()
        self.node.leave()

    async def is_ready(self) -> bool:
        """See `LoopInstance.is_ready`."""
        if self._connection is None or self._connection.closed:
            return False
        self._readiness = self._loop.create_future()
        self._connection.send(wire.IS_READY, None)
        return await self._readiness

    # -- batches ------------------------------------------------------------------------------

    def start(self, batch: ExecutionBatch) -> None:
        """See `LoopInstance.start`."""
        connection = self._connection
        if connection is None or connection.closed:
            raise WorkerDiedError(f"Stub process '{self.name}' is not healthy.")
        batch_id = self._next_batch
        self._next_batch = batch_id + 1
        first_token = connection.link.next_token
        try:
            items = self._pack(batch.requests, connection.link)
            connection.send(wire.EXECUTE, (batch_id, items))
        except BaseException:  # no shared memory can be had
            connection.link.take_back(first_token)
            raise
        for request in batch.requests:
            if request.for_model is not None:
                request.for_model.taken(Batch(self.node, batch_id))
        if self._batches:
            self._polling.answered()  # no longer the only one
        elif len(items) == 1 and not self.shares_core:
            self._polling.sent()
        self._batches[batch_id] = batch
        if self._settings.execute_timeout_s:
            self._set_deadlines()

    def _pack(self, requests: Sequence[InferenceRequest], link: SharedMemoryLink) -> list[Any]:
        cancel = self._cancel
        items = []
        for request in requests:
            tensors = []
            copy = request.inputs_shared
            for tensor in request.inputs.values():
                data: Any = tensor.data
                if len(data) >= wire.INLINE_BYTES:
                    data = link.lend(data, copy=copy)
                tensors.append((tensor.name, wire.CODE_OF[tensor.datatype], tensor.shape, data))
            items.append((tensors, request_fields(request)))
            request.on_cancel = cancel
        return items

    def hold(self, held: bool) -> None:
        """See `LoopInstance.hold`."""
        self._held = held
        connection = self._connection
        if connection is None or connection.closed:
            return
        connection.pause(held)
        if held:
            # A channel full of references to large tensors would be no limit.
            connection.send(wire.HOLD, True)
        else:
            self._loop.call_soon(self._go_on, connection)

    def _go_on(self, connection: Connection) -> None:
        """Let the worker send more, once all that it has sent is read and nobody minds."""
        if self._held or connection.closed:
            return
        if connection.has_unread:
            self._loop.call_soon(self._go_on, connection)
        else:
            connection.send(wire.HOLD, False)

    def _cancel(self, request: InferenceRequest) -> None:
        for batch_id, batch in (*self._batches.items(), *self._open_batches()):
            for index, candidate in enumerate(batch.requests):
                if candidate is request and self._connection is not None:
                    self._connection.send(wire.CANCEL, (batch_id, index))
                    return

    def _open_batches(self) -> list[tuple[int, ExecutionBatch]]:
        return [(batch_id, batch) for batch_id, (batch, _) in self._open.items()]

    def _set_deadlines(self) -> None:
        """Give every batch that is being executed a deadline, but none that waits behind it."""
        for batch_id in islice(self._batches, self.max_inflight):
            if batch_id not in self._deadlines:
                self._deadlines[batch_id] = self._loop.call_later(
                    self._settings.execute_timeout_s, self._execute_timed_out
                )

    def _execute_timed_out(self) -> None:
        self._timed_out = True
        if self._process is not None:
            self._process.kill()

    # -- messages -----------------------------------------------------------------------------

    def _on_message(self, kind: int, payload: Any) -> None:
        if kind == wire.RESULT:
            self._on_result(payload)
        elif kind == wire.RESPONSES:
            self._on_responses(payload)
        else:
            _OTHER[kind](self, payload)

    def _on_result(self, payload: Any) -> None:
        batch_id, input_ready_ns, output_ready_ns, outcomes, failure = payload
        batch = self._batches.pop(batch_id)
        self._polling.answered()
        if self._deadlines:
            self._end_deadline(batch_id)
            self._set_deadlines()
        batch.set_times(input_ready_ns, output_ready_ns)
        if failure is not None:
            batch.done(error_of(failure))
            return
        batch.execution_over()  # the worker need not wait until the answers are out
        for request, outcome in zip(batch.requests, outcomes, strict=False):
            if outcome is wire.LATER:
                batch.keep_open(request)
            elif outcome == wire.RESCHEDULE:
                batch.reschedule(request)
            else:
                batch.send(request, self._response(outcome), True)
        if not outcomes or wire.LATER in outcomes:
            self._keep_open(batch_id, batch, outcomes)
        batch.done()

    def _keep_open(self, batch_id: int, batch: ExecutionBatch, outcomes: Any) -> None:
        """Remember the requests that their senders will answer after the execution."""
        waiting = {
            index: request
            for index, request in enumerate(batch.requests)
            if not request.finished and (not outcomes or outcomes[index] is wire.LATER)
        }
        if waiting:
            self._open[batch_id] = (batch, waiting)

    def _end_deadline(self, batch_id: int) -> None:
        timer = self._deadlines.pop(batch_id, None)
        if timer is not None:
            timer.cancel()

    def _on_responses(self, payload: Any) -> None:
        for (batch_id, index), item, final in payload:
            batch = self._batches.get(batch_id)
            if batch is not None:
                request = batch.requests[index]
            elif batch_id in self._open:
                batch, waiting = self._open[batch_id]
                if index not in waiting:
                    continue  # an error ended it before
                request = waiting[index]
                if final:
                    del waiting[index]
                    if not waiting:
                        del self._open[batch_id]
            else:
                continue
            batch.send(request, None if item is None else self._response(item), final)

    def _response(self, item: Any) -> InferenceResponse:
        tensors, parameters, error = item
        if error is not None:
            response = InferenceResponse.from_error(error_of(error))
        else:
            try:
                response = InferenceResponse(self._tensors(tensors))
            except OSError as failure:
                self._decline(tensors)
                response = _unreadable("output of the model", failure)
        if parameters is not None:
            response.parameters = json.loads(parameters)
        return response

    def _decline(self, tensors: Any) -> None:
        assert self._connection is not None
        self._connection.link.decline(tensors)

    def _tensors(self, tensors: Any) -> list[Tensor]:
        assert self._connection is not None
        borrow = self._connection.link.borrow
        return [
            Tensor(name, wire.DATATYPES[code], shape, data if type(data) is bytes else borrow(data))
            for name, code, shape, data in tensors
        ]

    def _on_ready(self, facts: dict[str, Any]) -> None:
        assert self._ready is not None
        if not self._ready.done():
            self.has_readiness = facts["has_readiness"]
            self._ready.set_result(facts)

    def _on_failed(self, error: Any) -> None:
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(error_of(error))

    def _on_readiness(self, payload: Any) -> None:
        ready, error = payload
        if self._readiness is None or self._readiness.done():
            return
        if error is None:
            self._readiness.set_result(ready)
        else:
            self._readiness.set_exception(error_of(error))

    def _on_stopped(self, _payload: None) -> None:
        """Its exit follows, which is what `finalize` waits for."""

    def _on_memory(self, _payload: None) -> None:
        """All that matters was in the message's `memory`."""

    def _on_log(self, payload: Any) -> None:
        if self._output is not None:
            self._output.drain()  # what was printed before comes first
        self._services.log(*payload)

    def _on_call(self, payload: Any) -> None:
        call_id, method, args = payload
        assert self._connection is not None
        self._services.call(method, args, partial(answer_call, self._connection, call_id))

    def _on_infer(self, payload: Any) -> None:
        call_id, name, version, (tensors, fields), decoupled = payload
        assert self._connection is not None
        reply: Reply = partial(self._infer_answered, self._connection, call_id)
        try:
            inputs = self._tensors(tensors)
        except OSError as failure:
            self._decline(tensors)
            reply(_unreadable("input of the request", failure), True)
            return
        fields = (*fields[:-1], self._request_of(fields[-1]))
        self._services.infer(call_id, (name, version), inputs, fields, decoupled, reply)

    def _request_of(self, key: Any) -> InferenceRequest | None:
        """The request with this key, if the worker still has it."""
        if key is None:
            return None
        batch_id, index = key
        batch = self._batches.get(batch_id)
        requests: Sequence[InferenceRequest] = () if batch is None else batch.requests
        if not requests and batch_id in self._open:
            requests = self._open[batch_id][0].requests
        return requests[index] if requests else None

    @staticmethod
    def _infer_answered(
        connection: Connection, call_id: int, response: InferenceResponse | None, final: bool
    ) -> None:
        first_token = connection.link.next_token
        try:
            item = None if response is None else _to_wire(response, connection.link)
        except OSError as failure:
            connection.link.take_back(first_token)
            item = _to_wire(_unreadable("response of the model", failure), connection.link)
        connection.send(wire.INFER_RESPONSE, (call_id, item, final))

    def _look(self) -> None:
        """See `call_graph.Instance.ask`. A worker that does not read is not waiting."""
        if not (self._asked or self._connection is None or self._connection.closed):
            self._asked = True
            self._connection.send(wire.LOOK, None)

    def _on_waits(self, payload: Any) -> None:
        self._asked = False
        self.node.report = Report.of(*payload)

    def _on_infer_cancel(self, call_id: int) -> None:
        self._services.cancel_infer(call_id)

    # -- death --------------------------------------------------------------------------------

    def _on_lost(self) -> None:
        """The channel ended: the worker is dead or dying."""
        self.available = self.available and self._stopping
        task = self._loop.create_task(self._after_death(), name=f"restart-{self.name}")
        self._mourning.add(task)
        task.add_done_callback(self._mourning.discard)

    async def _after_death(self) -> None:
        error = await self._cause_of_death()
        self._services.close()
        self._close_output()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            return
        if self._stopping:
            return
        self._launcher.log.error("%s", error)
        self._tell_availability()
        if self._was_healthy():
            self._pause_s = 0.0
        # Nobody is made to wait for a worker that keeps dying.
        unstarted = [] if self._pause_s else self._take_unstarted()
        self._fail_all(error)
        await self._restart(unstarted)

    def _take_unstarted(self) -> list[ExecutionBatch]:
        """The batches that the dead worker had not begun; they are the next one's.

        It executes what it got first, and reads the next one only when it has sent the result.
        """
        if not self.prefetches:
            return []
        _executing, *waiting = self._batches or (0,)
        return [self._batches.pop(batch_id) for batch_id in waiting]

    async def _cause_of_death(self) -> NpuserveError:
        if self._process is None:
            return WorkerDiedError(f"Stub process '{self.name}' is not healthy.")
        status, _ = await asyncio.wait([self._process.exited], timeout=_EXIT_STATUS_WAIT_S)
        if not status:  # it closed its channel and lives: of no use any more
            self._process.kill()
        how = describe_exit(self._process.exited.result()) if status else "it closed its channel"
        if self._connection is not None and self._connection.failure:
            how = f"its channel failed: {self._connection.failure}"
        if self._timed_out:
            how = (
                f"execute took more than {self._settings.execute_timeout_s:g} seconds "
                "(execute_timeout_seconds), so it was ended"
            )
        return WorkerDiedError(f"Stub process '{self.name}' is not healthy: {how}.")

    def _fail_all(self, error: NpuserveError) -> None:
        if self._readiness is not None and not self._readiness.done():
            self._readiness.set_result(False)
        batches, self._batches = self._batches, {}
        still_open, self._open = self._open, {}
        for batch, waiting in still_open.values():
            for request in waiting.values():
                batch.send(request, InferenceResponse.from_error(error), True)
        for batch_id, batch in batches.items():
            self._end_deadline(batch_id)
            batch.done(error)

    async def _restart(self, unstarted: list[ExecutionBatch]) -> None:
        """Start a worker, again and again until it is ready, and give it what waits for it."""
        while True:
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            try:
                await self._launch()
            except NpuserveError as error:
                self._launcher.log.error(
                    "model instance '%s' could not be restarted: %s", self.name, error
                )
                while unstarted:
                    unstarted.pop(0).done(error)
            else:
                break
        self._launcher.log.info("model instance '%s' was restarted", self.name)
        self.available = True
        for batch in unstarted:
            try:
                self.start(batch)
            except NpuserveError as error:  # this worker is gone, too
                batch.done(error)
            except OSError as failure:
                batch.done(InternalError(f"no shared memory can be had: {failure}"))
        self._tell_availability()

    def _was_healthy(self) -> bool:
        lived_s = self._loop.time() - self._started_at
        executed = self._next_batch - self._first_batch
        return lived_s > _HEALTHY_AFTER_S or executed > _HEALTHY_AFTER_BATCHES

    def _tell_availability(self) -> None:
        if self.on_available_change is not None:
            self.on_available_change()


_OTHER: dict[int, Any] = {
    wire.READY: WorkerInstance._on_ready,
    wire.FAILED: WorkerInstance._on_failed,
    wire.READINESS: WorkerInstance._on_readiness,
    wire.STOPPED: WorkerInstance._on_stopped,
    wire.MEMORY: WorkerInstance._on_memory,
    wire.LOG: WorkerInstance._on_log,
    wire.CALL: WorkerInstance._on_call,
    wire.INFER: WorkerInstance._on_infer,
    wire.INFER_CANCEL: WorkerInstance._on_infer_cancel,
    wire.WAITS: WorkerInstance._on_waits,
}


def answer_call(connection: Connection, call_id: int, ok: bool, value: Any) -> None:
    """Tell a worker what became of its `Port.call`; of a notification it need not know."""
    if call_id:
        connection.send(wire.ANSWER, (call_id, ok, value))


def request_fields(request: InferenceRequest) -> Any:
    """The fields of a request besides its tensors, None when all have their defaults."""
    parameters = request.parameters
    trace = request.trace
    if not (
        request.id or request.requested_outputs or parameters or request.flags
        or request.correlation_id != 0 or request.timeout_us or request.priority or trace
    ):  # fmt: skip
        return None
    return (
        request.id, request.correlation_id, request.flags, request.timeout_us, request.priority,
        _PARAMETERS.encode(parameters) if parameters else None, request.requested_outputs,
        None if trace is None else getattr(trace, "context", None),
    )  # fmt: skip


def _unreadable(what: str, failure: OSError) -> InferenceResponse:
    """For those whose tensors cannot be mapped: no room, or no descriptor, is left."""
    return InferenceResponse.from_error(InternalError(f"{what} cannot be read: {failure}"))


def _to_wire(response: InferenceResponse, link: SharedMemoryLink) -> Any:
    """A BLS response as it travels."""
    if response.error is not None:
        return (), None, (INDEX_OF_STATUS[response.error.code], str(response.error))
    tensors = [
        (
            tensor.name,
            wire.CODE_OF[tensor.datatype],
            tuple(tensor.shape),
            link.lend(tensor.data) if len(tensor.data) >= wire.INLINE_BYTES else tensor.data,
        )
        for tensor in response.outputs
    ]
    parameters = json.dumps(response.parameters) if response.parameters else None
    return tensors, parameters, None
