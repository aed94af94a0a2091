"""A model instance at work: takes one batch at a time and executes it off the loop.

Step 8 of the walk. `Instance` wraps the object a backend made, in its own thread or driven on the
loop. Who is free is the pool's matter (instance_pool.py), what becomes of the answers the
batch's (execution.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from npuserve.backends.base import LoopInstance, ModelInstance, PipelinedInstance, Placement, settle
from npuserve.errors import (
    NpuserveError,
    as_npuserve_error,
)
from npuserve.server.execution import Batch, ThreadBatch
from npuserve.server.handover import JobQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from npuserve.request import InferenceRequest
    from npuserve.server.instance_pool import InstancePool

logger = logging.getLogger(__name__)


class Instance:
    """One instance of a model version, as its scheduler sees it.

    Attributes:
        name, index, placement: see `Placement`.
        card: number of the NPU card it runs on, -1 for none.
        counters: where its executions are counted; `statistics` are of the whole model version.
        inflight: batches it holds now.
        thread_id: identity of its thread, 0 for a `LoopInstance`.
        executions: batches it has been given so far.
        requests: requests in them.
        lone_executions: of these, single requests that found it idle.
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
        backend_instance.mailbox = pool.mailbox
        self.pool = pool
        self.model_name = pool.model_name
        self.model_version = pool.model_version
        self.decoupled = pool.decoupled
        self.statistics = pool.statistics
        self.counters = pool.statistics.device(placement.card_name)
        self.max_inflight = backend_instance.max_inflight
        self.inflight = 0
        self.executions = 0
        self.requests = 0
        self.lone_executions = 0
        self.ended_ns = 0  # when the last batch ended
        self.execution_ns = 0  # what the last ones took, the longest of them for the longest time
        self.thread_id = 0
        self._loop = pool.loop
        self._held = 0  # requests whose reader is behind
        self._go_on = threading.Event()
        self._go_on.set()
        self._loop_thread_id = threading.get_ident()

    @property
    def overlaps(self) -> bool:
        """Whether the loop can do something while it executes: it is not kept by the GIL."""
        return True

    @property
    def native_thread_id(self) -> int:
        """The kernel's id of the thread, or of the process, that executes; 0 for none."""
        raise NotImplementedError

    def core_shared(self, shared: bool) -> None:
        """Told when it begins and ends to be kept on the loop's core (core_sharing.py)."""

    @property
    def available(self) -> bool:
        """False while its worker is being restarted."""
        instance = self.backend_instance
        return instance.available if isinstance(instance, LoopInstance) else True

    @property
    def is_free(self) -> bool:
        """Whether it can take one more batch now."""
        return self.inflight < self.max_inflight and self.available

    @property
    def takes_next(self) -> bool:
        """Whether it is busy, and may be given its next batch already."""
        early = self.backend_instance.prefetches and self.inflight == self.max_inflight
        return early and self.available

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
        self.executions += 1
        self.requests += len(requests)
        if self.inflight == len(requests) == 1 and requests[0].queue_ns >= self.ended_ns:
            self.lone_executions += 1
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


class LoopDrivenInstance(Instance):
    """Instance over a `LoopInstance`."""

    backend_instance: LoopInstance

    @property
    def native_thread_id(self) -> int:
        """See `Instance.native_thread_id`."""
        return self.backend_instance.native_thread_id

    def core_shared(self, shared: bool) -> None:
        """See `Instance.core_shared`."""
        self.backend_instance.shares_core = shared

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
            batch.done(as_npuserve_error(error))

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
        self._native_id = 0
        self._jobs: JobQueue[ThreadBatch | None]
        self._mailbox = pool.mailbox
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None

    @property
    def overlaps(self) -> bool:
        """See `Instance.overlaps`."""
        return not self.backend_instance.holds_gil

    @property
    def native_thread_id(self) -> int:
        """See `Instance.native_thread_id`."""
        return self._native_id

    async def initialize(self) -> None:
        """See `Instance.initialize`."""
        self._jobs = JobQueue()
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
        self._jobs.close()

    def _serve(self, ready: asyncio.Future[None]) -> None:
        self.thread_id = threading.get_ident()
        self._native_id = threading.get_native_id()
        instance = self.backend_instance
        if self.placement.cpu_cores:
            os.sched_setaffinity(0, self.placement.cpu_cores)  # of this thread alone
        try:
            instance.initialize()
        except BaseException as error:  # a model may raise SystemExit; the load must fail then
            self._finalize_quietly()
            self._mailbox.post(settle, ready, as_npuserve_error(error))
        else:
            self._mailbox.post(settle, ready, None)
            if isinstance(instance, PipelinedInstance):
                self._execute_pipelined(instance)
            else:
                while (batch := self._jobs.get()) is not None:
                    self._end(batch, self._attempt(instance.execute, batch))
                    del batch
            self._finalize_quietly()
        assert self._ended is not None
        self._mailbox.post(settle, self._ended, None)

    def _execute_pipelined(self, instance: PipelinedInstance) -> None:
        submitted: deque[ThreadBatch] = deque()
        stopping = False
        while submitted or not stopping:
            has_room = not stopping and len(submitted) < instance.pipeline_depth
            if has_room and not (submitted and self._jobs.empty):
                batch = self._jobs.get()
                if batch is None:
                    stopping = True
                    continue
                batch.start_ns = time.monotonic_ns()  # until now it was only waiting here
                if error := self._attempt(instance.submit, batch):
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
            return as_npuserve_error(raised)
        return None

    def _end(self, batch: ThreadBatch, error: NpuserveError | None) -> None:
        outbox, batch.outbox = batch.outbox, None
        self._mailbox.post(batch.complete, outbox, error)

    def _finalize_quietly(self) -> None:
        try:
            self.backend_instance.finalize()
        except BaseException:  # reported; an unload goes on
            logger.exception("finalize of model instance %s failed", self.name)
