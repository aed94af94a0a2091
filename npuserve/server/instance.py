"""A model instance at work: takes one batch at a time, executes it off the loop, answers.

Step 8 of the walk. `InstancePool` is what a scheduler sees: which instances are free, and a call
when one becomes free. `Instance` wraps the object a backend made and turns its answers and
times into responses and statistics. Knows no wire format and no queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from npuserve.backends.base import LoopInstance, ModelInstance, PipelinedInstance, Placement
from npuserve.errors import (
    InternalError,
    InvalidArgumentError,
    NpuserveError,
    RequestCancelledError,
)
from npuserve.response import InferenceResponse
from npuserve.server.statistics import FailureReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from npuserve.request import InferenceRequest
    from npuserve.server.statistics import ModelStatistics

logger = logging.getLogger(__name__)

_now_ns = time.monotonic_ns

_NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
    "configured to handle such a flag."
)


class Batch:
    """The `ExecutionBatch` of a `LoopInstance`: everything happens on the loop's thread.

    Statistics are counted when a request is final *and* the execution is over, so that compute
    times are complete whichever comes first.
    """

    __slots__ = (
        "_failed", "_finished", "_freed", "_input_ready_ns", "_is_done", "_kept_open",
        "_output_ready_ns", "_rescheduled", "_response_ns", "_times",
        "batch_size", "instance", "requests", "start_ns",
    )  # fmt: skip

    def __init__(
        self, instance: Instance, requests: Sequence[InferenceRequest], batch_size: int
    ) -> None:
        self.instance = instance
        self.requests = requests
        self.batch_size = batch_size
        self.start_ns = _now_ns()
        self._input_ready_ns = 0
        self._output_ready_ns = 0
        self._is_done = False
        self._freed = False  # the instance may have its next batch already
        self._times = (0, 0, 0)
        self._failed: set[int] | None = None  # id(request) of those that had an error response
        self._kept_open: set[int] | None = None
        self._rescheduled: set[int] | None = None  # id(request) of those the scheduler has again
        self._response_ns: dict[int, int] | None = None  # id(request) → its last response
        self._finished: list[InferenceRequest] = []  # final before the execution was over

    def input_ready(self) -> None:
        """See `ExecutionBatch.input_ready`."""
        self._input_ready_ns = _now_ns()

    def output_ready(self) -> None:
        """See `ExecutionBatch.output_ready`."""
        self._output_ready_ns = _now_ns()

    def set_times(self, input_ready_ns: int, output_ready_ns: int) -> None:
        """See `ExecutionBatch.set_times`."""
        self._input_ready_ns = input_ready_ns
        self._output_ready_ns = output_ready_ns

    def send(
        self, request: InferenceRequest, response: InferenceResponse | None, final: bool = True
    ) -> None:
        """See `ExecutionBatch.send`."""
        self._deliver(request, response, final)

    def keep_open(self, request: InferenceRequest) -> None:
        """See `ExecutionBatch.keep_open`."""
        if self._kept_open is None:
            self._kept_open = set()
        self._kept_open.add(id(request))

    def reschedule(self, request: InferenceRequest) -> None:
        """See `ExecutionBatch.reschedule`."""
        take_back = request.on_reschedule
        if take_back is None:
            error = InvalidArgumentError(_NOT_ITERATIVE)
            self._deliver(request, InferenceResponse.from_error(error), True)
            return
        if self._rescheduled is None:
            self._rescheduled = set()
        self._rescheduled.add(id(request))
        take_back(request)

    def _deliver(
        self, request: InferenceRequest, response: InferenceResponse | None, final: bool
    ) -> None:
        if request.finished:
            return
        if response is not None:
            owner = self.instance
            response.model_name = owner.model_name
            response.model_version = owner.model_version
            if response.outputs:
                owner.pool.finish_outputs(response)
        index, ready_ns = request.response_count, _now_ns()
        if final and request.parent is not None:
            request.compute_ns = self._compute_ns(ready_ns)
        request.deliver(response, final)
        if self.instance.decoupled and not request.filler:
            self._count_response(request, response, index, ready_ns)
        if index == 0 and response is not None and self.instance.statistics.detail is not None:
            first_ns = ready_ns - request.start_ns
            self.instance.statistics.detail.observe_first_response(first_ns)
        # Only now: a layer on the way may have made it an error (a state of the wrong shape).
        if response is not None and response.error is not None:
            if self._failed is None:
                self._failed = set()
            self._failed.add(id(request))
        if final:
            if self._is_done:
                self._count(request)
            else:
                self._finished.append(request)

    def done(self, error: NpuserveError | None = None) -> None:
        """See `ExecutionBatch.done`."""
        if self._is_done:
            return
        now = _now_ns()
        if len(self._finished) < len(self.requests):
            self._end_unanswered(error)
        self._times = self._compute_ns(now)
        self._is_done = True
        self.instance.statistics.execution(self.batch_size, *self._times)
        for request in self.requests:
            if request.trace is not None:
                input_ready = self._input_ready_ns or self.start_ns
                output_ready = self._output_ready_ns or now
                request.trace.executed(request, self.start_ns, input_ready, output_ready, now)
        for request in self._finished:
            self._count(request)
        self._finished = []
        self._free()

    def execution_over(self) -> None:
        """See `ExecutionBatch.execution_over`."""
        if self.instance.pool.frees_early:
            self._free()

    def _free(self) -> None:
        if not self._freed:
            self._freed = True
            self.instance.finished(self)

    def _compute_ns(self, end_ns: int) -> tuple[int, int, int]:
        """Durations of compute_input, compute_infer and compute_output, if it ends then."""
        input_ready = self._input_ready_ns or self.start_ns
        output_ready = self._output_ready_ns or end_ns
        return (
            max(0, input_ready - self.start_ns),
            max(0, output_ready - input_ready),
            max(0, end_ns - output_ready),
        )

    def _end_unanswered(self, error: NpuserveError | None) -> None:
        owner = self.instance
        if error is None:
            if owner.decoupled:
                return  # the model goes on answering through its senders
            error = InternalError(
                f"model instance '{owner.name}' returned without a response to the request"
            )
            kept_open = self._kept_open or ()
        else:
            kept_open = ()
        rescheduled = self._rescheduled or ()
        for request in self.requests:
            if id(request) in kept_open or id(request) in rescheduled:
                continue
            if not request.finished:
                self._deliver(request, InferenceResponse.from_error(error), True)

    def _count_response(
        self,
        request: InferenceRequest,
        response: InferenceResponse | None,
        index: int,
        ready_ns: int,
    ) -> None:
        """Count one response of a decoupled model, or an end without one."""
        if self._response_ns is None:
            self._response_ns = {}
        statistics, now = self.instance.statistics, _now_ns()
        infer_ns = ready_ns - self._response_ns.get(id(request), self.start_ns)
        self._response_ns[id(request)] = now
        if response is None:
            statistics.end_without_response(index, infer_ns, request.cancelled)
        else:
            statistics.response(index, infer_ns, now - ready_ns, response.error is not None)

    def _count(self, request: InferenceRequest) -> None:
        if request.filler:
            return
        statistics = self.instance.statistics
        total_ns = _now_ns() - request.start_ns
        if self._failed is not None and id(request) in self._failed:
            reason = FailureReason.CANCELED if request.cancelled else FailureReason.BACKEND
            statistics.request_failure(reason, total_ns)
        else:
            queue_ns = max(0, self.start_ns - request.queue_ns)
            statistics.request_success(request.batch_size, total_ns, queue_ns, *self._times)


class ThreadBatch(Batch):
    """The batch of a blocking instance: `send` may be called from any thread.

    While `execute` runs, the answers of a model that is not decoupled are kept and handed to the
    loop together with the end of the execution: one wake-up a batch, not one a request.
    """

    __slots__ = ("outbox",)

    def __init__(
        self, instance: Instance, requests: Sequence[InferenceRequest], batch_size: int
    ) -> None:
        super().__init__(instance, requests, batch_size)
        # Touched by the instance's thread only, and only while it executes this batch.
        self.outbox: list[tuple[InferenceRequest, InferenceResponse | None, bool]] | None = (
            None if instance.decoupled else []
        )

    def send(
        self, request: InferenceRequest, response: InferenceResponse | None, final: bool = True
    ) -> None:
        """See `ExecutionBatch.send`."""
        outbox = self.outbox
        if outbox is not None and threading.get_ident() == self.instance.thread_id:
            outbox.append((request, response, final))
        else:
            self.instance.wait_for_readers()
            self.instance.post(self._deliver, request, response, final)

    def reschedule(self, request: InferenceRequest) -> None:
        """See `ExecutionBatch.reschedule`; from any thread."""
        self.instance.post(super().reschedule, request)

    def complete(
        self,
        outbox: list[tuple[InferenceRequest, InferenceResponse | None, bool]] | None,
        error: NpuserveError | None,
    ) -> None:
        """Loop thread: deliver what `execute` left, then end the batch."""
        self.execution_over()
        for request, response, final in outbox or ():
            self._deliver(request, response, final)
        self.done(error)


class Instance:
    """One instance of a model version, as its scheduler sees it.

    Attributes:
        name, index, placement: see `Placement`.
        card: number of the NPU card it runs on, -1 for none.
        inflight: batches it holds now.
        thread_id: identity of its thread, 0 for a `LoopInstance`.
    """

    def __init__(
        self,
        placement: Placement,
        backend_instance: ModelInstance | LoopInstance,
        pool: InstancePool,
    ) -> None:
        self.placement = placement
        self.card = placement.device_id if placement.kind == "GPU" else -1
        self.name = placement.name
        self.index = placement.index
        self.backend_instance = backend_instance
        self.pool = pool
        self.model_name = pool.model_name
        self.model_version = pool.model_version
        self.decoupled = pool.decoupled
        self.statistics = pool.statistics
        self.max_inflight = backend_instance.max_inflight
        self.inflight = 0
        self.thread_id = 0
        self.resources: Any = None  # what the rate limiter lent to the running batch
        self._loop = pool.loop
        self._mailbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._mail_announced = False
        self._held = 0  # requests whose reader is behind
        self._go_on = threading.Event()
        self._go_on.set()
        self._loop_thread_id = threading.get_ident()

    @property
    def available(self) -> bool:
        """False while its worker is being restarted."""
        instance = self.backend_instance
        return instance.available if isinstance(instance, LoopInstance) else True

    @property
    def is_free(self) -> bool:
        """Whether it can take one more batch now."""
        return self.inflight < self.max_inflight and self.available

    async def initialize(self) -> None:
        """Start it; an error of the backend's `initialize` is raised here."""
        raise NotImplementedError

    def run(self, requests: Sequence[InferenceRequest], batch_size: int) -> None:
        """Execute one batch. Loop thread; the instance must be free.

        From here every request is answered by the instance, also when the backend fails.
        """
        raise NotImplementedError

    async def finalize(self) -> None:
        """Stop it; the caller has waited until nothing is in flight."""
        raise NotImplementedError

    def _begin(self, requests: Sequence[InferenceRequest], start_ns: int) -> None:
        self.inflight += 1
        self.pool.card_load[self.card] += 1
        pending = 0
        for request in requests:
            request.compute_start_ns = start_ns
            request.on_cancel = None
            if request.trace is not None:
                request.trace.begin_execution(request)
            if not request.filler:
                pending += 1
            if self.decoupled:
                request.on_hold = self._hold
                if request.held:
                    self._hold(True)
        self.statistics.pending -= pending

    def _hold(self, held: bool) -> None:
        """A reader fell behind or caught up: the whole instance waits, as in Triton."""
        before = self._held
        self._held += 1 if held else -1
        if bool(before) != bool(self._held):
            self._set_held(held)

    def _set_held(self, held: bool) -> None:
        if held:
            self._go_on.clear()
        else:
            self._go_on.set()

    def wait_for_readers(self) -> None:
        """Block a model's thread while responses are held back; never the loop's."""
        if not self._go_on.is_set() and threading.get_ident() != self._loop_thread_id:
            self._go_on.wait()

    def finished(self, batch: Batch) -> None:
        """Called by a batch at its end: the instance can take another one."""
        self.inflight -= 1
        self.pool.card_load[self.card] -= 1
        self.pool.released(self)

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Call `function(*args)` on the loop's thread, in the order posted; from any thread."""
        self._mailbox.append((function, args))
        if not self._mail_announced:
            self._mail_announced = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._open_mailbox)

    def _open_mailbox(self) -> None:
        self._mail_announced = False
        mailbox = self._mailbox
        while mailbox:
            function, args = mailbox.popleft()
            function(*args)


