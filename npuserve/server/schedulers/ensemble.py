"""The ensemble scheduler: step 6 of the walk for an ensemble.

It has no instances and no queue: every request walks through the graph by itself
(ensemble_run.py), carried by the answers of the member models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npuserve.errors import UnavailableError
from npuserve.server.ensemble_graph import EnsembleGraph
from npuserve.server.ensemble_members import EnsembleParts, Gate, Members
from npuserve.server.ensemble_run import EnsembleRun
from npuserve.server.response_cache import ModelCache
from npuserve.server.schedulers.base import STOPPING
from npuserve.server.validation import request_prefix

if TYPE_CHECKING:
    from npuserve.request import InferenceRequest
    from npuserve.server.ensemble_graph import Step
    from npuserve.server.schedulers.base import SchedulerContext


class EnsembleScheduler:
    """Scheduler of an ensemble.

    Raises:
        NpuserveError: a member is missing or the steps do not fit together.
    """

    def __init__(self, context: SchedulerContext) -> None:
        graph = EnsembleGraph(
            context.config, lambda name, version: context.lookup(name, version).config
        )
        steps = range(len(context.config.ensemble_scheduling.step))
        limit = context.config.ensemble_scheduling.max_inflight_requests
        self._parts = EnsembleParts(
            name=context.name,
            version=str(context.version),
            graph=graph,
            statistics=context.statistics,
            lookup=context.lookup,
            now_ns=context.clock.now_ns,
            gates={index: Gate(limit) for index in steps} if limit else {},
        )
        self._cache = ModelCache.for_model(context, self._start)
        self._stopping = False
        # Classification of an output takes the labels of the member that makes it.
        self.labels: dict[str, list[str]] = {
            output: context.lookup(member, version).labels(name)
            for output, member, version, name in graph.sources()
        }

    @property
    def queued(self) -> int:
        """Steps that wait for their limit of requests in flight."""
        return sum(len(gate.waiting) for gate in self._parts.gates.values())

    def enqueue(self, request: InferenceRequest) -> None:
        """See `Scheduler.enqueue`. The request counts as executing from here on."""
        if self._stopping:
            raise UnavailableError(request_prefix(request.id) + STOPPING)
        # A stored response carries the sequence parameters of the request that made it.
        if self._cache is not None and not request.correlation_id:
            self._cache.admit(request)
        else:
            self._start(request)

    def hold_members(self, step: Step) -> Members:
        """The members for the requests of a step of another ensemble, which lets them go.

        Raises:
            NpuserveError: one of them is not ready.
        """
        return Members(self._parts, step.requested_outputs)

    def _start(self, request: InferenceRequest) -> None:
        self._parts.statistics.pending -= 1
        request.compute_start_ns = self._parts.now_ns()
        EnsembleRun(self._parts, request).start()

    def stop(self) -> None:
        """See `Scheduler.stop`."""
        self._stopping = True

    def close(self) -> None:
        """See `Scheduler.close`."""
