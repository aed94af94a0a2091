"""Whether callers who wait together are better served by several instances side by side; pure.

Callers that wait for their answers before they ask again end up in step where there is a queue
delay: all of them are in one batch, one instance executes it, and the others have nothing to do.
Two batches of half the size can be executed side by side, and while one is, the callers of the
other one are answered and ask again. That pays where an execution's time goes with its size and
there are cores (or devices) to spare. It does not where a batch costs the same whatever its size,
or where the instances only take turns (one device, Python in threads).

# Differs from Triton: Triton always lets the batch grow.

Nothing is assumed: both ways are tried in turns for some batches, and the one that served clearly
more batch elements in the same time is kept for a while. Before that, a row of batches must have
found everybody queued, so an open stream of requests is left alone. And since callers who are out
of step may stay so, they are gathered again whenever whole batches have their turn.
"""

from __future__ import annotations

from statistics import median

_ROW = 8  # batches that found everybody queued
_ROUNDS = 8  # a turn lasts until everybody was served so many times
_TURNS = 6  # both ways in alternation, shares first
_GAIN = 1.05  # less may be noise
_MIN_REST_NS = 1_000_000_000  # doubled as long as trials come to the same
_MAX_REST_NS = 32_000_000_000
_REST_PER_TRIAL = 16  # at least, so that trying costs little where one way is much worse


class FairShare:
    """Watches batches start, and says when one is complete.

    Args:
        max_batch: batch elements a batch may have.
        delay_ns: the longest a request waits for others.

    Attributes:
        gathering: whole batches have their turn next; `gathers` says whether to wait for one.
        gather_until_ns: see `gathers`.
    """

    __slots__ = (
        "_began_ns",
        "_callers",
        "_delay_ns",
        "_max_batch",
        "_rates",
        "_rest_ns",
        "_rest_until_ns",
        "_row",
        "_served",
        "_shared",
        "_turn_ns",
        "_was_shared",
        "gather_until_ns",
        "gathering",
    )

    def __init__(self, max_batch: int, delay_ns: int) -> None:
        self._max_batch = max_batch
        self._delay_ns = delay_ns
        self._shared = False
        self._was_shared = False  # before the trial
        self._callers = 0  # at the last trial
        self._row = 0  # batches in a row that found everybody queued
        self._rest_ns = _MIN_REST_NS
        self._rest_until_ns = 0
        self._began_ns = 0  # when the trial did; 0 between trials
        self._turn_ns = 0  # when the turn did; 0 before its first batch
        self._served = 0  # batch elements of the turn
        self._rates: list[float] = []  # batch elements per ns, by turn
        self.gathering = False
        self.gather_until_ns = 0

    def started(self, now_ns: int, elements: int, queued: int, callers: int, instances: int) -> int:
        """A batch starts.

        Args:
            elements: batch elements in it.
            queued: batch elements that were queued, its own among them.
            callers: batch elements that are inside when all callers wait.
            instances: that take batches.

        Returns:
            Batch elements at which the next batch is complete.
        """
        share = -(-callers // max(1, instances))
        if share >= min(callers, self._max_batch):  # one instance; or more callers than they hold
            if self._began_ns:
                self._end(now_ns, shared=False)
            return self._max_batch
        if self._began_ns:
            self._count(now_ns, elements, callers)
        else:
            self._row = self._row + 1 if self._shared or queued >= callers else 0
            if self._row >= _ROW:
                self._begin(now_ns, elements, callers)
        return share if self._shared else self._max_batch

    def gathers(self, now_ns: int, queued: int, callers: int, execution_ns: float) -> bool:
        """While `gathering`: whether the next batch waits for everybody.

        Until `gather_until_ns` at most. Who is not back by then has gone, or never waited.

        Args:
            queued, callers: see `started`.
            execution_ns: what an execution takes on average.
        """
        if not self.gather_until_ns:
            self.gather_until_ns = now_ns + int(1.5 * execution_ns) + self._delay_ns
        if queued < callers:
            if now_ns < self.gather_until_ns:
                return True
            self._end(now_ns, shared=False)
        self.gathering = False
        return False

    def _begin(self, now_ns: int, elements: int, callers: int) -> None:
        if not self._callers < 2 * callers < 4 * self._callers:  # others than at the last trial
            self._rest_ns, self._rest_until_ns = _MIN_REST_NS, 0
        if now_ns < self._rest_until_ns:
            return
        self._callers, self._was_shared, self._shared = callers, self._shared, True
        self._began_ns = self._turn_ns = now_ns
        self._served = elements

    def _count(self, now_ns: int, elements: int, callers: int) -> None:
        if not self._turn_ns:
            self._turn_ns = now_ns
        elif self._served >= _ROUNDS * callers:
            self._rates.append(self._served / max(1, now_ns - self._turn_ns))
            if len(self._rates) == _TURNS:
                shared, whole = median(self._rates[::2]), median(self._rates[1::2])
                self._end(now_ns, shared=shared > _GAIN * whole)
                return
            self._shared = not self._shared
            self._served = 0
            if not self._shared:
                self._turn_ns, self.gathering, self.gather_until_ns = 0, True, 0
                return
            self._turn_ns = now_ns
        self._served += elements

    def _end(self, now_ns: int, *, shared: bool) -> None:
        if shared != self._was_shared:
            self._rest_ns = _MIN_REST_NS
        rest_ns = max(self._rest_ns, _REST_PER_TRIAL * (now_ns - self._began_ns))
        self._rest_until_ns = now_ns + rest_ns
        self._rest_ns = min(2 * self._rest_ns, _MAX_REST_NS)
        self._shared, self.gathering = shared, False
        self._began_ns = self._row = 0
        self._rates.clear()
