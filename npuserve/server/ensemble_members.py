"""What the requests of an ensemble share, and what each of them holds while it runs.

How a request walks through the graph is in ensemble_run.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from npuserve.errors import NpuserveError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npuserve.request import InferenceRequest, ModelCall
    from npuserve.server.ensemble_graph import EnsembleGraph, Step
    from npuserve.server.ensemble_run import StepCall
    from npuserve.server.model import Model
    from npuserve.server.schedulers.ensemble import EnsembleScheduler
    from npuserve.server.statistics import ModelStatistics


@dataclass(frozen=True)
class EnsembleParts:
    """What all requests of an ensemble share.

    Attributes:
        name, version: of the ensemble.
        lookup: (name, version) → the Model of a member; raises NpuserveError.
        now_ns: reads the clock.
        gates: by step; empty without `max_inflight_requests`.
    """

    name: str
    version: str
    graph: EnsembleGraph
    statistics: ModelStatistics
    lookup: Callable[[str, int], Model]
    now_ns: Callable[[], int]
    gates: Mapping[int, Gate]


class Members:
    """The models that one request of an ensemble runs on, by step; held until `let_go`.

    Whatever is loaded or unloaded meanwhile, all steps run on the versions of the beginning, also
    those of ensembles inside this one.

    Args:
        requested: outputs of the request, which decide what steps it has.

    Raises:
        NpuserveError: a member is not ready; nothing is held.
    """

    __slots__ = ("_inner", "_models")

    def __init__(self, parts: EnsembleParts, requested: tuple[str, ...]) -> None:
        self._models: dict[int, Model] = {}
        self._inner: dict[int, Members] | None = None
        try:
            for step in parts.graph.plan(requested).steps:
                model = parts.lookup(step.model_name, step.model_version)
                model.hold()
                self._models[step.index] = model
                if model.config.HasField("ensemble_scheduling"):
                    inner = cast("EnsembleScheduler", model.scheduler).hold_members(step)
                    if self._inner is None:
                        self._inner = {}
                    self._inner[step.index] = inner
        except NpuserveError:
            self.let_go()
            raise

    def accept(self, step: Step, request: InferenceRequest) -> None:
        """Give a request to the member of a step; see `Model.accept`."""
        if self._inner is not None:
            request.scheduling = self._inner.get(step.index)
        model = self._models[step.index]
        whole = request.parent
        if whole is not None and whole.for_model is not None:
            request.for_model = whole.for_model.part(model.context)
        model.accept(request)

    def let_go(self) -> None:
        """The request was answered."""
        if self._inner is not None:
            for inner in self._inner.values():
                inner.let_go()
        for model in self._models.values():
            model.let_go()


class Gate:
    """`max_inflight_requests`: how many requests one step may have in flight, over all runs.

    At the limit the tensors of further calls wait, and the decoupled step that they come from is
    asked to pause.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inflight: set[InferenceRequest] = set()
        self._opening = False
        self.waiting: deque[tuple[StepCall, InferenceRequest]] = deque()

    def enter(self, call: StepCall, member: InferenceRequest) -> bool:
        """Whether the call may start now; else the gate starts it later."""
        if len(self._inflight) >= self._limit:
            self.waiting.append((call, member))
            return False
        self._inflight.add(member)
        return True

    def inside(self) -> list[ModelCall | None]:
        """The calls of models for those in flight, None for a client's: see `ModelCall.behind`."""
        return [member.for_model for member in self._inflight]

    def leave(self, member: InferenceRequest) -> None:
        """A call has ended: start the ones that waited longest."""
        self._inflight.remove(member)
        if self._opening:
            return  # a call that failed at once; the loop below goes on
        self._opening = True
        while self.waiting and len(self._inflight) < self._limit:
            call, member = self.waiting.popleft()
            if call.run.wants_held_call(call):
                self._inflight.add(member)
                call.run.released(call, member)
        self._opening = False
