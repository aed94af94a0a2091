"""Instances on a fake clock: an execution takes the time the test says.

    pool = FakePool(clock, statistics, count=2, duration_ns=5_000_000)
    scheduler = DynamicBatcher(context_of(config, pool))

Stands in for `server.instance.InstancePool` under a scheduler; answers every request of a batch
when its time is over, and keeps what it was given in `executed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from npuserve.backends.base import Placement
from npuserve.errors import InternalError
from npuserve.response import InferenceResponse
from npuserve.server.schedulers.base import SchedulerContext
from npuserve.server.statistics import ModelStatistics

if TYPE_CHECKING:
    from npuserve.model_config import ModelConfig
    from npuserve.request import InferenceRequest
    from npuserve.server.instance_pool import InstancePool
    from npuserve.testing.clock import FakeClock


@dataclass
class FakeExecution:
    """One batch as an instance got it."""

    instance: int
    start_ns: int
    requests: list[InferenceRequest]
    batch_size: int


class FakeInstance:
    """See `server.instance.Instance`."""

    def __init__(self, pool: FakePool, index: int, max_inflight: int) -> None:
        self.pool = pool
        self.index = index
        self.name = f"fake_{index}"
        self.placement = Placement(self.name, "CPU", 0, 0, index)
        self.max_inflight = max_inflight
        self.inflight = 0
        self.available = True
        self.execution_ns = 0
        self._waiting: deque[FakeExecution] = deque()

    @property
    def is_free(self) -> bool:
        """See `Instance.is_free`."""
        return self.inflight < self.max_inflight

    @property
    def takes_next(self) -> bool:
        """See `Instance.takes_next`."""
        return self.pool.prefetches and self.inflight == self.max_inflight

    def run(self, requests: Sequence[InferenceRequest], batch_size: int) -> None:
        """See `Instance.run`."""
        pool = self.pool
        now_ns = pool.clock.now_ns()
        execution = FakeExecution(self.index, now_ns, list(requests), batch_size)
        for request in requests:
            request.compute_start_ns = now_ns
            request.on_cancel = None
            pool.statistics.pending -= 1
        if pool.on_run is not None:
            pool.on_run(execution)
        early = not self.is_free
        self.inflight += 1
        if early:
            self._waiting.append(execution)
        else:
            self._start(execution)

    def _start(self, execution: FakeExecution) -> None:
        pool = self.pool
        now_ns = execution.start_ns = pool.clock.now_ns()
        pool.executed.append(execution)
        duration_ns = pool.duration_of(execution)
        if duration_ns:
            pool.clock.call_at(now_ns + duration_ns, lambda: self._finish(execution))
        else:
            self._finish(execution)

    def _finish(self, execution: FakeExecution) -> None:
        duration_ns = self.pool.clock.now_ns() - execution.start_ns
        self.pool.busy_ns += duration_ns
        self.execution_ns = max(duration_ns, self.execution_ns * 7 // 8)
        self.pool.statistics.own.execution(execution.batch_size, 0, duration_ns, 0)
        for request in execution.requests:
            self.pool.answer(request)
        self.inflight -= 1
        if self._waiting:  # not before: it may take no time, and end here and now
            self._start(self._waiting.popleft())
        self.pool.released(self)


@dataclass
class FakePool:
    """See `server.instance.InstancePool`.

    Attributes:
        duration_ns: of every execution, or a function of it.
        executed: all executions so far.
        busy_ns: time that instances were executing, ended executions only.
        fail: answer with an error instead of an empty response.
        prefetches: see `ModelInstance.prefetches`.
        on_run: called when an instance is given a batch, which may be before it starts.
    """

    clock: FakeClock
    statistics: ModelStatistics = field(default_factory=ModelStatistics)
    count: int = 1
    duration_ns: int | Callable[[FakeExecution], int] = 0
    max_inflight: int = 1
    executed: list[FakeExecution] = field(default_factory=list)
    busy_ns: int = 0
    fail: bool = False
    decoupled: bool = False
    on_free: Callable[[FakeInstance], None] | None = None
    rate_limiter: Any = None
    frees_early: bool = False
    prefetches: bool = False
    on_run: Callable[[FakeExecution], None] | None = None

    @property
    def loop(self) -> FakeClock:
        """Whatever has a `call_soon`."""
        return self.clock

    def __post_init__(self) -> None:
        self.instances = [FakeInstance(self, i, self.max_inflight) for i in range(self.count)]

    @property
    def active(self) -> int:
        """See `InstancePool.active`."""
        return self.count

    def acquire(self) -> FakeInstance | None:
        """See `InstancePool.acquire`."""
        free = [instance for instance in self.instances if instance.is_free]
        best = min(free, key=lambda instance: instance.inflight) if free else None
        if best is None or self.rate_limiter is None:
            return best
        granted: FakeInstance | None = self.rate_limiter.acquire(self, best)
        return granted

    def next_in_line(self) -> FakeInstance | None:
        """See `InstancePool.next_in_line`."""
        if len(self.instances) != 1:
            return None
        instance = self.instances[0]
        return instance if instance.takes_next else None

    def released(self, instance: FakeInstance) -> None:
        """See `InstancePool.released`."""
        if self.rate_limiter is not None:
            self.rate_limiter.release(instance)
        if self.on_free is not None:
            self.on_free(instance)

    def duration_of(self, execution: FakeExecution) -> int:
        """How long this execution takes, ns."""
        duration = self.duration_ns
        return duration if isinstance(duration, int) else duration(execution)

    def answer(self, request: InferenceRequest) -> None:
        """Give a request its final response."""
        error = InternalError("the model failed") if self.fail else None
        request.deliver(InferenceResponse([], error=error), True)

    @property
    def sizes(self) -> list[int]:
        """Batch sizes of all executions, in order."""
        return [execution.batch_size for execution in self.executed]

    def __hash__(self) -> int:
        return id(self)


def context_of(config: ModelConfig, pool: FakePool, **parts: Any) -> SchedulerContext:
    """A scheduler's context around a fake pool; `parts` replace single attributes."""

    def refuse(*args: object) -> Any:
        raise AssertionError(f"no other model here: {args}")

    arguments: dict[str, Any] = {
        "name": config.name,
        "version": 1,
        "config": config,
        "model_dir": Path(),
        "instances": cast("InstancePool", pool),
        "statistics": pool.statistics,
        "clock": pool.clock,
        "lookup": refuse,
    }
    return SchedulerContext(**(arguments | parts))
