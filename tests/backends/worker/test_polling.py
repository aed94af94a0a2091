"""Polling for quick workers: only lone requests, only as long as it pays."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import pytest

from npuserve.backends.worker import polling
from npuserve.backends.worker.polling import LONGEST_POLL_NS, ReplyPolling

if TYPE_CHECKING:
    from collections.abc import Callable


class Loop:
    """An event loop that counts how often it is kept awake; its time is under control."""

    def __init__(self) -> None:
        self.now_ns = 1
        self.ready: deque[Callable[[], None]] = deque()

    def pass_time(self, ns: int) -> int:
        """Turn for so long, 10 µs a turn; gives the number of polls."""
        polls, end = 0, self.now_ns + ns
        while self.now_ns < end:
            self.now_ns += 10_000
            if self.ready:
                self.ready.popleft()()
                polls += 1
        return polls


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(polling, "_now_ns", lambda: loop.now_ns)
    return loop


def exchange(loop: Loop, poller: ReplyPolling, took_ns: int) -> int:
    poller.sent()
    polls = loop.pass_time(took_ns)
    poller.answered()
    loop.pass_time(20_000)
    return polls


def test_the_loop_is_kept_awake_until_the_reply(loop: Loop) -> None:
    """A quick model's reply is polled for, and then nothing more happens."""
    poller = ReplyPolling(loop.ready.append)
    assert exchange(loop, poller, 50_000) == 5
    assert not loop.ready


def test_polling_ends_when_the_reply_is_late(loop: Loop) -> None:
    """However long a reply takes, the loop sleeps again soon."""
    poller = ReplyPolling(loop.ready.append)
    poller.sent()
    assert loop.pass_time(50 * LONGEST_POLL_NS) <= LONGEST_POLL_NS / 10_000 + 1


def test_a_slow_model_is_not_polled_for(loop: Loop) -> None:
    """After a few slow replies nothing is spent on it."""
    poller = ReplyPolling(loop.ready.append)
    for _ in range(5):
        exchange(loop, poller, 5_000_000)
    assert exchange(loop, poller, 5_000_000) == 0


def test_polling_comes_back_after_a_hiccup(loop: Loop) -> None:
    """A model that is quick again is polled for again."""
    poller = ReplyPolling(loop.ready.append)
    exchange(loop, poller, 1_000_000_000)
    for _ in range(20):
        exchange(loop, poller, 60_000)
    assert exchange(loop, poller, 60_000) > 0


def test_nothing_is_polled_for_once_more_than_one_batch_is_out(loop: Loop) -> None:
    """Under load the loop has other things to do."""
    poller = ReplyPolling(loop.ready.append)
    poller.sent()
    poller.answered()
    loop.pass_time(20_000)
    assert not loop.ready
