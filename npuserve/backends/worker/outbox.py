"""Responses of a decoupled model on their way to the server, several to a message.

A message and its wake-up cost more than a small response. So the first response after a pause goes
at once, and those that follow it closely are kept for a moment: until the execution is over, until
enough have gathered, or until the model lets go of the interpreter (it waits for something, or
has computed for the interpreter's switch interval, 5 ms), whichever comes first.

Runs in every interpreter a worker may have: standard library only.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from npuserve.backends.worker import wire

if TYPE_CHECKING:
    from npuserve.backends.worker.channel import Channel

_CLOSE_NS = 500_000  # responses closer than this belong together
_MOST = 64  # responses of one message

_now_ns = time.monotonic_ns


class Outbox:
    """Gathers `RESPONSES`. Methods take the channel's lock; any thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._items: list[Any] = []
        self._sent_ns = 0
        # Rung when the first response is kept; a thread waits for it, and then for its turn in
        # the interpreter.
        self._bell: SimpleQueue[None] | None = None

    def put(self, key: Any, response: Any, final: bool) -> None:
        """Send a response, now or soon. Its tensors must not change any more."""
        with self._channel.lock:
            self._items.append((key, response, final))
            count = len(self._items)
            now_ns = _now_ns()
            alone = count == 1 and now_ns - self._sent_ns > _CLOSE_NS
            if alone or count == _MOST:
                self.flush()
            elif count == 1:
                self._ring()

    def flush(self) -> None:
        """Send what was kept; before anything that must not overtake it."""
        with self._channel.lock:
            items, self._items = self._items, []
            if items:
                self._sent_ns = _now_ns()
                self._channel.send(wire.RESPONSES, tuple(items))

    def _ring(self) -> None:
        if self._bell is None:
            self._bell = SimpleQueue()
            threading.Thread(
                target=self._flush_when_rung, args=(self._bell,), name="outbox", daemon=True
            ).start()
        self._bell.put(None)

    def _flush_when_rung(self, bell: SimpleQueue[None]) -> None:
        while True:
            bell.get()
            self.flush()
