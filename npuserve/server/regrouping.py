"""When to wait a moment for the callers of the last batch to come back; pure.

Callers that send their next request as soon as they have an answer (most load generators, many
services) fall into two halves otherwise: one half is in the running batch, the other one queued,
and each execution serves half of what it could. Waiting a fraction of an execution for the
callers who were just answered joins the halves for good.

# Differs from Triton: Triton starts whatever is queued, and serves such callers at half speed.

Nothing is assumed. How long callers take to come back is observed without waiting, and what a
joined execution saves is fitted from past executions (their cost is `fixed + slope x elements`;
joining two saves one `fixed`). There is a hold only while the observed return time is well below
that, so an open stream of requests never sees one.
"""

from __future__ import annotations

_KEEP = 0.9  # weight of the past in the fit of execution costs
_SLACK_NS = 100_000  # beyond half as much again as callers usually take
_TOO_SHORT_NS = 2 * _SLACK_NS  # an execution this short cannot save as much as a hold costs
NEVER = 1 << 62


class ExecutionCost:
    """Least squares of execution time against batch elements, the recent past weighing most."""

    __slots__ = ("_n", "_nn", "_nt", "_t", "_weight")

    def __init__(self) -> None:
        self._weight = self._n = self._t = self._nn = self._nt = 0.0

    def add(self, elements: int, duration_ns: int) -> None:
        """One execution of this many batch elements took so long."""
        self._weight = self._weight * _KEEP + 1
        self._n = self._n * _KEEP + elements
        self._t = self._t * _KEEP + duration_ns
        self._nn = self._nn * _KEEP + elements * elements
        self._nt = self._nt * _KEEP + elements * duration_ns

    @property
    def mean_ns(self) -> float:
        """Average duration; 0 before the first execution."""
        return self._t / self._weight if self._weight else 0.0

    @property
    def fixed_ns(self) -> float:
        """The part of an execution's time that does not depend on its size.

        All of it as long as every batch had the same size: trying is how to find out.
        """
        if not self._weight:
            return 0.0
        mean_n, mean_t = self._n / self._weight, self._t / self._weight
        variance = self._nn / self._weight - mean_n * mean_n
        if variance < 0.25:
            return mean_t
        slope = (self._nt / self._weight - mean_n * mean_t) / variance
        return min(mean_t, max(0.0, mean_t - slope * mean_n))


class Regrouping:
    """Watches executions end and callers return; says how long the next batch may be held.

    "Entered" is a running count of batch elements that ever came into the queue.

    Attributes:
        target: value of "entered" at which the callers answered last are back; NEVER once they
            are, or where executions are too short for a hold.
        hold_until_ns: end of the hold that is worth it now; 0 for none.
    """

    __slots__ = ("_cost", "_opened_ns", "_return_ns", "hold_until_ns", "target")

    def __init__(self) -> None:
        self._cost = ExecutionCost()
        self._return_ns = 0.0  # how long callers take to come back, averaged; 0: not seen yet
        self._opened_ns = 0
        self.target = NEVER
        self.hold_until_ns = 0

    @property
    def mean_execution_ns(self) -> float:
        """Average time an execution takes; 0 as long as all were too short for a hold."""
        return self._cost.mean_ns

    def executed(self, now_ns: int, duration_ns: int, elements: int, entered: int) -> None:
        """An execution ended and its callers were answered."""
        if duration_ns <= _TOO_SHORT_NS and self.target == NEVER:
            return
        self._cost.add(elements, duration_ns)
        mean_ns = self._cost.mean_ns
        if self.target != NEVER:
            if now_ns - self._opened_ns < mean_ns / 2:  # another instance, nearly at once
                self.target += elements
                return
            self._learn(max(mean_ns, now_ns - self._opened_ns))  # not back for a whole execution
        self._opened_ns = now_ns
        self.target = entered + elements
        self.hold_until_ns = now_ns + self._budget_ns()

    def returned(self, now_ns: int) -> None:
        """`target` was reached: all callers are back, nothing is left to wait for."""
        self._learn(now_ns - self._opened_ns)
        self.target = NEVER
        self.hold_until_ns = 0

    def _learn(self, took_ns: float) -> None:
        if self._return_ns:
            self._return_ns += (took_ns - self._return_ns) / 4
        else:
            self._return_ns = max(1.0, took_ns)

    def _budget_ns(self) -> int:
        if not self._return_ns:
            return 0
        wanted_ns = self._return_ns * 1.5 + _SLACK_NS
        return int(wanted_ns) if wanted_ns <= self._cost.fixed_ns / 2 else 0
