"""Calls between models that could never be answered."""

from __future__ import annotations

import pytest

from npuserve.backends.worker.call_graph import Caller, CallGraph
from npuserve.errors import InternalError


@pytest.fixture
def graph() -> CallGraph:
    return CallGraph()


def test_a_model_with_one_instance_cannot_call_itself(graph: CallGraph) -> None:
    """The only instance would wait for itself."""
    with pytest.raises(InternalError, match="Model a calls model a"):
        Caller(graph, "a").starts(1, "a")


def test_a_free_instance_can_answer(graph: CallGraph) -> None:
    """Of two instances the first may call its own model, the second may not as well."""
    first, second = Caller(graph, "a"), Caller(graph, "a")
    first.starts(1, "a")
    with pytest.raises(InternalError):
        second.starts(1, "a")
    first.ended(1)
    second.starts(1, "a")


def test_a_circle_of_models(graph: CallGraph) -> None:
    """The circle a → b → a is found when it closes."""
    a, b = Caller(graph, "a"), Caller(graph, "b")
    a.starts(1, "b")
    with pytest.raises(InternalError):
        b.starts(1, "a")


def test_a_free_instance_cannot_answer_what_another_has_taken(graph: CallGraph) -> None:
    """The circle a → b → a closes at the instance of b that works for a."""
    a, b, _free = Caller(graph, "a"), Caller(graph, "b"), Caller(graph, "b")
    a.starts(1, "b")
    a.taken(1, b)
    with pytest.raises(InternalError, match="Model b calls model a"):
        b.starts(1, "a")
    b.starts(2, "elsewhere")
    a.ended(1)
    b.starts(3, "a")


def test_waiting_for_a_busy_model_is_no_circle(graph: CallGraph) -> None:
    """Any number may wait for a model that goes on, and for models outside the graph."""
    a, b, c = (Caller(graph, name) for name in "abc")
    a.starts(1, "c")
    b.starts(1, "c")
    c.starts(1, "onnx")


def test_overlapping_instances_are_never_stuck(graph: CallGraph) -> None:
    """An async model may call itself."""
    caller = Caller(graph, "a")
    caller.overlaps = True
    caller.starts(1, "a")


def test_overlapping_instance_that_waits_within_execute(graph: CallGraph) -> None:
    """It is as stuck as any other, until the first response comes."""
    first, second = Caller(graph, "a"), Caller(graph, "a")
    first.overlaps = second.overlaps = True
    first.starts(1, "a")
    second.starts(1, "a")
    first.blocks(1)
    with pytest.raises(InternalError, match="Model a calls model a"):
        second.blocks(1)
    first.responded(1)
    second.blocks(1)


def test_overlapping_instance_that_takes_no_more(graph: CallGraph) -> None:
    """As many batches as may overlap all wait for the model itself: nobody is left to answer."""
    caller = Caller(graph, "a")
    caller.overlaps, caller.limit = True, 2
    caller.starts(1, "a", batch=1)
    caller.starts(2, "a", batch=1)  # gathers two calls
    caller.starts(3, "elsewhere", batch=2)
    with pytest.raises(InternalError, match="async_batches"):
        caller.starts(4, "a", batch=2)
    caller.finished(1)  # without waiting for its calls
    caller.starts(5, "a", batch=2)
    caller.ended(5)
    caller.starts(6, "a", batch=3)


def test_overlapping_instance_that_takes_no_more_in_a_circle(graph: CallGraph) -> None:
    """All batches of an async model wait for one that is about to call it."""
    caller, other = Caller(graph, "a"), Caller(graph, "b")
    caller.overlaps, caller.limit = True, 2
    caller.starts(1, "b", batch=1)
    other.starts(1, "a")
    other.ended(1)
    caller.starts(2, "b", batch=2)
    with pytest.raises(InternalError, match="Model b calls model a"):
        other.starts(2, "a")
    Caller(graph, "b")
    other.starts(3, "a")


def test_instances_leave_the_graph(graph: CallGraph) -> None:
    """Nothing is kept of unloaded models."""
    callers = [Caller(graph, "a"), Caller(graph, "a")]
    for caller in callers:
        caller.leave()
    assert graph.models == {}
