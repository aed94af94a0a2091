"""When waiting longer for a larger batch is in vain; pure.

`max_queue_delay_microseconds` is the longest a request waits for others to share its batch. Callers
that wait for their answers before they ask again (services with a fixed number of threads, load
generators) are never more than so many; once all of them are queued, nobody can join and
the rest of the delay is lost.

# Differs from Triton: Triton waits to the end of the delay, also for callers that do not exist.

Nothing is assumed. The most batch elements that were inside (queued or being executed) at one time
are watched over the last batches; only a queue that holds that many goes early. An open stream
of requests, whose number inside varies, seldom reaches its own peak, and what it reaches then is
the largest batch it has had.
"""

from __future__ import annotations

from npuserve.server.regrouping import NEVER

_WINDOW = 32  # batches; the peak is that of the running window and the one before


class Gathering:
    """Watches how many batch elements are inside at a time.

    Attributes:
        complete_at: batch elements in the queue at which nobody else is expected; NEVER before
            a whole window was seen.
    """

    __slots__ = ("_batches", "_former_peak", "_peak", "complete_at")

    def __init__(self) -> None:
        self._batches = 0
        self._peak = 0
        self._former_peak = 0
        self.complete_at = NEVER

    def arrived(self, inside: int) -> None:
        """A request came in, and now so many batch elements are inside."""
        if inside > self._peak:
            self._peak = inside
            if inside > self.complete_at:
                self.complete_at = inside

    def started(self) -> None:
        """A batch left the queue."""
        self._batches += 1
        if self._batches == _WINDOW:
            self.complete_at = max(self._peak, self._former_peak)
            self._former_peak, self._peak, self._batches = self._peak, 0, 0
