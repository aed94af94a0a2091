"""What the schedulers with one queue share: who may join it, and who leaves it unexecuted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npuserve.errors import RequestCancelledError, UnavailableError
from npuserve.server.execution import reject
from npuserve.server.response_cache import ModelCache
from npuserve.server.schedulers.base import STOPPING
from npuserve.server.validation import request_prefix

if TYPE_CHECKING:
    from npuserve.request import InferenceRequest
    from npuserve.server.queue import Lane, PriorityQueue
    from npuserve.server.response_order import ResponseOrder
    from npuserve.server.schedulers.base import SchedulerContext


class QueuedScheduler:
    """Base of the default scheduler and the dynamic batcher.

    Args:
        queue: holds the requests until they are executed.
        order: in which responses leave; a hit of the response cache has to know it.
    """

    def __init__(
        self,
        context: SchedulerContext,
        queue: Lane | PriorityQueue,
        order: ResponseOrder | None = None,
    ) -> None:
        self._instances = context.instances
        self._statistics = context.statistics
        self._queue = queue
        self._cache = ModelCache.for_model(context, self._queue_up, order)
        self._stopping = False
        self._on_cancel = self._cancelled  # made once, not for every request
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

    def stop(self) -> None:
        """See `Scheduler.stop`."""
        self._stopping = True

    def close(self) -> None:
        """See `Scheduler.close`."""

    def _queue_up(self, request: InferenceRequest) -> None:
        """Take a request that no cache has the answer to."""
        raise NotImplementedError

    def _cancelled(self, request: InferenceRequest) -> None:
        self._queue.discard(request)
        reject(request, RequestCancelledError(""), self._statistics)
