"""When a queue is taken to be complete."""

from __future__ import annotations

from npuserve.server.gathering import Gathering
from npuserve.server.regrouping import NEVER

WINDOW = 32


def batches(gathering: Gathering, count: int, inside: int) -> None:
    """So many batches, with so many elements inside at most."""
    for _ in range(count):
        for number in range(1, inside + 1):
            gathering.arrived(number)
        gathering.started()


def test_nothing_is_concluded_from_few_batches() -> None:
    """A model that has just begun waits as configured."""
    gathering = Gathering()
    batches(gathering, WINDOW - 1, 1)
    assert gathering.complete_at == NEVER


def test_the_most_that_were_inside_count() -> None:
    """One larger crowd in a window is enough to wait for."""
    gathering = Gathering()
    batches(gathering, WINDOW - 1, 2)
    batches(gathering, 1, 5)
    assert gathering.complete_at == 5


def test_a_new_caller_counts_at_once() -> None:
    """More than ever before are waited for from the next batch on."""
    gathering = Gathering()
    batches(gathering, WINDOW, 1)
    batches(gathering, 1, 3)
    assert gathering.complete_at == 3


def test_callers_who_left_are_forgotten() -> None:
    """After two windows without them nobody waits for them."""
    gathering = Gathering()
    batches(gathering, WINDOW, 8)
    batches(gathering, WINDOW, 2)
    assert gathering.complete_at == 8
    batches(gathering, WINDOW, 2)
    assert gathering.complete_at == 2