class LoopDrivenInstance(Instance):
    """Instance over a `LoopInstance`."""

    backend_instance: LoopInstance

    async def initialize(self) -> None:
        """See `Instance.initialize`."""
        self.backend_instance.on_available_change = self._available_changed
        await self.backend_instance.initialize()
        # Only now a worker knows whether the model overlaps its batches (`async def execute`).
        self.max_inflight = self.backend_instance.max_inflight

    def run(self, requests: Sequence[InferenceRequest], batch_size: int) -> None:
        """See `Instance.run`."""
        batch = Batch(self, requests, batch_size)
        self._begin(requests, batch.start_ns)
        try:
            self.backend_instance.start(batch)
        except Exception as error:
            logger.exception("model instance %s could not start a batch", self.name)
            batch.done(_as_npuserve_error(error))

    async def finalize(self) -> None:
        """See `Instance.finalize`."""
        await self.backend_instance.finalize()

    def _available_changed(self) -> None:
        self.pool.availability_changed(self)

    def _set_held(self, held: bool) -> None:
        self.backend_instance.hold(held)


class ThreadInstance(Instance):
    """Instance over a blocking `ModelInstance`, which lives in a thread of its own."""

    backend_instance: ModelInstance

    def __init__(
        self,
        placement: Placement,
        backend_instance: ModelInstance,
        pool: InstancePool,
    ) -> None:
        super().__init__(placement, backend_instance, pool)
        self._jobs: queue.SimpleQueue[ThreadBatch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None

    async def initialize(self) -> None:
        """See `Instance.initialize`."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._ended = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._serve, args=(ready,), name=f"instance-{self.name}", daemon=True
        )
        self._thread.start()
        await ready

    def run(self, requests: Sequence[InferenceRequest], batch_size: int) -> None:
        """See `Instance.run`."""
        batch = ThreadBatch(self, requests, batch_size)
        self._begin(requests, batch.start_ns)
        self._jobs.put(batch)

    async def finalize(self) -> None:
        """See `Instance.finalize`."""
        if self._ended is None:
            return
        self._jobs.put(None)
        await asyncio.shield(self._ended)
        if self._thread is not None:
            self._thread.join()  # at its very end: nothing in it can block any more

    def _serve(self, ready: asyncio.Future[None]) -> None:
        self.thread_id = threading.get_ident()
        instance = self.backend_instance
        try:
            instance.initialize()
        except BaseException as error:  # a model may raise SystemExit; the load must fail then
            self._finalize_quietly()
            self.post(_resolve, ready, _as_npuserve_error(error))
        else:
            self.post(_resolve, ready, None)
            if isinstance(instance, PipelinedInstance):
                self._execute_pipelined(instance)
            else:
                while (batch := self._jobs.get()) is not None:
                    self._end(batch, self._attempt(instance.execute, batch))
                    del batch
            self._finalize_quietly()
        assert self._ended is not None
        self.post(_resolve, self._ended, None)

    def _execute_pipelined(self, instance: PipelinedInstance) -> None:
        submitted: deque[ThreadBatch] = deque()
        stopping = False
        while submitted or not stopping:
            has_room = not stopping and len(submitted) < instance.pipeline_depth
            if has_room and not (submitted and self._jobs.empty()):
                batch = self._jobs.get()
                if batch is None:
                    stopping = True
                elif error := self._attempt(instance.submit, batch):
                    self._end(batch, error)
                else:
                    submitted.append(batch)
            else:
                batch = submitted.popleft()
                self._end(batch, self._attempt(instance.collect, batch))
            del batch

    def _attempt(
        self, step: Callable[[ThreadBatch], None], batch: ThreadBatch
    ) -> NpuserveError | None:
        try:
            step(batch)
        except BaseException as raised:  # whatever a model raises must not end the instance
            if not isinstance(raised, NpuserveError):
                logger.error("model instance %s failed", self.name, exc_info=raised)
            return _as_npuserve_error(raised)
        return None

    def _end(self, batch: ThreadBatch, error: NpuserveError | None) -> None:
        outbox, batch.outbox = batch.outbox, None
        self.post(batch.complete, outbox, error)

    def _finalize_quietly(self) -> None:
        try:
            self.backend_instance.finalize()
        except BaseException:  # reported; an unload goes on
            logger.exception("finalize of model instance %s failed", self.name)


class InstancePool:
    """The instances of one model version, and who is free.

    A scheduler sets `on_free`; it is called with the instance whenever one can take a batch again.

    Args:
        statistics: of the model version.
        decoupled: whether requests may have any number of responses.
    """

    def __init__(
        self,
        model_name: str,
        model_version: int,
        loop: asyncio.AbstractEventLoop,
        statistics: ModelStatistics,
        decoupled: bool,
    ) -> None:
        self.model_name = model_name
        self.model_version = str(model_version)
        self.loop = loop
        self.statistics = statistics
        self.decoupled = decoupled
        self.instances: list[Instance] = []
        self.on_free: Callable[[Instance], None] | None = None
        self.on_availability: Callable[[], None] | None = None
        # The instance died and with it whatever its model remembered.
        self.on_lost: Callable[[Instance], None] | None = None
        # Names a response may carry; None lets everything through. Triton drops others silently.
        self.output_names: frozenset[str] | None = None
        self.reshape_outputs: Callable[[InferenceResponse], None] | None = None
        # Asked before an instance gets a batch, told afterwards (server/rate_limiter.py).
        self.rate_limiter: Any = None
        # The scheduler may start the next batch before the answers of the last one are out, so
        # that the device does not wait for them. Not where the next one needs what they carry.
        self.frees_early = False
        # Batches in flight by card, of all models if they share the counter; CPU is card -1.
        self.card_load: Counter[int] = Counter()
        self._next = 0
        self._idle: asyncio.Event | None = None

    def add(self, placement: Placement, instance: ModelInstance | LoopInstance) -> Instance:
        """Take in an instance that a backend made; it still has to be initialised."""
        wrapper: Instance
        if isinstance(instance, LoopInstance):
            wrapper = LoopDrivenInstance(placement, instance, self)
        else:
            wrapper = ThreadInstance(placement, instance, self)
        self.instances.append(wrapper)
        return wrapper

    def finish_outputs(self, response: InferenceResponse) -> None:
        """Drop outputs the configuration does not name and undo `reshape`, in place."""
        names = self.output_names
        if names is not None:
            for tensor in response.outputs:
                if tensor.name not in names:
                    response.outputs = [t for t in response.outputs if t.name in names]
                    break
        if self.reshape_outputs is not None:
            self.reshape_outputs(response)

    @property
    def inflight(self) -> int:
        """Batches being executed."""
        return sum(instance.inflight for instance in self.instances)

    @property
    def healthy(self) -> bool:
        """Whether any instance is able to take batches at all."""
        return any(instance.available for instance in self.instances)

    def acquire(self) -> Instance | None:
        """A free instance or None: the least loaded, then on the least loaded card, then in turn.

        With a rate limiter the instance has got its resources; it must be `run` at once.
        """
        instances = self.instances
        if len(instances) == 1:
            best = instances[0] if instances[0].is_free else None
        else:
            best = None
            least = (0, 0)
            count = len(instances)
            for step in range(count):
                candidate = instances[(self._next + step) % count]
                if candidate.placement.passive or not candidate.is_free:
                    continue
                load = (candidate.inflight, self.card_load[candidate.card])
                if best is None or load < least:
                    best, least = candidate, load
            if best is not None:
                self._next = (best.index + 1) % count
        if best is None or self.rate_limiter is None:
            return best
        granted: Instance | None = self.rate_limiter.acquire(self, best)
        return granted

    def released(self, instance: Instance) -> None:
        """An instance ended a batch."""
        if self.rate_limiter is not None:
            self.rate_limiter.release(instance)
        if self._idle is not None and not self.inflight:
            self._idle.set()
        if self.on_free is not None:
            self.on_free(instance)

    def availability_changed(self, instance: Instance) -> None:
        """The worker of an instance died or came back."""
        if self.on_lost is not None and not instance.available:
            self.on_lost(instance)
        if self.on_availability is not None:
            self.on_availability()
        if instance.is_free and self.on_free is not None:
            self.on_free(instance)

    async def wait_idle(self) -> None:
        """Return once no batch is in flight."""
        if self.inflight:
            self._idle = asyncio.Event()
            await self._idle.wait()
            self._idle = None

    async def initialize(self) -> None:
        """Start all instances side by side; the first error is raised after all have answered."""
        results = await asyncio.gather(
            *(instance.initialize() for instance in self.instances), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def finalize(self) -> None:
        """Stop all instances side by side; a failure of one is logged."""
        results = await asyncio.gather(
            *(instance.finalize() for instance in self.instances), return_exceptions=True
        )
        for instance, result in zip(self.instances, results, strict=True):
            if isinstance(result, BaseException):
                logger.error("stopping instance %s failed", instance.name, exc_info=result)


def reject(
    request: InferenceRequest,
    error: NpuserveError,
    statistics: ModelStatistics,
    reason: FailureReason | None = None,
) -> None:
    """Answer a queued request that will not be executed, and count it as a failure."""
    if request.finished:
        return
    if reason is None:
        cancelled = isinstance(error, RequestCancelledError)
        reason = FailureReason.CANCELED if cancelled else FailureReason.REJECTED
    statistics.pending -= 1
    statistics.request_failure(reason, _now_ns() - request.start_ns)
    request.deliver(InferenceResponse.from_error(error), True)


def _resolve(future: asyncio.Future[None], error: NpuserveError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _as_npuserve_error(error: BaseException) -> NpuserveError:
    if isinstance(error, NpuserveError):
        return error
    return InternalError(f"{type(error).__name__}: {error}")
