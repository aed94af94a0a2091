"""The default scheduler: no batching, first in, first out, any free instance takes the next.

Source: Triton's default scheduler is its dynamic batcher with batching switched off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npuserve.server.queue import Lane
from npuserve.server.schedulers.queued import QueuedScheduler

if TYPE_CHECKING:
    from npuserve.request import InferenceRequest
    from npuserve.server.instance import Instance
    from npuserve.server.schedulers.base import SchedulerContext


# What a request may have to wait behind the one it is handed over early for.
_SHORT_EXECUTION_NS = 5_000_000


class DefaultScheduler(QueuedScheduler):
    """One request an execution; a client's batch of N is executed as a batch of N.

    There is no limit, no timeout and no priority.
    """

    _queue: Lane

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context, Lane())
        self._draining = False
        context.instances.on_free = self._instance_free

    def _queue_up(self, request: InferenceRequest) -> None:
        if not self._queue.live:
            instance = self._instances.acquire()
            if instance is not None:
                instance.run((request,), request.batch_size or 1)
                return
        self._queue.append(request)
        # Differs from Triton: a request whose client has gone is not executed; Triton looks for
        # cancelled requests only where a dynamic batcher is configured.
        request.on_cancel = self._on_cancel

    def _instance_free(self, instance: Instance) -> None:
        if self._draining:  # an instance that answers at once; the loop below goes on
            return
        self._draining = True
        try:
            queue = self._queue
            while queue.live:
                free = self._instances.acquire()
                if free is None:
                    if not self._takes_next_early(instance):
                        break
                    free = instance
                request = queue.pop()
                free.run((request,), request.batch_size or 1)
        finally:
            self._draining = False

    def _takes_next_early(self, instance: Instance) -> bool:
        """Whether the instance gets its next request while it executes one.

        # Differs from Triton: between two short executions lie a way to the event loop and back.
        # The request may be overtaken by those that other instances take meanwhile, so only while
        # so many wait that no instance goes without. Not with a limit of rates, which is granted
        # to what runs; nor what a model asks for on behalf of a request, which may be the very
        # one the instance is executing.
        """
        pool, queue = self._instances, self._queue
        return (
            instance.takes_next
            and 0 < instance.execution_ns < _SHORT_EXECUTION_NS
            and queue.live >= len(pool.instances)
            and not pool.decoupled
            and pool.rate_limiter is None
            and queue.first.parent is None
            and queue.first.for_model is None
        )
