"""The request queue of the dynamic batcher: priority levels, limits, timeouts, cancellation.

Pure: no clock, no callbacks; the caller says what time it is and answers what falls out. All
operations are O(1) amortised (O(log n) where queue timeouts are configured): a request that
leaves from the middle stays as a tombstone until the tombstones outnumber the living.

Source: Triton core src/scheduler_utils.cc (PolicyQueue, PriorityQueue).
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from npuserve.errors import UnavailableError
from npuserve.model_config import enum_name
from npuserve.server.validation import request_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npuserve.request import InferenceRequest


_SPARE_LEVELS = 64  # priority levels that may be kept empty


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """A ModelQueuePolicy message in the units used inside.

    Attributes:
        delays: timeout_action is DELAY: expired requests wait behind the others.
        timeout_ns: 0 means that requests never expire.
        allow_override: a request may ask for a shorter timeout.
        max_size: requests the level may hold; 0 means any number.
    """

    delays: bool = False
    timeout_ns: int = 0
    allow_override: bool = False
    max_size: int = 0

    @classmethod
    def from_config(cls, message: Any) -> QueuePolicy:
        """Read a ModelQueuePolicy message."""
        return cls(
            delays=enum_name(message, "timeout_action") == "DELAY",
            timeout_ns=message.default_timeout_microseconds * 1_000,
            allow_override=message.allow_timeout_override,
            max_size=message.max_queue_size,
        )

    def request_timeout_ns(self, request: InferenceRequest) -> int:
        """How long this request may wait; 0 for any time. A request can only shorten it."""
        wished_ns = request.timeout_us * 1_000
        if self.allow_override and 0 < wished_ns < self.timeout_ns:
            return wished_ns
        return self.timeout_ns


class Lane:
    """A FIFO of requests that may leave from the middle at no cost.

    `request.scheduling` says in which lane a request is; anything else in the deque is a
    tombstone. Invariant: tombstones never outnumber the living.
    """

    __slots__ = ("_requests", "live")

    def __init__(self) -> None:
        self._requests: deque[InferenceRequest] = deque()
        self.live = 0

    def __iter__(self) -> Iterator[InferenceRequest]:
        for request in self._requests:
            if request.scheduling is self:
                yield request

    @property
    def first(self) -> InferenceRequest:
        """The request that `pop` gives; the lane must not be empty."""
        return next(iter(self))

    def append(self, request: InferenceRequest) -> None:
        """Put a request at the end."""
        request.scheduling = self
        self._requests.append(request)
        self.live += 1

    def pop(self) -> InferenceRequest:
        """Take the first request out; the lane must not be empty."""
        requests = self._requests
        request = requests.popleft()
        while request.scheduling is not self:
            request = requests.popleft()
        request.scheduling = None
        self.live -= 1
        if len(requests) > 2 * self.live:
            self._bury()
        return request

    def discard(self, request: InferenceRequest) -> None:
        """Take a request of this lane out, wherever it stands."""
        request.scheduling = None
        self.live -= 1
        if len(self._requests) > 2 * self.live:
            self._bury()

    def _bury(self) -> None:
        self._requests = deque(self)


class Level:
    """One priority level: its policy, its requests, and when they expire."""

    __slots__ = ("_deadlines", "_sequence", "delayed", "policy", "unexpired")

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.unexpired = Lane()
        self.delayed = Lane()  # expired ones under DELAY: served after all others of the level
        # Heap of (deadline, sequence, request). Stale once the request is not in `unexpired`.
        self._deadlines: list[tuple[int, int, InferenceRequest]] = []
        self._sequence = 0

    @property
    def live(self) -> int:
        """Number of requests."""
        return self.unexpired.live + self.delayed.live

    def push(self, request: InferenceRequest, now_ns: int) -> int:
        """See `PriorityQueue.push`."""
        policy = self.policy
        if policy.max_size and self.live >= policy.max_size:
            raise UnavailableError(request_prefix(request.id) + "Exceeds maximum queue size")
        self.unexpired.append(request)
        if not policy.timeout_ns:
            return 0
        deadline_ns = now_ns + policy.request_timeout_ns(request)
        self._sequence += 1
        heapq.heappush(self._deadlines, (deadline_ns, self._sequence, request))
        return deadline_ns

    def forget_the_gone(self) -> None:
        """Requests have left: let go of them once they are the most in the heap."""
        deadlines, lane = self._deadlines, self.unexpired
        if len(deadlines) > 2 * lane.live:
            self._deadlines = deadlines = [d for d in deadlines if d[2].scheduling is lane]
            heapq.heapify(deadlines)

    def next_deadline_ns(self) -> int:
        """When the next request expires; 0 if none will."""
        deadlines, lane = self._deadlines, self.unexpired
        while deadlines and deadlines[0][2].scheduling is not lane:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else 0

    def expire(self, now_ns: int) -> list[InferenceRequest]:
        """Move expired requests behind the others, or out of the level and into the result."""
        rejected = []
        while 0 < self.next_deadline_ns() <= now_ns:
            request = heapq.heappop(self._deadlines)[2]
            self.unexpired.discard(request)
            if self.policy.delays:
                self.delayed.append(request)
            else:
                rejected.append(request)
        return rejected


class PriorityQueue:
    """Requests of one model in the order they are to be served.

    A level is made when the first request comes and lost when it is empty and others are made, so
    that any number of levels costs what the requests in them do.

    Args:
        policy: of the levels without an own one.
        levels: how many there are; 1 is the most urgent.
        default_level: of requests without a (valid) priority.
        own_policies: by level.

    Attributes:
        live: number of requests.
        elements: batch elements of all requests, at least 1 a request.
        entered: batch elements that ever came in; only grows.
        timed: whether requests can expire.
        handed_over_early: whether a batch may leave for an instance that is still busy. Not with
            timeouts, limits or priorities: they hold until the execution starts.
    """

    __slots__ = (
        "_count",
        "_default",
        "_default_level",
        "_lanes",
        "_levels",
        "_order",
        "_own_policies",
        "_policy",
        "elements",
        "entered",
        "handed_over_early",
        "live",
        "timed",
    )

    def __init__(
        self,
        policy: QueuePolicy,
        *,
        levels: int = 1,
        default_level: int = 1,
        own_policies: Mapping[int, QueuePolicy] | None = None,
    ) -> None:
        own = own_policies or {}
        policies = [*own.values(), policy] if len(own) < levels else list(own.values())
        self._policy = policy
        self._own_policies = own
        self._count = levels
        self._default_level = default_level
        self._default = Level(own.get(default_level, policy))
        self._levels = {default_level: self._default}
        # Those that are there, in the order of urgency: their numbers, and the two lanes of each.
        self._order = [default_level]
        self._lanes = [self._default.unexpired, self._default.delayed]
        self.timed = any(each.timeout_ns for each in policies)
        limited = any(each.max_size for each in policies)
        self.handed_over_early = levels == 1 and not (self.timed or limited)
        self.live = 0
        self.elements = 0
        self.entered = 0

    @classmethod
    def from_config(cls, message: Any) -> PriorityQueue:
        """The queue a ModelDynamicBatching message asks for."""
        policy = QueuePolicy.from_config(message.default_queue_policy)
        if not message.priority_levels:
            return cls(policy)
        return cls(
            policy,
            levels=message.priority_levels,
            default_level=message.default_priority_level,
            own_policies={
                level: QueuePolicy.from_config(own)
                for level, own in message.priority_queue_policy.items()
                if 0 < level <= message.priority_levels
            },
        )

    def __len__(self) -> int:
        return self.live

    def __iter__(self) -> Iterator[InferenceRequest]:
        """Requests in service order: by level, and in a level the unexpired before the delayed."""
        if len(self._lanes) == 2 and not self._lanes[1].live:
            return iter(self._lanes[0])
        return chain.from_iterable(lane for lane in self._lanes if lane.live)

    def push(self, request: InferenceRequest, now_ns: int) -> int:
        """Append `request` to its priority level and note when it expires.

        Args:
            request: in the queue once this returns; still the caller's if it raises.
            now_ns: monotonic.

        Returns:
            When it expires; 0 for never.

        Raises:
            UnavailableError: the level already holds max_queue_size requests.
        """
        # Without levels the request's priority means nothing; out of range is the default level.
        level = self._default
        if 0 < request.priority <= self._count and request.priority != self._default_level:
            level = self._levels.get(request.priority) or self._make_level(request.priority)
        deadline_ns = level.push(request, now_ns)
        elements = request.batch_size or 1
        self.live += 1
        self.elements += elements
        self.entered += elements
        return deadline_ns

    def _make_level(self, priority: int) -> Level:
        """A level that is not there, in place of empty ones once these are the most."""
        if len(self._levels) > 2 * self.live + _SPARE_LEVELS:
            self._drop_empty_levels()
        level = self._levels[priority] = Level(self._own_policies.get(priority, self._policy))
        at = bisect(self._order, priority)
        self._order.insert(at, priority)
        self._lanes[2 * at : 2 * at] = [level.unexpired, level.delayed]
        return level

    def _drop_empty_levels(self) -> None:
        default, levels = self._default, self._levels
        self._order = [at for at in self._order if levels[at].live or levels[at] is default]
        self._levels = {at: levels[at] for at in self._order}
        self._lanes = [
            lane for each in self._levels.values() for lane in (each.unexpired, each.delayed)
        ]

    def discard(self, request: InferenceRequest) -> None:
        """Take out a request that was cancelled."""
        lane: Lane = request.scheduling
        lane.discard(request)
        self._left(request)
        self._forget_the_gone()

    def take(self, count: int) -> list[InferenceRequest]:
        """Take out the first `count` requests."""
        taken: list[InferenceRequest] = []
        for lane in self._lanes:
            for _ in range(min(lane.live, count - len(taken))):
                request = lane.pop()
                self._left(request)
                taken.append(request)
            if len(taken) == count:
                break
        self._forget_the_gone()
        return taken

    def expire(self, now_ns: int) -> list[InferenceRequest]:
        """Requests whose time is over and that are to be rejected; they are out of the queue."""
        rejected = [request for level in self._levels.values() for request in level.expire(now_ns)]
        for request in rejected:
            self._left(request)
        return rejected

    def next_deadline_ns(self) -> int:
        """When the next request expires; 0 if none will."""
        deadlines = [level.next_deadline_ns() for level in self._levels.values()]
        return min((deadline for deadline in deadlines if deadline), default=0)

    def _forget_the_gone(self) -> None:
        if self.timed:
            for level in self._levels.values():
                level.forget_the_gone()

    def _left(self, request: InferenceRequest) -> None:
        self.live -= 1
        self.elements -= request.batch_size or 1
