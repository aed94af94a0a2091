"""Trials of sharing callers out among instances; what they come to is in test_closed_loop.py."""

from __future__ import annotations

from itertools import pairwise

from npuserve.server.fair_share import FairShare

MS = 1_000_000
DELAY_NS = 2 * MS
WHOLE = 8


class Callers:
    """Eight callers, always queued together, against two instances of a model."""

    def __init__(self) -> None:
        self.fair_share = FairShare(WHOLE, DELAY_NS)
        self.now_ns = MS
        self.size = WHOLE

    def round(self, took_ns: int, instances: int = 2) -> None:
        """All of them are served once."""
        elements = self.size
        for queued in range(WHOLE, 0, -elements):
            self.size = self.fair_share.started(self.now_ns, elements, queued, WHOLE, instances)
        self.now_ns += took_ns
        if self.fair_share.gathering:
            assert not self.fair_share.gathers(self.now_ns, WHOLE, WHOLE, took_ns)
            assert not self.fair_share.gathering

    def until(self, size: int, took_ns: int = MS) -> None:
        """Rounds until batches are complete at this size."""
        for _ in range(100):
            self.round(took_ns)
            if self.size == size:
                return
        raise AssertionError(f"batches are still complete at {self.size}")


def test_nothing_is_tried_with_one_instance() -> None:
    """Nobody is there to share with."""
    callers = Callers()
    for _ in range(100):
        callers.round(MS, instances=1)
        assert callers.size == WHOLE


def test_an_instance_that_dies_ends_the_trial() -> None:
    """Batches are whole again from the next one on."""
    callers = Callers()
    callers.until(WHOLE // 2)
    callers.round(MS, instances=1)
    assert callers.size == WHOLE


def test_whole_batches_wait_for_everybody_but_not_for_long() -> None:
    """An execution and a half and the queue delay at most; then they are whole, and go."""
    callers = Callers()
    callers.until(WHOLE // 2)
    callers.until(WHOLE)
    fair_share = callers.fair_share
    # Another turn of shares, then everybody but one comes back.
    callers.until(WHOLE // 2)
    complete = WHOLE // 2
    while complete != WHOLE:
        complete = fair_share.started(callers.now_ns, WHOLE // 2, WHOLE // 2, WHOLE, 2)
    assert fair_share.gathers(callers.now_ns, WHOLE - 1, WHOLE, 4 * MS)
    assert fair_share.gather_until_ns == callers.now_ns + 6 * MS + DELAY_NS
    assert fair_share.gathers(fair_share.gather_until_ns - 1, WHOLE - 1, WHOLE, 4 * MS)
    assert not fair_share.gathers(fair_share.gather_until_ns, WHOLE - 1, WHOLE, 4 * MS)
    callers.now_ns = fair_share.gather_until_ns
    callers.size = WHOLE
    for _ in range(50):  # the trial is over
        callers.round(MS)
        assert callers.size == WHOLE


def test_trials_become_rare() -> None:
    """Where sharing out never pays, less and less time is spent on it."""
    callers = Callers()
    begun = []
    former = WHOLE
    while callers.now_ns < 200_000 * MS:
        callers.round(2 * MS if callers.size < WHOLE else MS)
        if callers.size < former:
            begun.append(callers.now_ns)
        former = callers.size
    # Three turns of shares in each trial; rests of 1, 2, 4, ... 32 s.
    trials = begun[::3]
    rests = [later - earlier for earlier, later in pairwise(trials)]
    assert rests == sorted(rests)
    assert 30_000 * MS < rests[-1] < 36_000 * MS
