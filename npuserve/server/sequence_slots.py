"""Which sequence is where: correlation id → instance and slot, backlog, idle sequences. Pure.

No clock, no callbacks and no answers: the caller says what time it is and answers the requests
that fall out. A sequence lives from its START to its END (or until it was idle too long):

    START ──▶ slot ─── END executed, or idle ──▶ over ──▶ its slot goes to the backlog's oldest
      └─▶ backlog ─┘  (no slot was free)

A START after the END was queued begins a new sequence of the same id. It is admitted when the
former one is over, so that two sequences of one id never run side by side.

Source: Triton core src/sequence_batch_scheduler (Enqueue, ReleaseSequenceSlot, ReaperThread).
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

from npuserve.errors import InvalidArgumentError, UnavailableError
from npuserve.request import SEQUENCE_END, SEQUENCE_START
from npuserve.server.schedulers.base import STOPPING

if TYPE_CHECKING:
    from collections.abc import Callable

    from npuserve.request import InferenceRequest

CorrelationId = int | str

NOWHERE = -1  # instance of a sequence without a slot

_MIN_STALE = 64  # stale deadlines below this number are not worth a clean-up


class Sequence:
    """One sequence and its requests that wait.

    Attributes:
        instance, slot: where it runs; NOWHERE in the backlog and behind its predecessor.
        requests: in the order they came; not the running one.
        running: the one being executed; never more than one.
        ended: no request can follow any more: END was queued, or the sequence was broken off.
        successor: the next sequence of this id, waiting for this one to be over.
        ready_ns: when `requests[0]` became the next to execute.
        deadline_ns: when its backlogged requests expire; 0 for never.
        state: the batcher's, e.g. implicit state tensors.
    """

    __slots__ = (
        "deadline_ns", "ended", "id", "instance", "ready_ns", "requests", "running", "slot",
        "state", "successor",
    )  # fmt: skip

    def __init__(self, correlation_id: CorrelationId) -> None:
        self.id = correlation_id
        self.instance = NOWHERE
        self.slot = NOWHERE
        self.requests: deque[InferenceRequest] = deque()
        self.running: InferenceRequest | None = None
        self.ended = False
        self.successor: Sequence | None = None
        self.ready_ns = 0
        self.deadline_ns = 0
        self.state: Any = None

    @property
    def ready(self) -> bool:
        """Whether a request of it can be executed now."""
        return self.instance != NOWHERE and self.running is None and bool(self.requests)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do for it, now or later."""
        return self.ended and self.running is None and not self.requests


