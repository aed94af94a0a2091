"""The request queue: order, limits, timeouts, and that nothing stays behind."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.errors import UnavailableError
from npuserve.model_config import ModelConfig
from npuserve.request import InferenceRequest
from npuserve.server.queue import Lane, PriorityQueue, QueuePolicy


def request(id: str = "", priority: int = 0, timeout_us: int = 0) -> InferenceRequest:
    return InferenceRequest(
        "m", {}, lambda *_: None, id=id, priority=priority, timeout_us=timeout_us
    )


def ids(requests: object) -> list[str]:
    return [entry.id for entry in requests]  # type: ignore[attr-defined]  # any iterable of requests


@given(st.lists(st.sampled_from(["push", "pop", "discard"]), max_size=200), st.randoms())
def test_a_lane_is_a_fifo_without_tombstones(operations: list[str], random: object) -> None:
    """A lane behaves as a list, and never keeps more dead requests than living ones."""
    lane, expected = Lane(), list[InferenceRequest]()
    for number, operation in enumerate(operations):
        if operation == "push":
            expected.append(request(str(number)))
            lane.append(expected[-1])
        elif expected and operation == "pop":
            assert lane.pop() is expected.pop(0)
        elif expected:
            gone = random.choice(expected)  # type: ignore[attr-defined]  # hypothesis' Random
            expected.remove(gone)
            lane.discard(gone)
        assert list(lane) == expected
        assert lane.live == len(expected)
        assert len(lane._requests) <= 2 * lane.live


def test_levels_and_policies_come_from_the_configuration() -> None:
    """Per-level policies replace the default one; priority 1 is served first."""
    config = ModelConfig()
    batching = config.dynamic_batching
    batching.priority_levels, batching.default_priority_level = 2, 2
    batching.priority_queue_policy[1].max_queue_size = 1
    queue = PriorityQueue.from_config(batching)
    queue.push(request("low"), 0)
    queue.push(request("high", priority=1), 0)
    with pytest.raises(UnavailableError):
        queue.push(request("too many", priority=1), 0)
    queue.push(request("low too", priority=7), 0)
    assert ids(queue) == ["high", "low", "low too"]


def test_priority_means_nothing_without_levels() -> None:
    """A model without levels serves in the order of arrival."""
    queue = PriorityQueue(QueuePolicy())
    for id, priority in (("a", 5), ("b", 1)):
        queue.push(request(id, priority), 0)
    assert ids(queue) == ["a", "b"]


def test_any_number_of_levels_costs_what_the_requests_in_them_do() -> None:
    """Triton takes 2**64 - 1 of them; the most urgent come first, whatever came first."""
    last = 2**64 - 1
    queue = PriorityQueue(QueuePolicy(), levels=last, default_level=1 << 40)
    priorities = [last, 0, 1, 1 << 40, 5, last, 4, (1 << 40) + 1, last + 1]
    for number, priority in enumerate(priorities):
        queue.push(request(str(number), priority), 0)
    assert ids(queue) == ["2", "6", "4", "1", "3", "8", "7", "0", "5"]
    assert [each.id for each in queue.take(3)] == ["2", "6", "4"]
    for number in range(1_000):
        queue.push(request("x", 2_000 - number), 0)
        assert [each.id for each in queue.take(1)] == ["x"]
    assert len(queue._levels) < 100
    assert ids(queue) == ["1", "3", "8", "7", "0", "5"]


def test_levels_with_a_policy_of_their_own() -> None:
    """They have it whenever they are made; a limit of one is none of the others'."""
    own = {3: QueuePolicy(max_size=1)}
    queue = PriorityQueue(QueuePolicy(), levels=1 << 32, default_level=2, own_policies=own)
    for _ in range(2):
        queue.push(request("a", 3), 0)
        queue.push(request("b", 2), 0)
        with pytest.raises(UnavailableError):
            queue.push(request("c", 3), 0)
        assert len(queue.take(2)) == 2


def test_delayed_requests_stand_behind_the_unexpired_of_their_level() -> None:
    """DELAY moves an expired request back, it keeps its place among the delayed."""
    queue = PriorityQueue(QueuePolicy(delays=True, timeout_ns=100))
    for number, now_ns in enumerate((0, 50, 120)):
        queue.push(request(str(number)), now_ns)
    assert queue.next_deadline_ns() == 100
    assert queue.expire(150) == []
    assert ids(queue) == ["2", "0", "1"]
    assert queue.next_deadline_ns() == 220
    assert ids(queue.take(3)) == ["2", "0", "1"]
    assert queue.next_deadline_ns() == 0


def test_the_shortest_timeout_expires_first() -> None:
    """With overrides, deadlines do not follow the order of arrival."""
    queue = PriorityQueue(QueuePolicy(timeout_ns=10_000, allow_override=True))
    queue.push(request("long"), 0)
    queue.push(request("short", timeout_us=1), 0)
    assert queue.next_deadline_ns() == 1_000
    assert ids(queue.expire(1_000)) == ["short"]
    assert (queue.live, queue.elements, queue.entered) == (1, 1, 2)


def test_deadlines_of_served_requests_do_not_pile_up() -> None:
    """The heap of deadlines never holds many more entries than the queue holds requests."""
    queue = PriorityQueue(QueuePolicy(timeout_ns=1 << 60))
    for number in range(1_000):
        queue.push(request(str(number)), number)
        queue.take(1)
        assert queue.next_deadline_ns() == 0
    assert queue._default._deadlines == []


def test_nothing_is_kept_of_the_last_requests() -> None:
    """A request that has left is not held by its deadline, whatever comes or does not come next."""
    queue = PriorityQueue(QueuePolicy(timeout_ns=1 << 60), levels=2)
    requests = [request(str(number)) for number in range(9)]
    references = [sys.getrefcount(each) for each in requests]
    for number in range(9):
        queue.push(requests[number], number)
    queue.discard(requests[-1])
    queue.take(8)
    assert [sys.getrefcount(each) for each in requests] == references
