"""What every scheduler offers to the core, and what the core gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from npuserve.clock import Clock
    from npuserve.model_config import ModelConfig
    from npuserve.request import InferenceRequest
    from npuserve.server.instance_pool import InstancePool
    from npuserve.server.statistics import ModelStatistics

STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"


@dataclass
class SchedulerContext:
    """The parts a scheduler of one model version works with.

    Attributes:
        config: complete configuration.
        model_dir: for files the configuration names (initial states).
        instances: empty for an ensemble.
        lookup: (name, version) → the other model's Model, raising NotFoundError or
            UnavailableError; used by ensembles.
        cache: the server's response cache if this model may use it.
    """

    name: str
    version: int
    config: ModelConfig
    model_dir: Path
    instances: InstancePool
    statistics: ModelStatistics
    clock: Clock
    lookup: Callable[[str, int], Any]
    cache: Any = None


class Scheduler(Protocol):
    """Queues the requests of one model version and starts batches. Loop thread only.

    The scheduler owns a request from `enqueue` until it hands it to an instance; every request
    it owns is answered by it. It creates no tasks: everything happens in `enqueue` and `stop`, in
    `instances.on_free` and in calls and timers of the clock, so a test with a fake clock sees all
    of it.
    """

    def enqueue(self, request: InferenceRequest) -> None:
        """Take the request (`request.queue_ns` and `statistics.pending` are set already).

        Raises:
            NpuserveError: refused; the request is still the caller's.
        """

    def stop(self) -> None:
        """Refuse new requests from now on (running sequences may go on); queued ones finish."""

    def close(self) -> None:
        """Free what it has; called once, after its last request was answered."""

    @property
    def queued(self) -> int:
        """Requests waiting; for tests."""
