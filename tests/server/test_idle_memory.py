"""When memory goes back to the system."""

from __future__ import annotations

import pytest

from npuserve.buffer_pool import BufferPool
from npuserve.server.idle_memory import IdleMemory, release_heap
from npuserve.testing.clock import FakeClock


class Rig:
    """An IdleMemory on a virtual clock; `happened` counts what happened."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.pool = BufferPool()
        self.happened = 0
        self.heap_trims = 0
        self.memory = IdleMemory(
            self.clock, self.pool, lambda: self.happened, self._count_heap_trim
        )
        self.memory.start()

    def _count_heap_trim(self) -> None:
        self.heap_trims += 1

    def periods(self, count: int) -> None:
        self.clock.advance(ms=5000 * count)


@pytest.fixture
def rig() -> Rig:
    """A server that has served nothing yet."""
    return Rig()


def test_idle_blocks_are_freed(rig: Rig) -> None:
    """Blocks that nobody needed for a period leave the pool."""
    rig.pool.lease(1 << 20)
    assert rig.pool.idle_bytes == 1 << 20
    rig.periods(2)
    assert rig.pool.idle_bytes == 0


def test_the_heap_is_trimmed_once_after_each_activity(rig: Rig) -> None:
    """A quiet server is left alone."""
    rig.periods(3)
    assert rig.heap_trims == 0
    for count in (1, 2):
        rig.happened += 1
        rig.periods(5)
        assert rig.heap_trims == count


def test_what_is_as_before_is_trimmed_too(rig: Rig) -> None:
    """Models that came and went leave their pages behind."""
    for models in (200, 0):
        rig.happened = models
        rig.periods(1)
    rig.periods(1)
    assert rig.heap_trims == 1


def test_the_heap_is_left_alone_while_something_happens(rig: Rig) -> None:
    """Trimming would hold it up."""
    for _ in range(5):
        rig.happened += 1
        rig.periods(1)
    assert rig.heap_trims == 0


def test_nothing_is_trimmed_after_the_stop(rig: Rig) -> None:
    """The timer is taken back."""
    rig.happened = 1
    rig.memory.stop()
    rig.periods(3)
    assert rig.heap_trims == 0


def test_releasing_the_heap_keeps_what_is_alive() -> None:
    """It can be called at any time."""
    kept = bytes(1 << 20)
    release_heap()
    assert not any(kept)
