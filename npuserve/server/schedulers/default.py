"""The default scheduler: no batching, first in, first out, any free instance takes the next.

Source: Triton's default scheduler is its dynamic batcher with batching switched off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npuserve.errors import RequestCancelledError, UnavailableError
from npuserve.server.execution import reject
from npuserve.server.queue import Lane
from npuserve.server.response_cache import ModelCache
from npuserve.server.validation import request_prefix

if TYPE_CHECKING:
    from npuserve.request import InferenceRequest
    from npuserve.server.instance import Instance
    from npuserve.server.schedulers.base import SchedulerContext

STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"


class DefaultScheduler:
    """One request an execution; a client's batch of N is executed as a batch of N.

    There is no limit, no timeout and no priority.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._instances = context.instances
        self._statistics = context.statistics
        self._cache = ModelCache.for_model(context, self._queue_up)
        self._queue = Lane()
        self._stopping = False
        self._draining = False
        self._on_cancel = self._cancelled  # made once, not for every request
        context.instances.on_free = self._instance_free
        context.instances.frees_early = True

    @property
    def queued(self) -> int:
        """See `Scheduler.queued`."""
        return self._queue.live

    def enqueue(self, request: InferenceRequest) -> None:
        """See `Scheduler.enqueue`."""
        if self._stopping:
            raise UnavailableError(request_prefix(request.id) + STOPPING)
        if request.cancelled:
            reject(request, RequestCancelledError(""), self._statistics)
            return
        if self._cache is None:
            self._queue_up(request)
        else:
            self._cache.admit(request)

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

    def stop(self) -> None:
        """See `Scheduler.stop`."""
        self._stopping = True

    def _instance_free(self, instance: Instance) -> None:
        if self._draining:  # an instance that answers at once; the loop below goes on
            return
        self._draining = True
        try:
            queue = self._queue
            while queue.live:
                free = self._instances.acquire()
                if free is None:
                    break
                request = queue.pop()
                free.run((request,), request.batch_size or 1)
        finally:
            self._draining = False

    def _cancelled(self, request: InferenceRequest) -> None:
        self._queue.discard(request)
        reject(request, RequestCancelledError(""), self._statistics)
