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
from dataclasses import dataclass
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
        delay_ns: how long the oldest request waits for a preferred size.
        signature: two requests may share a batch if it is equal for both; None if all may.
        strategy: hooks of the model that may end a batch before a request; None for none.
    """

    max_batch: int
    preferred: frozenset[int]
    min_preferred: int
    max_preferred: int
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
        return cls(max_batch, sizes, min(sizes), max(sizes), delay_ns, signature)

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
    if rules.strategy is None:
        return _plan(queue, now_ns, rules, grow, None)
    state = rules.strategy.begin()
    try:
        return _plan(queue, now_ns, rules, grow, state)
    finally:
        rules.strategy.end(state)


def _plan(
    queue: Iterable[Batchable], now_ns: int, rules: BatchRules, grow: bool, state: Any
) -> Plan:
    """`plan_batch` with the state of the model's strategy."""
    delay_ns, signature, strategy = rules.delay_ns, rules.signature, rules.strategy
    count = total = best_count = best_total = 0
    oldest_ns = first_signature = None
    send_now = False
    for request in queue:
        elements = request.batch_size or 1
        if count:
            if total + elements > rules.max_preferred and not best_count:
                best_count, best_total = count, total
            if (
                total + elements > rules.max_batch
                or (signature is not None and signature(request) != first_signature)
                or (strategy is not None and not strategy.includes(request, state))
            ):
                # Strictly first in, first out: a request that does not fit is never skipped.
                send_now = True
                break
        else:
            if signature is not None:
                first_signature = signature(request)
            if strategy is not None:  # asked about the first one too, which is always taken
                strategy.includes(request, state)
        count += 1
        total += elements
        if oldest_ns is None or request.queue_ns < oldest_ns:
            oldest_ns = request.queue_ns
        if total in rules.preferred:
            best_count, best_total = count, total
        if total >= rules.max_batch or (not delay_ns and total >= rules.max_preferred):
            break
    if oldest_ns is None:
        return NOTHING
    expired = delay_ns > 0 and now_ns - oldest_ns >= delay_ns
    if best_count and not expired:
        if grow and delay_ns:
            return Plan(count, total, True, 0)
        return Plan(best_count, best_total, True, 0)
    if send_now or total >= rules.max_preferred:
        return Plan(count, total, True, 0)
    if expired or not delay_ns:
        return Plan(count, total, False, 0)
    return Plan(0, 0, False, oldest_ns + delay_ns)


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
