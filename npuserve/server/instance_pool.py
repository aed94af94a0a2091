"""The instances of one model version, as a scheduler sees them: who is free, and when."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from npuserve.backends.base import LoopInstance, ModelInstance, Placement
from npuserve.server.handover import Mailbox
from npuserve.server.instance import Instance, LoopDrivenInstance, ThreadInstance
from npuserve.server.readiness import Readiness

if TYPE_CHECKING:
    from collections.abc import Callable

    from npuserve.response import InferenceResponse
    from npuserve.server.statistics import ModelStatistics

logger = logging.getLogger(__name__)


class InstancePool:
    """The instances of one model version, and who is free.

    A scheduler sets `on_free`; it is called with the instance whenever one can take a batch again.

    Args:
        statistics: of the model version.
        decoupled: whether requests may have any number of responses.

    Attributes:
        mailbox: the way from the instances' threads to the loop; the server's takes its place.
    """

    def __init__(
        self,
        model_name: str,
        model_version: int,
        loop: asyncio.AbstractEventLoop,
        statistics: ModelStatistics,
        decoupled: bool,
    ) -> None:
        self.model_name = model_name
        self.model_version = str(model_version)
        self.loop = loop
        self.mailbox = Mailbox(loop)
        self.statistics = statistics
        self.decoupled = decoupled
        self.instances: list[Instance] = []
        self.on_free: Callable[[Instance], None] | None = None
        self.on_availability: Callable[[], None] | None = None
        # The instance died and with it whatever its model remembered.
        self.on_lost: Callable[[Instance], None] | None = None
        # Names a response may carry; None lets everything through. Triton drops others silently.
        self.output_names: frozenset[str] | None = None
        self.reshape_outputs: Callable[[InferenceResponse], None] | None = None
        # Asked before an instance gets a batch, told afterwards (server/rate_limiter.py).
        self.rate_limiter: Any = None
        # The scheduler may start the next batch before the answers of the last one are out, so
        # that the device does not wait for them. Not where the next one needs what they carry.
        self.frees_early = False
        self._readiness = Readiness(loop)
        # Batches in flight by card, of all models if they share the counter; CPU is card -1.
        self.card_load: Counter[int] = Counter()
        self._next = 0
        self._idle: asyncio.Event | None = None

    def add(self, placement: Placement, instance: ModelInstance | LoopInstance) -> Instance:
        """Take in an instance that a backend made; it still has to be initialised."""
        wrapper: Instance
        if isinstance(instance, LoopInstance):
            wrapper = LoopDrivenInstance(placement, instance, self)
        else:
            wrapper = ThreadInstance(placement, instance, self)
        self.instances.append(wrapper)
        return wrapper

    def finish_outputs(self, response: InferenceResponse) -> None:
        """Drop outputs the configuration does not name and undo `reshape`, in place."""
        names = self.output_names
        if names is not None:
            for tensor in response.outputs:
                if tensor.name not in names:
                    response.outputs = [t for t in response.outputs if t.name in names]
                    break
        if self.reshape_outputs is not None:
            self.reshape_outputs(response)

    @property
    def inflight(self) -> int:
        """Batches being executed."""
        return sum(instance.inflight for instance in self.instances)

    @property
    def active(self) -> int:
        """Instances that take batches."""
        return sum(i.available and not i.placement.passive for i in self.instances)

    @property
    def healthy(self) -> bool:
        """Whether any instance is able to take batches at all."""
        return any(instance.available for instance in self.instances)

    async def is_ready(self) -> bool:
        """Whether the instances that are alive say they are ready; asks them."""
        return await self._readiness.check(i for i in self.instances if i.available)

    def acquire(self) -> Instance | None:
        """A free instance or None: the least loaded, then on the least loaded card, then in turn.

        With a rate limiter the instance has got its resources; it must be `run` at once.
        """
        instances = self.instances
        if len(instances) == 1:
            best = instances[0] if instances[0].is_free else None
        else:
            best = None
            least = (0, 0)
            count = len(instances)
            for step in range(count):
                candidate = instances[(self._next + step) % count]
                if candidate.placement.passive or not candidate.is_free:
                    continue
                load = (candidate.inflight, self.card_load[candidate.card])
                if best is None or load < least:
                    best, least = candidate, load
            if best is not None:
                self._next = (best.index + 1) % count
        if best is None or self.rate_limiter is None:
            return best
        granted: Instance | None = self.rate_limiter.acquire(self, best)
        return granted

    def next_in_line(self) -> Instance | None:
        """The busy instance that may be given its next batch already, or None.

        Only where there is a single one: of several, another one might be free earlier.
        """
        if len(self.instances) != 1:
            return None
        instance = self.instances[0]
        return instance if instance.takes_next else None

    def limits(self) -> list[tuple[Any, list[Any]]]:
        """See `BackendModelContext.limits`."""
        if self.rate_limiter is None:
            return []
        return [
            (
                instance.backend_instance.node,
                [each.backend_instance.node for each in self.rate_limiter.holders(instance)],
            )
            for instance in self.instances
            if not instance.placement.passive
        ]

    def released(self, instance: Instance) -> None:
        """An instance ended a batch."""
        if self.rate_limiter is not None:
            self.rate_limiter.release(instance)
        if self._idle is not None and not self.inflight:
            self._idle.set()
        if self.on_free is not None:
            self.on_free(instance)

    def availability_changed(self, instance: Instance) -> None:
        """The worker of an instance died or came back."""
        if self.on_lost is not None and not instance.available:
            self.on_lost(instance)
        if self.on_availability is not None:
            self.on_availability()
        if instance.is_free and self.on_free is not None:
            self.on_free(instance)

    async def wait_idle(self) -> None:
        """Return once no batch is in flight."""
        if self.inflight:
            self._idle = asyncio.Event()
            await self._idle.wait()
            self._idle = None

    async def initialize(self) -> None:
        """Start all instances side by side; the first error is raised after all have answered."""
        results = await asyncio.gather(
            *(instance.initialize() for instance in self.instances), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def finalize(self) -> None:
        """Stop all instances side by side; a failure of one is logged."""
        self._readiness.close()
        results = await asyncio.gather(
            *(instance.finalize() for instance in self.instances), return_exceptions=True
        )
        for instance, result in zip(self.instances, results, strict=True):
            if isinstance(result, BaseException):
                logger.error("stopping instance %s failed", instance.name, exc_info=result)
