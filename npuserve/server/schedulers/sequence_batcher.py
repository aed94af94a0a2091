"""The sequence batcher: requests of one sequence go to one instance and slot, one after the other.

Step 6 of the walk for a model with `sequence_batching`. Which sequence is where is decided in
sequence_slots.py and what makes a batch in sequence_strategies.py; here are the wake-ups, and what
a request is given on its way to the instance: control tensors and implicit state.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from npuserve.clock import Appointment
from npuserve.errors import (
    InvalidArgumentError,
    NpuserveError,
    RequestCancelledError,
    UnavailableError,
)
from npuserve.request import SEQUENCE_START, InferenceRequest, checked_text_id
from npuserve.server.execution import reject
from npuserve.server.implicit_state import ImplicitState, StateTensors
from npuserve.server.response_order import ResponseOrder
from npuserve.server.sequence_controls import SequenceControls
from npuserve.server.sequence_slots import SequenceSlots
from npuserve.server.sequence_strategies import DirectStrategy, OldestStrategy
from npuserve.server.statistics import FailureReason

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as AbstractSequence

    from npuserve.request import ResponseCallback
    from npuserve.response import InferenceResponse
    from npuserve.server.instance import Instance
    from npuserve.server.schedulers.base import SchedulerContext
    from npuserve.server.sequence_slots import Sequence
    from npuserve.server.sequence_strategies import Strategy
    from npuserve.tensor import Tensor

logger = logging.getLogger(__name__)

_DEFAULT_IDLE_US = 1_000_000


class _Memory:
    """What the batcher keeps for a sequence (`Sequence.state`).

    Attributes:
        correlation_id: the control tensor, made once.
        states: of the next execution.
    """

    __slots__ = ("correlation_id", "states")

    def __init__(self, correlation_id: dict[str, Tensor], states: StateTensors) -> None:
        self.correlation_id = correlation_id
        self.states = states


class SequenceBatcher:
    """Scheduler of a model with `sequence_batching`; making one reads files of initial states.

    Raises:
        InvalidArgumentError: the configuration of an implicit state is wrong.
    """

    def __init__(self, context: SchedulerContext) -> None:
        config = context.config
        settings = config.sequence_batching
        if "TRITON_BATCH_STRATEGY_PATH" in config.parameters:
            logger.warning(
                "model '%s' has a sequence batcher: custom batching is ignored", context.name
            )
        self._name = context.name
        self._pool = context.instances
        self._statistics = context.statistics
        self._clock = context.clock
        self._iterative = settings.iterative_sequence
        self._controls = SequenceControls(config)
        self._states = ImplicitState(config, context.model_dir)
        self._strategy: Strategy
        oldest = settings.WhichOneof("strategy_choice") == "oldest"
        self._strategy = OldestStrategy(config) if oldest else DirectStrategy(config)
        self._instances = [i for i in self._pool.instances if not i.placement.passive]
        self._positions = {instance: at for at, instance in enumerate(self._instances)}
        ordered = oldest and settings.oldest.preserve_ordering
        self._orders = [ResponseOrder() for _ in self._instances] if ordered else None
        self._waited = [False] * len(self._instances)
        self._slots = SequenceSlots(
            self._name,
            len(self._instances),
            self._strategy.slots,
            (settings.max_sequence_idle_microseconds or _DEFAULT_IDLE_US) * 1_000,
            lambda at: self._instances[at].available,
        )
        self._next_id = 0
        self._stopping = False
        self._dispatch_due = False  # `_dispatch` is on its way
        self._dispatching = False
        self._wake_up = Appointment(self._clock, self._on_timer)
        self._pool.on_free = self._instance_free
        self._pool.on_lost = self._instance_lost

    # ---------------------------------------------------------------- requests come

    @property
    def queued(self) -> int:
        """See `Scheduler.queued`."""
        return self._slots.queued

    @property
    def live_sequences(self) -> int:
        """Sequences that have begun and are not over; for tests."""
        return len(self._slots)

    def enqueue(self, request: InferenceRequest) -> None:
        """See `Scheduler.enqueue`."""
        if request.batch_size > 1:
            raise InvalidArgumentError(
                f"inference request to model '{self._name}' must specify batch-size 1 due to "
                "requirements of sequence batcher"
            )
        if request.cancelled:
            reject(request, RequestCancelledError(""), self._statistics)
            return
        if self._iterative:
            self._begin_iterative(request)
        self._check_id(request.correlation_id)
        if request.flags & SEQUENCE_START:
            self._warn_of_restart(request)
        sequence = self._slots.add(
            request,
            self._clock.now_ns(),
            accept_new=not self._stopping,
            ends=self._iterative,
        )
        if sequence.state is None:
            sequence.state = _Memory(
                self._controls.correlation_id_tensor(request.correlation_id), self._states.initial
            )
        self._own(request, sequence)
        self._wake()

    def _begin_iterative(self, request: InferenceRequest) -> None:
        """Every request of an iterative model is a sequence; the server makes up a missing id.

        # Differs from Triton: it mixes up requests of one id that come while the first is being
        # executed, and never answers a request whose END it has seen. Here they are sequences of
        # their own, one after the other.
        """
        if not request.correlation_id:
            request.flags = SEQUENCE_START
            self._next_id += 1
            while self._slots.find(self._next_id) is not None:
                self._next_id += 1
            request.correlation_id = self._next_id

    def _check_id(self, correlation_id: int | str) -> None:
        if not correlation_id:
            raise InvalidArgumentError(
                f"inference request to model '{self._name}' must specify a non-zero or non-empty "
                "correlation ID"
            )
        if isinstance(correlation_id, str):
            checked_text_id(correlation_id)
        self._controls.check(correlation_id)

    def _warn_of_restart(self, request: InferenceRequest) -> None:
        live = self._slots.find(request.correlation_id)
        if live is not None and not live.ended:
            logger.warning(
                "sequence %s for model '%s' has a conflict. The previous sequence did not end "
                "before this sequence start. Previous sequence will be terminated early.",
                request.correlation_id, self._name,
            )  # fmt: skip

    def _own(self, request: InferenceRequest, sequence: Sequence) -> None:
        """Put the batcher between the request and those who want to hear of it."""
        request.scheduling = sequence
        request.on_cancel = self._cancelled
        if request.for_model is not None:
            request.for_model.only = partial(self._node_of, sequence)
        request.on_release = partial(self._released, sequence, request.on_release)
        if self._iterative:
            request.on_reschedule = self._rescheduled
        if self._states:
            request.on_response = partial(self._absorb, sequence, request.on_response)

    def _node_of(self, sequence: Sequence) -> object:
        """See `ModelCall.only`; a sequence in the backlog gets any instance."""
        if sequence.instance < 0:
            return None
        return self._instances[sequence.instance].backend_instance.node

    def stop(self) -> None:
        """See `Scheduler.stop`. Live sequences go on, new ones are refused.

        But what is queued must not wait for clients that may never come back: from now on an
        idle sequence gives its slot to the backlog at once.
        """
        self._stopping = True
        self._slots.make_room(self._clock.now_ns())
        self._wake()

    def close(self) -> None:
        """See `Scheduler.close`. No timer of a sequence that never ended keeps the model."""
        self._slots.forget_idle(self._clock.now_ns())
        self._wake_up.cancel()

    # ---------------------------------------------------------------- starting batches

    def _wake(self) -> None:
        """Look for batches after everything that runs now, so that what arrives can join."""
        if not self._dispatch_due:
            self._dispatch_due = True
            self._clock.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        if self._dispatching:  # an instance that answers at once
            self._wake()
            return
        self._dispatch_due = False
        self._dispatching = True
        wait_until_ns = 0
        try:
            for at in range(len(self._instances)):
                until_ns = self._start_batches(at)
                wait_until_ns = min(wait_until_ns or until_ns, until_ns or wait_until_ns)
        finally:
            self._dispatching = False
        event_ns = self._slots.next_event_ns()
        self._wake_up.by(min(wait_until_ns or event_ns, event_ns or wait_until_ns))

    def _start_batches(self, at: int) -> int:
        """Start what can start on one instance; returns when to look again, 0 for no time."""
        instance, ready = self._instances[at], self._slots.ready[at]
        while ready:
            if not self._strategy.takes_batch(instance):
                self._waited[at] = True
                return 0
            plan = self._strategy.plan(ready, self._clock.now_ns(), self._waited[at])
            if not plan.sequences:
                return plan.wait_until_ns
            if not self._has_resources(instance):
                return 0
            self._waited[at] = False
            self._run(at, plan.sequences)
        return 0

    def _has_resources(self, instance: Instance) -> bool:
        """Whether the rate limiter, if there is one, lets this very instance run now."""
        limiter = self._pool.rate_limiter
        return limiter is None or limiter.acquire(self._pool, instance, only=True) is not None

    def _run(self, at: int, sequences: AbstractSequence[Sequence | None]) -> None:
        example = next(each for each in sequences if each is not None).requests[0].inputs
        requests = []
        for sequence in sequences:
            if sequence is None:
                requests.append(self._filler(example))
                continue
            request = self._slots.take(sequence)
            self._add_inputs(request, sequence.state)
            if self._orders is not None and not request.compute_start_ns:
                self._orders[at].add(request)
            requests.append(request)
        self._instances[at].run(requests, len(requests))

    def _add_inputs(self, request: InferenceRequest, memory: _Memory) -> None:
        if request.flags & SEQUENCE_START:
            memory.states = self._states.initial
        own = {**memory.states, **self._controls.flags(request.flags), **memory.correlation_id}
        request.inputs = _in_order(own, request.inputs)

    def _filler(self, example: dict[str, Tensor]) -> InferenceRequest:
        """Stands in an empty slot, so that the others are at their positions."""
        own = {**self._states.initial, **self._controls.filler}
        filler = InferenceRequest(self._name, _in_order(own, example), _ignore)
        filler.filler = True
        filler.inputs_shared = True
        filler.batch_size = 1
        return filler

    # ---------------------------------------------------------------- what comes back

    def _absorb(
        self,
        sequence: Sequence,
        forward: ResponseCallback,
        response: InferenceResponse | None,
        final: bool,
    ) -> None:
        """Keep the state outputs of a response for the sequence's next request."""
        if response is not None and response.error is None:
            memory: _Memory = sequence.state
            try:
                memory.states = self._states.absorb(memory.states, response)
            except NpuserveError as error:
                response.outputs, response.error = [], error
        forward(response, final)

    def _released(
        self,
        sequence: Sequence,
        forward: Callable[[InferenceRequest], None] | None,
        request: InferenceRequest,
    ) -> None:
        """A request has its final response; the next one of its sequence may run."""
        if sequence.running is request:
            now_ns = self._clock.now_ns()
            self._slots.done(sequence, now_ns)
            if self._stopping:
                self._slots.make_room(now_ns)
            # With a batch in flight its end will look for the next one, with all that came back.
            if sequence.instance < 0 or not self._instances[sequence.instance].inflight:
                self._wake()
        if forward is not None:
            forward(request)

    def _rescheduled(self, request: InferenceRequest) -> None:
        """The model wants to execute the request of an iterative sequence once more."""
        sequence: Sequence = request.scheduling
        request.flags = 0
        self._statistics.pending += 1
        self._slots.put_back(sequence, self._clock.now_ns())
        if request.cancelled:
            self._cancelled(request)
        else:
            request.on_cancel = self._cancelled
        self._wake()

    def _instance_free(self, instance: Instance) -> None:
        self._slots.fill(self._clock.now_ns())
        if self._pool.rate_limiter is None:
            self._wake()
        else:  # whoever asks late loses its turn
            self._dispatch()

    # ---------------------------------------------------------------- requests that leave

    def _cancelled(self, request: InferenceRequest) -> None:
        """A waiting request: those behind it cannot be executed without it."""
        out = self._slots.cancel(request.scheduling, request, self._clock.now_ns())
        for each in out:
            reject(each, RequestCancelledError(""), self._statistics, FailureReason.CANCELED)
        self._wake()

    def _instance_lost(self, instance: Instance) -> None:
        """The worker died and its model forgot the sequences.

        # Differs from Triton: there the requests that follow fail for ever. Sequences of a model
        # with implicit state go on, since their state is here.
        """
        at = self._positions.get(instance)
        if at is None or self._states:
            return
        for request in self._slots.lose(at, self._clock.now_ns()):
            error = UnavailableError(
                f"sequence {request.correlation_id} of model '{self._name}' is lost: model "
                f"instance '{instance.name}' ended unexpectedly"
            )
            reject(request, error, self._statistics, FailureReason.BACKEND)
        self._wake()

    # ---------------------------------------------------------------- time

    def _on_timer(self) -> None:
        now_ns = self._clock.now_ns()
        self._slots.expire_idle(now_ns)
        for request in self._slots.expire_backlog(now_ns):
            text = "timeout of the corresponding sequence has been expired"
            reject(request, UnavailableError(text), self._statistics)
        self._dispatch()


def _in_order(own: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """States, controls and the client's inputs in this order.

    `inputs` has the former states and controls too if the request was executed before.
    """
    return {**own, **inputs, **own}


def _ignore(response: InferenceResponse | None, final: bool) -> None:
    """What becomes of a filler's output."""