class SequenceSlots:
    """All live sequences of a model version.

    Args:
        model_name: for error texts.
        instances: number of instances.
        slots: sequences an instance can hold.
        idle_ns: how long a sequence may be without a request before it is forgotten.
        usable: whether an instance can be given new sequences now.

    Attributes:
        queued: requests that wait, in slots or not.
        table: by instance and slot: the sequence there.
        ready: by instance: sequences of which a request can be executed now, in the order in
            which they became ready.
    """

    def __init__(
        self,
        model_name: str,
        instances: int,
        slots: int,
        idle_ns: int,
        usable: Callable[[int], bool] = lambda instance: True,
    ) -> None:
        self._model_name = model_name
        self._idle_ns = idle_ns
        self._usable = usable
        self.queued = 0
        self.table: list[list[Sequence | None]] = [[None] * slots for _ in range(instances)]
        self.ready: list[dict[Sequence, None]] = [{} for _ in range(instances)]
        self._count = 0
        self._free = [list(range(slots)) for _ in range(instances)]  # heaps of slot numbers
        self._live: dict[CorrelationId, Sequence] = {}  # the newest sequence of an id
        self._backlog: dict[Sequence, None] = {}  # in order of arrival
        self._idle: dict[Sequence, int] = {}  # since when, so in order of time
        # Heap of (deadline, tie-breaker, sequence); stale unless it is the sequence's deadline_ns.
        self._deadlines: list[tuple[int, int, Sequence]] = []
        self._ties = itertools.count()

    def __len__(self) -> int:
        """Sequences that are not over."""
        return self._count

    @property
    def backlog(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._backlog)

    def find(self, correlation_id: CorrelationId) -> Sequence | None:
        """The live sequence of this id that takes its next request."""
        return self._live.get(correlation_id)

    # ---------------------------------------------------------------- requests come

    def add(
        self,
        request: InferenceRequest,
        now_ns: int,
        *,
        accept_new: bool = True,
        ends: bool = False,
    ) -> Sequence:
        """Append the request to its sequence, beginning one at a START.

        Args:
            request: has a correlation id; still the caller's if this raises.
            accept_new: False while the model is stopping; only live sequences go on.
            ends: nothing follows this request whatever its flags say.

        Raises:
            InvalidArgumentError: no such sequence is live, and this is no START.
            UnavailableError: a new sequence although none are accepted.
        """
        sequence = self._live.get(request.correlation_id)
        if sequence is None or sequence.ended:
            sequence = self._begin(request, sequence, now_ns, accept_new)
        else:
            self._idle.pop(sequence, None)
        sequence.requests.append(request)
        self.queued += 1
        if sequence.ready and len(sequence.requests) == 1:
            self._became_ready(sequence, now_ns)
        if ends or request.flags & SEQUENCE_END:
            sequence.ended = True
        if sequence in self._backlog:
            self._note_timeout(sequence, request, now_ns)
        return sequence

    def _begin(
        self,
        request: InferenceRequest,
        predecessor: Sequence | None,
        now_ns: int,
        accept_new: bool,
    ) -> Sequence:
        if not request.flags & SEQUENCE_START:
            raise InvalidArgumentError(
                f"inference request for sequence {request.correlation_id} to model "
                f"'{self._model_name}' must specify the START flag on the first request of the "
                "sequence"
            )
        if not accept_new:
            raise UnavailableError(STOPPING)
        sequence = self._live[request.correlation_id] = Sequence(request.correlation_id)
        self._count += 1
        if predecessor is not None:
            predecessor.successor = sequence
        else:
            self._admit(sequence, now_ns)
        return sequence

    def _admit(self, sequence: Sequence, now_ns: int) -> None:
        """Give the sequence a slot, or a place in the backlog."""
        if not self._backlog and self._place(sequence, now_ns):
            return
        self._backlog[sequence] = None
        self._note_timeouts(sequence)

    def _place(self, sequence: Sequence, now_ns: int) -> bool:
        """Put it into the lowest free slot, the lowest instance among equals."""
        best = NOWHERE
        for instance, free in enumerate(self._free):
            if (
                free
                and self._usable(instance)
                and (best == NOWHERE or free[0] < self._free[best][0])
            ):
                best = instance
        if best == NOWHERE:
            return False
        sequence.instance, sequence.slot = best, heapq.heappop(self._free[best])
        self.table[best][sequence.slot] = sequence
        if sequence.requests:
            self._became_ready(sequence, now_ns)
        return True

    # ---------------------------------------------------------------- requests are executed

    def take(self, sequence: Sequence) -> InferenceRequest:
        """The next request of a ready sequence, to be executed now."""
        request = sequence.requests.popleft()
        sequence.running = request
        self.queued -= 1
        del self.ready[sequence.instance][sequence]
        return request

    def put_back(self, sequence: Sequence, now_ns: int) -> None:
        """The running request is to be executed once more, before those behind it."""
        request, sequence.running = sequence.running, None
        if request is not None:
            sequence.requests.appendleft(request)
            self.queued += 1
            self._became_ready(sequence, now_ns)

    def done(self, sequence: Sequence, now_ns: int) -> None:
        """The running request has its final response: next one, idle, or over."""
        sequence.running = None
        if sequence.requests:
            self._became_ready(sequence, now_ns)
        elif sequence.ended:
            self._close(sequence, now_ns)
        else:
            self._idle[sequence] = now_ns

    def fill(self, now_ns: int) -> None:
        """Give free slots to the backlog, the oldest first."""
        while self._backlog:
            sequence = next(iter(self._backlog))
            if not self._place(sequence, now_ns):
                break
            del self._backlog[sequence]
            sequence.deadline_ns = 0

    def _became_ready(self, sequence: Sequence, now_ns: int) -> None:
        sequence.ready_ns = now_ns
        self.ready[sequence.instance][sequence] = None

    def _close(self, sequence: Sequence, now_ns: int) -> None:
        """Forget the sequence; what waited for its slot or its id moves up."""
        successor = self._forget(sequence, now_ns)
        while successor is not None and successor.over:  # cancelled while it waited
            successor = self._forget(successor, now_ns)
        if successor is not None:
            self._admit(successor, now_ns)

    def _forget(self, sequence: Sequence, now_ns: int) -> Sequence | None:
        """Give back what the sequence has; returns the next one of its id."""
        self._count -= 1
        self._idle.pop(sequence, None)
        self._backlog.pop(sequence, None)
        sequence.deadline_ns = 0
        if self._live.get(sequence.id) is sequence:
            del self._live[sequence.id]
        if sequence.instance != NOWHERE:
            self.ready[sequence.instance].pop(sequence, None)
            self.table[sequence.instance][sequence.slot] = None
            heapq.heappush(self._free[sequence.instance], sequence.slot)
            sequence.instance = NOWHERE
        self.fill(now_ns)
        successor, sequence.successor = sequence.successor, None
        return successor

    # ---------------------------------------------------------------- requests that leave

    def cancel(
        self, sequence: Sequence, request: InferenceRequest, now_ns: int
    ) -> list[InferenceRequest]:
        """A waiting request is not wanted any more; what needs it cannot be executed either.

        # Differs from Triton: it drops all requests of the sequence, once this one's turn comes.
        # Those before it are fine, and a START behind it does not need what is missing.

        Returns:
            The requests that are out.
        """
        waiting = list(sequence.requests)
        first = waiting.index(request)
        restart = first + 1 + _first_start(waiting[first + 1 :])
        if restart == len(waiting):
            sequence.ended = True
        self._keep(sequence, waiting[:first] + waiting[restart:], now_ns)
        return waiting[first:restart]

    def lose(self, instance: int, now_ns: int) -> list[InferenceRequest]:
        """The instance forgot its sequences: of what waits, only a START makes sense now.

        Returns:
            The requests that are out.
        """
        out: list[InferenceRequest] = []
        for sequence in [each for each in self.table[instance] if each is not None]:
            waiting = list(sequence.requests)
            restart = _first_start(waiting)
            out += waiting[:restart]
            if restart == len(waiting):
                sequence.ended = True
            self._keep(sequence, waiting[restart:], now_ns)
        return out

    def _keep(self, sequence: Sequence, kept: list[InferenceRequest], now_ns: int) -> None:
        """Let only these requests of the sequence wait on."""
        self.queued -= len(sequence.requests) - len(kept)
        sequence.requests = deque(kept)
        if sequence.deadline_ns:  # it may have been that of a request that is out
            sequence.deadline_ns = 0
            self._note_timeouts(sequence)
        if kept or sequence.running is not None:
            return
        if sequence.instance != NOWHERE:
            self.ready[sequence.instance].pop(sequence, None)
        # Behind its predecessor it is the predecessor's end that closes it.
        if sequence.instance != NOWHERE or sequence in self._backlog:
            self._close(sequence, now_ns)

    # ---------------------------------------------------------------- time

    def expire_idle(self, now_ns: int) -> None:
        """Forget sequences that have been idle too long."""
        self._drop_idle(now_ns - self._idle_ns, now_ns)

    def make_room(self, now_ns: int) -> None:
        """Forget every idle sequence, so that the backlog can run; for a model that stops."""
        if self._backlog:
            self.forget_idle(now_ns)

    def forget_idle(self, now_ns: int) -> None:
        """Forget every idle sequence."""
        self._drop_idle(now_ns, now_ns)

    def _drop_idle(self, since_ns: int, now_ns: int) -> None:
        """Forget the sequences that are idle since then or longer."""
        while self._idle:
            sequence, idle_ns = next(iter(self._idle.items()))
            if idle_ns > since_ns:
                break
            sequence.ended = True
            self._close(sequence, now_ns)

    def expire_backlog(self, now_ns: int) -> list[InferenceRequest]:
        """Requests of backlogged sequences of which one request waited longer than it wished."""
        out: list[InferenceRequest] = []
        while 0 < self._next_deadline_ns() <= now_ns:
            sequence = heapq.heappop(self._deadlines)[2]
            out += sequence.requests
            sequence.ended = True
            self._keep(sequence, [], now_ns)
        return out

    def next_event_ns(self) -> int:
        """When to call `expire_idle` and `expire_backlog` next; 0 for never."""
        idle_ns = next(iter(self._idle.values())) + self._idle_ns if self._idle else 0
        deadline_ns = self._next_deadline_ns()
        return min(idle_ns or deadline_ns, deadline_ns or idle_ns)

    def _note_timeouts(self, sequence: Sequence) -> None:
        """The sequence waits in the backlog as long as each of its requests wishes to."""
        for request in sequence.requests:
            self._note_timeout(sequence, request, request.queue_ns)

    def _note_timeout(self, sequence: Sequence, request: InferenceRequest, since_ns: int) -> None:
        deadline_ns = since_ns + request.timeout_us * 1_000
        if request.timeout_us and not 0 < sequence.deadline_ns <= deadline_ns:
            sequence.deadline_ns = deadline_ns
            heapq.heappush(self._deadlines, (deadline_ns, next(self._ties), sequence))

    def _next_deadline_ns(self) -> int:
        deadlines = self._deadlines
        if len(deadlines) > 2 * len(self._backlog) + _MIN_STALE:
            self._deadlines = deadlines = [d for d in deadlines if d[0] == d[2].deadline_ns]
            heapq.heapify(deadlines)
        while deadlines and deadlines[0][0] != deadlines[0][2].deadline_ns:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else 0


def _first_start(requests: list[InferenceRequest]) -> int:
    """Position of the first START, the number of requests if there is none."""
    for position, request in enumerate(requests):
        if request.flags & SEQUENCE_START:
            return position
    return len(requests)
