"""Whether to poll for a quick worker's reply instead of sleeping until it comes. Pure but for time.

A model that takes some ten microseconds answers before the event loop has properly fallen asleep,
and being woken costs both processes more than the wait: the loop goes on looking for events
meanwhile. Only for a lone request of a model that has been answering within the time, so an
idle server and a slow model never cost a cycle more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_now_ns = time.monotonic_ns

LONGEST_POLL_NS = 150_000


class ReplyPolling:
    """Polls for one worker.

    Args:
        call_soon: the event loop's; a call to it makes the loop look for events without sleeping.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call_soon
        self._mean_ns = 0.0  # how long replies to lone requests take
        self._sent_ns = 0  # 0: none is awaited

    def sent(self) -> None:
        """A lone request went to the worker."""
        self._sent_ns = _now_ns()
        if self._mean_ns < LONGEST_POLL_NS:
            self._call_soon(self._poll)

    def _poll(self) -> None:
        if self._sent_ns and _now_ns() - self._sent_ns < LONGEST_POLL_NS:
            self._call_soon(self._poll)

    def answered(self) -> None:
        """A reply came, or more than one is awaited by now: sleep again."""
        if self._sent_ns:
            # Bounded, so that one hiccup does not end the polling for long.
            took_ns = min(_now_ns() - self._sent_ns, 4 * LONGEST_POLL_NS)
            self._mean_ns += (took_ns - self._mean_ns) / 8
            self._sent_ns = 0
