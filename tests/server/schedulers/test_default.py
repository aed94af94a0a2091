"""The default scheduler: first in, first out, one request an execution."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from npuserve.backends.base import ExecutionBatch, LoopInstance, Placement
from npuserve.errors import RequestCancelledError, UnavailableError
from npuserve.model_config import ModelConfig
from npuserve.request import InferenceRequest, ModelCall
from npuserve.response import InferenceResponse
from npuserve.server.instance_pool import InstancePool
from npuserve.server.schedulers.default import DefaultScheduler
from npuserve.server.statistics import FailureReason, ModelStatistics
from npuserve.testing.clock import FakeClock
from npuserve.testing.instances import FakeExecution, FakePool, context_of

MS = 1_000_000


class Model:
    """A default scheduler over fake instances of 10 ms an execution."""

    def __init__(self, count: int = 1, duration_ns: int = 10 * MS) -> None:
        self.clock = FakeClock()
        self.pool = FakePool(self.clock, count=count, duration_ns=duration_ns)
        self.scheduler = DefaultScheduler(context_of(ModelConfig(name="m"), self.pool))
        self.answers: list[tuple[str, Exception | None]] = []

    def send(self, id: str, rows: int = 1, *, cancelled: bool = False) -> InferenceRequest:
        """One request."""

        def respond(response: InferenceResponse | None, final: bool) -> None:
            assert response is not None
            self.answers.append((id, response.error))

        request = InferenceRequest("m", {}, respond, id=id)
        request.batch_size = rows
        request.cancelled = cancelled
        self.pool.statistics.pending += 1
        self.scheduler.enqueue(request)
        return request


def test_requests_are_never_joined() -> None:
    """Three waiting requests are three executions; a client's batch stays together."""
    model = Model()
    for id, rows in (("a", 1), ("b", 5), ("c", 1)):
        model.send(id, rows)
    model.clock.advance(ms=100)
    assert model.pool.sizes == [1, 5, 1]
    assert [id for id, _ in model.answers] == ["a", "b", "c"]


def test_any_free_instance_takes_the_next() -> None:
    """Two instances work side by side, and a request that finds one free does not wait."""
    model = Model(count=2)
    for id in "abc":
        model.send(id)
    assert [e.instance for e in model.pool.executed] == [0, 1]
    model.clock.advance(ms=10)
    assert len(model.pool.executed) == 3


def test_a_request_whose_client_has_gone_is_not_executed() -> None:
    """Cancelled in the queue, or before it: answered at once, never run."""
    model = Model()
    model.send("busy")
    model.send("a").cancel()
    model.send("b", cancelled=True)
    assert [(id, type(error)) for id, error in model.answers] == [
        ("a", RequestCancelledError),
        ("b", RequestCancelledError),
    ]
    assert model.pool.statistics.failures[FailureReason.CANCELED] == 2
    model.clock.advance(ms=100)
    assert len(model.pool.executed) == 1
    assert (model.scheduler.queued, model.pool.statistics.pending) == (0, 0)


def early(model: Model) -> list[str]:
    """Ids of the requests that were handed over while their instance was busy."""
    ids: list[str] = []

    def note(execution: FakeExecution) -> None:
        if not model.pool.instances[execution.instance].is_free:
            ids.extend(request.id for request in execution.requests)

    model.pool.on_run = note
    return ids


def test_a_busy_instance_gets_its_next_request_early() -> None:
    """While as many wait as there are instances; nobody is late by more than an execution."""
    model = Model(count=2, duration_ns=MS)
    model.pool.prefetches = True
    ids = early(model)
    for id in "abcdefgh":
        model.send(id)
    model.clock.advance(ms=1)
    assert ids == ["d", "f"]  # behind c and e; g and h are for whoever is free first
    model.clock.advance(ms=10)
    assert sorted(id for id, _ in model.answers) == list("abcdefgh")
    started = [(e.start_ns // MS % 1000, e.requests[0].id) for e in model.pool.executed]
    assert sorted(started) == [
        (0, "a"), (0, "b"), (1, "c"), (1, "e"), (2, "d"), (2, "f"), (3, "g"), (3, "h"),
    ]  # fmt: skip
    assert model.pool.statistics.pending == 0


@pytest.mark.parametrize(
    "why", ["long", "once long", "decoupled", "asked by a model", "part of an ensemble", "no room"]
)
def test_what_waits_for_a_free_instance(why: str) -> None:
    """It could still be cancelled, be served earlier by another one, or never be served."""
    durations = iter([20 * MS] + [MS] * 9) if why == "once long" else None
    model = Model(count=1, duration_ns=10 * MS if why == "long" else MS)
    if durations is not None:
        model.pool.duration_ns = lambda _: next(durations)
    model.pool.prefetches = why != "no room"
    model.pool.decoupled = why == "decoupled"
    ids = early(model)
    for id in "abcdef":
        request = model.send(id)
        if why == "part of an ensemble":
            request.parent = request
        if why == "asked by a model":
            request.for_model = cast("ModelCall", object())
    model.clock.advance(ms=30 if why == "once long" else 100)
    assert ids == []
    model.clock.advance(ms=100)
    assert [id for id, _ in model.answers] == list("abcdef")


def test_stop_refuses_new_requests_and_finishes_the_queue() -> None:
    """The text is Triton's."""
    model = Model()
    model.send("a")
    model.send("b")
    model.scheduler.stop()
    with pytest.raises(
        UnavailableError, match=r"^\[request id: c\] Server is stopping, scheduler for model has "
    ):
        model.send("c")
    model.clock.advance(ms=100)
    assert [id for id, _ in model.answers] == ["a", "b"]


def test_a_hundred_thousand_requests_do_not_recurse_or_stay() -> None:
    """Instances that answer at once are fed in a loop."""
    model = Model()
    model.send("busy")
    for number in range(100_000):
        model.send(str(number))
    model.pool.duration_ns = 0
    model.clock.advance(ms=10)
    assert len(model.answers) == 100_001
    assert model.scheduler.queued == 0


class OnLoop(LoopInstance):
    """Keeps its batches until the test ends them."""

    def __init__(self) -> None:
        self.batches: list[ExecutionBatch] = []

    def start(self, batch: ExecutionBatch) -> None:
        self.batches.append(batch)


async def test_the_next_execution_does_not_wait_for_the_answers_of_the_last() -> None:
    """When an execution is over the next one starts, then the answers go out."""
    statistics, backend = ModelStatistics(), OnLoop()
    pool = InstancePool("m", 1, asyncio.get_running_loop(), statistics, False)
    pool.add(Placement("m_0", "CPU", 0, 0, 0), backend)
    context = context_of(ModelConfig(name="m"), FakePool(FakeClock()), instances=pool)
    scheduler = DefaultScheduler(context)
    answered: list[str] = []
    for id in "ab":
        scheduler.enqueue(InferenceRequest("m", {}, lambda *_, id=id: answered.append(id), id=id))
    (first,) = backend.batches
    first.execution_over()
    assert len(backend.batches) == 2
    assert answered == []
    for batch in backend.batches:
        batch.send(batch.requests[0], InferenceResponse([]))
        batch.done()
    assert answered == ["a", "b"]
    assert pool.inflight == 0
