"""Which requests make the next batch: the rules of dynamic batching, pure.

Step 7 of the walk. `plan_batch` looks at a queue and says: these many requests now, or wait until
then, or nothing. It neither reads a clock nor changes the queue, so every rule is tested without
a loop.

Source: Triton core src/dynamic_batch_scheduler.cc, GetDynamicBatch. Triton hands a batch to a busy
instance early and lets it grow there; here a batch is formed when an instance is free, which
comes to the same: `grow` below.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from npuserve.model_config import ModelConfig
    from npuserve.request import InferenceRequest
    from npuserve.server.batch_strategy import BatchStrategy

Signature = Callable[[Any], Hashable]


class Batchable(Protocol):
    """What the rules look at: a request, or what stands for one (the head of a sequence)."""

    @property
    def queue_ns(self) -> int:
        """Since when it waits to be batched, monotonic."""

    @property
    def batch_size(self) -> int:
        """Batch elements; 0 for a model without a batch dimension."""


@dataclass(frozen=True, slots=True)
class BatchRules:
    """The batching settings of a model.

    Attributes:
        max_batch: batch elements a batch may have, at least 1.
        preferred: sizes at which a batch goes without waiting any longer.
        min_preferred, max_preferred: the smallest and largest of them.
        enough: size at which nobody else is looked for.
        delay_ns: how long the oldest request waits for a preferred size.
        signature: two requests may share a batch if it is equal for both; None if all may.
        strategy: hooks of the model that may end a batch before a request; None for none.
    """

    max_batch: int
    preferred: frozenset[int]
    min_preferred: int
    max_preferred: int
    enough: int
    delay_ns: int = 0
    signature: Signature | None = None
    strategy: BatchStrategy | None = None

    @classmethod
    def make(
        cls,
        max_batch_size: int,
        preferred: frozenset[int] = frozenset(),
        delay_ns: int = 0,
        signature: Signature | None = None,
    ) -> BatchRules:
        """Rules with Triton's defaults: without preferred sizes, the maximum is preferred."""
        max_batch = max(1, max_batch_size)
        sizes = preferred or frozenset((max_batch,))
        enough = max_batch if delay_ns else min(max_batch, max(sizes))
        return cls(max_batch, sizes, min(sizes), max(sizes), enough, delay_ns, signature)

    def preferring(self, size: int) -> BatchRules:
        """The same rules with another, single preferred size."""
        return replace(self, preferred=frozenset((size,)), min_preferred=size, max_preferred=size)

    @classmethod
    def from_config(cls, config: ModelConfig) -> BatchRules:
        """The rules a configuration with `dynamic_batching` asks for."""
        batching = config.dynamic_batching
        return cls.make(
            config.max_batch_size,
            frozenset(batching.preferred_batch_size),
            batching.max_queue_delay_microseconds * 1_000,
            batch_signature(config) if config.max_batch_size > 1 else None,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now.

    Attributes:
        count: requests from the head of the queue that make the batch; 0 for none yet.
        batch_size: their batch elements.
        full: more requests could not or must not join.
        wait_until_ns: with count 0, when to look again; 0 means that nothing is queued.
    """

    count: int
    batch_size: int
    full: bool
    wait_until_ns: int


NOTHING = Plan(0, 0, False, 0)


def plan_batch(
    queue: Iterable[Batchable], now_ns: int, rules: BatchRules, grow: bool = False
) -> Plan:
    """Plan the next batch for a free instance.

    Args:
        queue: expired requests were taken out already.
        now_ns: monotonic.
        grow: the requests had to wait for an instance. A batch of a preferred size, due
            earlier, takes in what else came meanwhile (only where there is a queue delay;
            without one a preferred size is final).
    """
    strategy = rules.strategy
    if strategy is None:
        gathered = _gather(queue, rules, None)
    else:
        state = strategy.begin()
        try:
            gathered = _gather(queue, rules, lambda request: strategy.includes(request, state))
        finally:
            strategy.end(state)
    count, total, preferred_count, preferred_total, oldest_ns, full = gathered
    if not count:
        return NOTHING
    delay_ns = rules.delay_ns
    expired = delay_ns > 0 and now_ns - oldest_ns >= delay_ns
    if preferred_count and not expired:
        if not (grow and delay_ns):
            return Plan(preferred_count, preferred_total, True, 0)
        full = True
    if full or total >= rules.max_preferred:
        return Plan(count, total, True, 0)
    if expired or not delay_ns:
        return Plan(count, total, False, 0)
    return Plan(0, 0, False, oldest_ns + delay_ns)


def _gather(
    queue: Iterable[Batchable], rules: BatchRules, includes: Callable[[Batchable], bool] | None
) -> tuple[int, int, int, int, int, bool]:
    """The longest batch that may be made of the head of the queue, whatever the time is.

    Returns:
        Requests and batch elements; those of the batch of a preferred size in it, 0 for none;
        the time of the oldest request; whether the next request must not join.
    """
    signature = rules.signature
    count = total = preferred_count = preferred_total = oldest_ns = 0
    first = None
    for request in queue:
        size = total + (request.batch_size or 1)
        if not count:
            oldest_ns = request.queue_ns
            if signature is not None:
                first = signature(request)
            if includes is not None:  # asked about the first one too, which is always taken
                includes(request)
        elif (
            size > rules.max_batch
            or (signature is not None and signature(request) != first)
            or (includes is not None and not includes(request))
        ):
            # Strictly first in, first out: a request that does not fit is never skipped.
            return count, total, preferred_count, preferred_total, oldest_ns, True
        elif size > rules.max_preferred and not preferred_count:
            preferred_count, preferred_total = count, total
        if request.queue_ns < oldest_ns:
            oldest_ns = request.queue_ns
        count += 1
        total = size
        if total in rules.preferred:
            preferred_count, preferred_total = count, total
        if total >= rules.enough:
            break
    return count, total, preferred_count, preferred_total, oldest_ns, False


def batch_signature(config: ModelConfig) -> Signature | None:
    """What must be equal for two requests to share a batch; None if nothing can differ.

    Shapes (without the batch dimension) of inputs with a variable dimension, contents of shape
    tensors, and the set of inputs if any is optional. Ragged inputs are left out: the model
    takes any mixture.
    """
    variable = tuple(
        tensor.name
        for tensor in config.input
        if -1 in tensor.dims and not tensor.allow_ragged_batch and not tensor.is_shape_tensor
    )
    contents = tuple(tensor.name for tensor in config.input if tensor.is_shape_tensor)
    optional = any(tensor.optional for tensor in config.input)
    if not (variable or contents or optional):
        return None

    def signature(request: InferenceRequest) -> Hashable:
        inputs = request.inputs
        parts: list[Any] = [
            tuple(inputs[name].shape[1:]) if name in inputs else None for name in variable
        ]
        parts += [bytes(inputs[name].data) if name in inputs else None for name in contents]
        if optional:
            parts.append(frozenset(inputs))
        return tuple(parts)

    return signature
