"""The dynamic batcher: queue, timer and wake-ups around `batching.plan_batch`.

Step 6 of the walk. A batch is formed when an instance is free, from what is queued then, so load
makes batches larger by itself. Requests that are read in one iteration of the event loop are
planned together: `enqueue` only asks for one look at the queue after everything that runs now.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from npuserve.clock import Appointment
from npuserve.errors import UnavailableError
from npuserve.server.batch_strategy import load_strategy
from npuserve.server.batching import BatchRules, Plan, plan_batch
from npuserve.server.execution import reject
from npuserve.server.fair_share import FairShare
from npuserve.server.gathering import Gathering
from npuserve.server.queue import PriorityQueue
from npuserve.server.regrouping import NEVER, Regrouping
from npuserve.server.response_order import ResponseOrder
from npuserve.server.schedulers.queued import QueuedScheduler
from npuserve.server.statistics import FailureReason

if TYPE_CHECKING:
    from npuserve.request import InferenceRequest
    from npuserve.server.instance import Instance
    from npuserve.server.schedulers.base import SchedulerContext

_SHORT_EXECUTION_NS = 30_000_000


class DynamicBatcher(QueuedScheduler):
    """Scheduler of a model with `dynamic_batching`; making one reads its hooks, if any.

    Raises:
        InvalidArgumentError: the hooks of custom batching cannot be used.
    """

    _queue: PriorityQueue

    def __init__(self, context: SchedulerContext) -> None:
        settings = context.config.dynamic_batching
        self._order = ResponseOrder() if settings.preserve_ordering else None
        super().__init__(context, PriorityQueue.from_config(settings), self._order)
        self._clock = context.clock
        self._rules = replace(
            BatchRules.from_config(context.config),
            strategy=load_strategy(context.config, context.model_dir, context.version),
        )
        self._regrouping = Regrouping()
        self._gathering = Gathering()
        # Sizes that were asked for are kept to; without any, the configuration has the maximum.
        adapts = self._rules.delay_ns and self._rules.min_preferred == self._rules.max_batch
        self._fair_share = (
            FairShare(self._rules.max_batch, self._rules.delay_ns)
            if adapts and not self._rules.strategy
            else None
        )
        self._executing = 0  # batch elements
        self._dispatch_due = False  # `_dispatch` is on its way
        self._dispatching = False
        # All instances were busy at the last look: only a freed one makes another look useful,
        # or `_enough` batch elements.
        self._blocked = False
        self._grow = False  # see plan_batch
        # While the queue waits, batch elements below which an arrival changes nothing; 0 while
        # every arrival counts.
        self._enough = 0
        self._wake_up = Appointment(self._clock, self._on_timer)
        # (start, batch elements) of the batches in each instance, by its index, oldest first,
        # and when the last one ended.
        self._running: dict[int, deque[tuple[int, int]]] = {}
        self._ended_ns: dict[int, int] = {}
        context.instances.on_free = self._instance_free

    def _queue_up(self, request: InferenceRequest) -> None:
        queue, regrouping = self._queue, self._regrouping
        if request.for_model is not None:  # it may become part of any batch
            queue.handed_over_early = False
        try:
            deadline_ns = queue.push(request, request.queue_ns)
        except UnavailableError:
            # Differs from Triton: a request refused by a full queue is counted as a failure, so
            # that an overloaded model is seen in the metrics.
            self._statistics.own.request_failure(
                FailureReason.REJECTED, self._clock.now_ns() - request.start_ns
            )
            raise
        request.on_cancel = self._on_cancel
        if self._order is not None:
            self._order.add(request)
        if deadline_ns:
            self._wake_up.by(deadline_ns)
        if self._rules.delay_ns:
            self._gathering.arrived(queue.elements + self._executing)
        callers_are_back = queue.entered >= regrouping.target
        if callers_are_back:
            regrouping.returned(request.queue_ns)
        if queue.elements < self._enough and (self._blocked or not callers_are_back):
            return
        if not self._dispatch_due:
            self._dispatch_due = True
            self._clock.call_soon(self._dispatch)

    def stop(self) -> None:
        """See `Scheduler.stop`. Nobody can join any more, so nothing waits for a delay."""
        super().stop()
        self._fair_share = None
        self._rules = replace(self._rules, delay_ns=0)
        self._dispatch()

    def close(self) -> None:
        """See `Scheduler.close`."""
        self._wake_up.cancel()
        if self._rules.strategy is not None:
            self._rules.strategy.close()

    # ---------------------------------------------------------------- starting batches

    def _dispatch(self) -> None:
        self._dispatch_due = False
        if self._dispatching:  # an instance that answers at once; the loop below goes on
            return
        self._dispatching = True
        try:
            while self._start_batch():
                pass
        finally:
            self._dispatching = False

    def _start_batch(self) -> bool:
        """Start one batch if there is one and an instance for it."""
        queue, instances = self._queue, self._instances
        now_ns = self._clock.now_ns()
        self._enough, self._blocked = 0, False
        if queue.timed:
            self._reject_expired(now_ns)
        if not queue.live:
            return False
        # A rate limiter lends its resources for an immediate run, so it is asked last.
        limited = instances.rate_limiter is not None
        instance = None if limited else instances.acquire()
        if instance is None and not limited:
            instance = self._next_in_line()
            if instance is None:
                return self._block()
        plan = plan_batch(queue, now_ns, self._rules, self._grow)
        if not plan.count and queue.elements >= self._gathering.complete_at:
            plan = plan_batch(queue, NEVER, self._rules)  # as if the delay were over
        if not plan.count:
            self._grow = False  # nothing was due when the instance became free
            return self._wait(plan.wait_until_ns)
        if self._is_held(plan, now_ns):
            return self._wait(self._regrouping.hold_until_ns)
        fair_share = self._fair_share
        if fair_share is not None and fair_share.gathering:
            callers, execution_ns = self._gathering.complete_at, self._regrouping.mean_execution_ns
            if fair_share.gathers(now_ns, queue.elements, callers, execution_ns):
                return self._wait(fair_share.gather_until_ns)
        if limited:
            instance = instances.acquire()
        if instance is None:
            return self._block()
        if instance.inflight and not (limited or self._may_leave_early(plan)):
            return self._wait(0) if instance.is_free else self._block(self._rules.max_batch)
        self._grow = False
        self._run(instance, plan, now_ns)
        return True

    def _run(self, instance: Instance, plan: Plan, now_ns: int) -> None:
        running = self._running.get(instance.index)
        if running is None:
            running = self._running[instance.index] = deque()
        running.append((now_ns, plan.batch_size))
        if self._fair_share is not None:
            self._share_out(self._fair_share, now_ns, plan.batch_size)
        self._executing += plan.batch_size
        self._gathering.started()
        instance.run(self._queue.take(plan.count), plan.batch_size)

    def _is_held(self, plan: Plan, now_ns: int) -> bool:
        """Whether to give the callers who were just answered a moment to join."""
        regrouping = self._regrouping
        if plan.full or now_ns >= regrouping.hold_until_ns:
            return False
        if self._rules.delay_ns or self._stopping:
            return False
        return self._queue.entered < regrouping.target

    def _share_out(self, fair_share: FairShare, now_ns: int, batch_size: int) -> None:
        """Set the size at which a batch is complete."""
        queued, callers = self._queue.elements, self._gathering.complete_at
        instances = self._instances.active
        complete = fair_share.started(now_ns, batch_size, queued, callers, instances)
        if complete != self._rules.max_preferred:
            self._rules = self._rules.preferring(complete)

    def _next_in_line(self) -> Instance | None:
        """A busy instance that takes its next batch early, where that is worth it.

        # Differs from Triton: only for short executions. Between two of them lie a way to the
        # event loop and back, 0.1 ms or more, which is nothing to a long one; and a request that
        # has left the queue can no longer be cancelled or overtaken. Of the very short ones
        # nothing is known (`Regrouping.executed`).
        """
        if not 0 < self._regrouping.mean_execution_ns < _SHORT_EXECUTION_NS:
            return None
        return self._instances.next_in_line() if self._queue.handed_over_early else None

    def _may_leave_early(self, plan: Plan) -> bool:
        """Whether to give this batch to an instance that is still executing another one.

        A partial batch gains less by overlapping than by what may still join it.
        """
        complete = plan.batch_size == self._rules.max_batch or not self._rules.delay_ns
        return plan.full and complete and self._queue.handed_over_early

    def _block(self, enough: int = NEVER) -> bool:
        """Start nothing before an instance is free or so many batch elements wait."""
        self._blocked, self._enough = True, enough
        self._wake_for_deadline()
        return False

    def _wait(self, until_ns: int) -> bool:
        """Start nothing now, but by `until_ns` (0: not before something happens)."""
        if self._rules.signature is None and self._rules.strategy is None:
            self._enough = min(self._rules.min_preferred, self._gathering.complete_at)
        self._wake_up.by(until_ns)
        self._wake_for_deadline()
        return False

    # ---------------------------------------------------------------- what wakes it

    def _instance_free(self, instance: Instance) -> None:
        running = self._running.get(instance.index)
        while running and len(running) > instance.inflight:
            self._executed(instance, *running.popleft())
        self._grow = self._blocked
        self._enough, self._blocked = 0, False
        limited = self._instances.rate_limiter is not None  # whoever asks late loses its turn
        is_full = self._queue.elements >= self._rules.max_preferred
        if is_full or limited or self._stopping:
            self._dispatch()
        elif self._queue.live and not self._dispatch_due:
            # Not now: what else arrives in this iteration of the loop may join.
            self._dispatch_due = True
            self._clock.call_soon(self._dispatch)

    def _executed(self, instance: Instance, start_ns: int, elements: int) -> None:
        now_ns = self._clock.now_ns()
        start_ns = max(start_ns, self._ended_ns.get(instance.index, 0))
        self._ended_ns[instance.index] = now_ns
        self._executing -= elements
        self._regrouping.executed(now_ns, now_ns - start_ns, elements, self._queue.entered)

    def _wake_for_deadline(self) -> None:
        if self._queue.timed:
            self._wake_up.by(self._queue.next_deadline_ns())

    def _on_timer(self) -> None:
        if self._blocked:
            self._reject_expired(self._clock.now_ns())
            self._wake_for_deadline()
        else:
            self._dispatch()

    # ---------------------------------------------------------------- requests that leave

    def _reject_expired(self, now_ns: int) -> None:
        for request in self._queue.expire(now_ns):
            reject(request, UnavailableError("Request timeout expired"), self._statistics)
