"""How the ready sequences of an instance make a batch: direct and oldest. Pure.

* direct: the position in the batch is the slot; empty slots below a used one get a filler.
* oldest: the next request of every sequence, at most one each, goes through dynamic batching.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

from npuserve.server.batching import BatchRules, Signature, batch_signature, plan_batch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as AbstractSequence

    from npuserve.model_config import ModelConfig
    from npuserve.server.instance import Instance
    from npuserve.server.sequence_slots import Sequence


class SequencePlan(NamedTuple):
    """What an instance shall do now.

    Attributes:
        sequences: whose next requests make the batch, None for a filler; empty for no batch yet.
        wait_until_ns: without a batch, when to look again; 0 if nothing is ready.
    """

    sequences: AbstractSequence[Sequence | None]
    wait_until_ns: int = 0


NOTHING = SequencePlan(())


class Strategy(Protocol):
    """How the ready sequences of an instance make a batch."""

    # Sequences that an instance holds.
    slots: int

    def takes_batch(self, instance: Instance) -> bool:
        """Whether the instance can be given a batch now."""

    def plan(self, ready: Mapping[Sequence, None], now_ns: int, waited: bool) -> SequencePlan:
        """The next batch of an instance.

        Args:
            ready: sequences in the order in which they became ready.
            waited: whether they had to wait for the instance.
        """


class DirectStrategy:
    """A batch holds what is ready, at the position of its slot.

    Source: Triton core src/sequence_batch_scheduler, DirectSequenceBatch::BatcherThread.
    """

    def __init__(self, config: ModelConfig) -> None:
        settings = config.sequence_batching.direct
        self.slots = max(1, config.max_batch_size)
        self._delay_ns = settings.max_queue_delay_microseconds * 1_000
        self._utilization = settings.minimum_slot_utilization
        self._signature = batch_signature(config)

    def takes_batch(self, instance: Instance) -> bool:
        """One batch at a time: the next one is formed when this one is done."""
        return not instance.inflight and instance.is_free

    def plan(self, ready: Mapping[Sequence, None], now_ns: int, waited: bool) -> SequencePlan:
        """See `Strategy.plan`."""
        if not ready:
            return NOTHING
        if self._delay_ns and self._utilization and len(ready) / self.slots < self._utilization:
            due_ns = min(sequence.ready_ns for sequence in ready) + self._delay_ns
            if now_ns < due_ns:
                return SequencePlan((), due_ns)
        by_slot = sorted(ready, key=_slot)
        signature = self._signature
        if signature is not None:
            # A slot whose request has another shape waits for the next execution.
            first = signature(by_slot[0].requests[0])
            by_slot = [s for s in by_slot if signature(s.requests[0]) == first]
        positions: list[Sequence | None] = [None] * (by_slot[-1].slot + 1)
        for sequence in by_slot:
            positions[sequence.slot] = sequence
        return SequencePlan(positions)


class OldestStrategy:
    """Dynamic batching over the next requests of all sequences.

    Source: Triton core src/sequence_batch_scheduler, OldestSequenceBatch.
    """

    def __init__(self, config: ModelConfig) -> None:
        settings = config.sequence_batching.oldest
        self.slots = settings.max_candidate_sequences or max(1, config.max_batch_size)
        self._rules = BatchRules.make(
            config.max_batch_size,
            frozenset(settings.preferred_batch_size),
            settings.max_queue_delay_microseconds * 1_000,
            _of_candidate(batch_signature(config)),
        )

    def takes_batch(self, instance: Instance) -> bool:
        """As many as the instance holds: no two of them have requests of one sequence."""
        return instance.is_free

    def plan(self, ready: Mapping[Sequence, None], now_ns: int, waited: bool) -> SequencePlan:
        """See `Strategy.plan`."""
        plan = plan_batch(map(_Candidate, ready), now_ns, self._rules, waited)
        return SequencePlan(tuple(islice(ready, plan.count)), plan.wait_until_ns)


class _Candidate(NamedTuple):
    """The next request of a sequence as the rules of dynamic batching see it."""

    sequence: Sequence

    @property
    def queue_ns(self) -> int:
        # A request cannot be batched, and so gets no older, before the one before it is done.
        return self.sequence.ready_ns

    @property
    def batch_size(self) -> int:
        return 1


def _of_candidate(signature: Signature | None) -> Signature | None:
    if signature is None:
        return None
    return lambda candidate: signature(candidate.sequence.requests[0])


def _slot(sequence: Sequence) -> int:
    return sequence.slot
