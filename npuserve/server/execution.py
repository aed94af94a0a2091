"""One batch in execution: its answers go to the requests, its times into the statistics.

Step 9 of the walk. `Batch` is the `ExecutionBatch` that a backend answers through. Knows no wire
format, no queue and no thread but its instance's.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from npuserve.errors import (
    InternalError,
    InvalidArgumentError,
    NpuserveError,
    RequestCancelledError,
    StatusCode,
    WorkerDiedError,
)
from npuserve.response import InferenceResponse
from npuserve.server.statistics import FailureReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from npuserve.request import InferenceRequest
    from npuserve.server.instance import Instance, ThreadInstance
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
        "_early", "_failed", "_finished", "_freed", "_input_ready_ns", "_is_done", "_kept_open",
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
        self._early = not instance.is_free  # given to it before it was free
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

    def flush(self) -> None:
        """See `ExecutionBatch.flush`: nothing is kept."""

    def keep_open(self, request: InferenceRequest) -> None:
        """See `ExecutionBatch.keep_open`."""
        if self._kept_open is None:
            self._kept_open = set()
        self._kept_open.add(id(request))

    def reschedule(self, request: InferenceRequest) -> None:
        """See `ExecutionBatch.reschedule`."""
        if request.finished:  # answered for the last time: nothing is left to execute
            return
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
        instance = self.instance
        if response is not None:
            response.model_name = instance.model_name
            response.model_version = instance.model_version
            if response.outputs:
                instance.pool.finish_outputs(response)
        if final and request.parent is not None:
            request.compute_ns = self._compute_ns(_now_ns())
        if instance.decoupled:
            self._deliver_and_count(request, response, final)
        else:
            request.deliver(response, final)
        # Only now: a layer on the way may have made it an error (a state of the wrong shape).
        if response is not None and response.error is not None:
            if self._failed is None:
                self._failed = set()
            self._failed.add(id(request))
        if final:
            if self._is_done:
                self._count((request,))
            else:
                self._finished.append(request)

    def _deliver_and_count(
        self, request: InferenceRequest, response: InferenceResponse | None, final: bool
    ) -> None:
        """Deliver, and count the response by its index and time."""
        index, ready_ns = request.response_count, _now_ns()
        request.deliver(response, final)
        if not request.filler:
            self._count_response(request, response, index, ready_ns)

    def done(self, error: NpuserveError | None = None) -> None:
        """See `ExecutionBatch.done`."""
        if self._is_done:
            return
        now = _now_ns()
        # Nobody else may hear of it: the model may have ended all requests before it failed. The
        # death of a worker is in the log already.
        if (
            error is not None
            and error.code is StatusCode.INTERNAL
            and not isinstance(error, WorkerDiedError)
        ):
            logger.error("execution by '%s' failed: %s", self.instance.name, error)
        if len(self._finished) < len(self.requests):
            self._end_unanswered(error)
        self._times = self._compute_ns(now)
        self._is_done = True
        self.instance.counters.execution(self.batch_size, *self._times)
        for request in self.requests:
            if request.trace is not None:
                input_ready = self._input_ready_ns or self.start_ns
                output_ready = self._output_ready_ns or now
                request.trace.executed(request, self.start_ns, input_ready, output_ready, now)
        self._count(self._finished)
        self._finished = []
        self._free()

    def execution_over(self) -> None:
        """See `ExecutionBatch.execution_over`."""
        # With nothing queued the answers come first: nobody waits for the instance.
        if self.instance.pool.frees_early and self.instance.statistics.pending:
            self._free()

    def _free(self) -> None:
        if not self._freed:
            self._freed = True
            instance = self.instance
            if self._early:  # it did not start before the one in front of it ended
                self.start_ns = max(self.start_ns, instance.ended_ns)
            now = instance.ended_ns = _now_ns()
            instance.execution_ns = max(now - self.start_ns, instance.execution_ns * 7 // 8)
            instance.finished(self)

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

    def _count(self, requests: Iterable[InferenceRequest]) -> None:
        """Count final requests; their execution is over."""
        counters, failed, now = self.instance.counters, self._failed, _now_ns()
        count = elements = total_ns = queue_ns = 0
        for request in requests:
            if request.filler:
                continue
            if failed is not None and id(request) in failed:
                reason = FailureReason.CANCELED if request.cancelled else FailureReason.BACKEND
                counters.request_failure(reason, now - request.start_ns)
                continue
            request_ns = now - request.start_ns
            waited_ns = max(0, self.start_ns - request.queue_ns)
            count += 1
            elements += request.batch_size or 1
            total_ns += request_ns
            queue_ns += waited_ns
            if counters.summaries is not None:
                counters.observe(request_ns, waited_ns, self._times)
        if count:
            counters.requests_succeeded(count, elements, total_ns, queue_ns, self._times)


class ThreadBatch(Batch):
    """The batch of a blocking instance: `send` may be called from any thread.

    While `execute` runs, the answers of a model that is not decoupled are kept and handed to the
    loop together with the end of the execution: one wake-up a batch, not one a request.
    """

    __slots__ = ("_mailbox", "outbox")

    def __init__(
        self, instance: ThreadInstance, requests: Sequence[InferenceRequest], batch_size: int
    ) -> None:
        super().__init__(instance, requests, batch_size)
        self._mailbox = instance.pool.mailbox
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
            self._mailbox.post(self._deliver, request, response, final)

    def flush(self) -> None:
        """See `ExecutionBatch.flush`."""
        outbox = self.outbox
        if outbox and threading.get_ident() == self.instance.thread_id:
            self.outbox = []
            for answer in outbox:
                self._mailbox.post(self._deliver, *answer)

    def reschedule(self, request: InferenceRequest) -> None:
        """See `ExecutionBatch.reschedule`."""
        self.flush()
        self._mailbox.post(super().reschedule, request)

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
    statistics.own.request_failure(reason, _now_ns() - request.start_ns)
    request.deliver(InferenceResponse.from_error(error), True)
