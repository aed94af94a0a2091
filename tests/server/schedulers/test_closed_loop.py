"""Callers that send their next request when they have an answer, and how busy the device is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from google.protobuf import text_format

from npuserve.model_config import ModelConfig
from npuserve.model_repository.defaults import normalize
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.schedulers.default import DefaultScheduler
from npuserve.server.schedulers.dynamic_batcher import DynamicBatcher
from npuserve.tensor import Tensor
from npuserve.testing.clock import FakeClock
from npuserve.testing.instances import FakeExecution, FakePool, context_of

US = 1_000
MS = 1_000_000


class ClosedLoop:
    """Callers against one model; each comes back some time after its answer.

    Args:
        return_us: between an answer and the caller's next request, (least, most); None for
            callers that do not come back.
    """

    def __init__(
        self,
        callers: int,
        duration_ns: int | Callable[[FakeExecution], int],
        *,
        max_batch_size: int = 8,
        return_us: tuple[int, int] | None = (100, 300),
        batching: bool = True,
        settings: str = "",
        count: int = 1,
    ) -> None:
        self.clock = FakeClock()
        self.random = random.Random(1)
        self.return_us = return_us
        self.answered = 0
        self.pool = FakePool(self.clock, duration_ns=duration_ns, count=count)
        config = ModelConfig()
        scheduling = f"dynamic_batching {{ {settings} }}" if batching else ""
        text_format.Parse(f"max_batch_size: {max_batch_size} {scheduling}", config)
        normalize(config)
        scheduler = DynamicBatcher if batching else DefaultScheduler
        self.scheduler = scheduler(context_of(config, self.pool))
        for _ in range(callers):
            self.send()

    def send(self) -> None:
        """One caller sends."""
        request = InferenceRequest("m", {"IN": Tensor("IN", "FP32", [1], b"")}, self._answered)
        request.batch_size = 1
        request.start_ns = request.queue_ns = self.clock.now_ns()
        self.pool.statistics.pending += 1
        self.scheduler.enqueue(request)

    def _answered(self, response: InferenceResponse | None, final: bool) -> None:
        self.answered += 1
        if self.return_us is None:
            return
        back_us = self.random.randint(*self.return_us)
        self.clock.call_at(self.clock.now_ns() + back_us * US, self.send)

    def run(self, seconds: float) -> tuple[float, float]:
        """(answers a second, share of the time the device was busy), after a start-up."""
        self.clock.advance(ms=200)
        answered, busy_ns = self.answered, self.pool.busy_ns
        self.clock.advance(ms=seconds * 1_000)
        busy = (self.pool.busy_ns - busy_ns) / (seconds * 1e9 * self.pool.count)
        return (self.answered - answered) / seconds, busy


def test_eight_callers_of_a_5_ms_model_get_five_times_the_throughput() -> None:
    """The halves into which callers fall are joined: at least 5x what one by one gives."""
    batched, _ = ClosedLoop(8, 5 * MS).run(2)
    alone, _ = ClosedLoop(8, 5 * MS, batching=False).run(2)
    assert batched >= 5 * alone


@pytest.mark.parametrize(("execution_ms", "least"), [(1, 0.95), (5, 0.98), (20, 0.99)])
@pytest.mark.parametrize("callers", [16, 20, 64])
def test_the_device_stays_busy_under_load(execution_ms: int, least: float, callers: int) -> None:
    """With twice as many callers as a batch holds, the device never waits."""
    loop = ClosedLoop(callers, execution_ms * MS)
    throughput, busy = loop.run(2)
    assert busy >= least
    assert throughput >= least * 8_000 / execution_ms


def test_a_single_caller_is_never_held() -> None:
    """One caller's request starts the moment it comes."""
    loop = ClosedLoop(1, 5 * MS)
    loop.run(1)
    ends = [e.start_ns + 5 * MS for e in loop.pool.executed]
    gaps = [later.start_ns - end for later, end in zip(loop.pool.executed[1:], ends, strict=False)]
    assert max(gaps) <= 300 * US


def test_an_open_stream_is_not_held() -> None:
    """Requests at a steady rate below capacity start when they come or an instance frees."""
    loop = ClosedLoop(0, 5 * MS, return_us=None)
    for number in range(2_000):
        loop.clock.call_at(loop.clock.now_ns() + (number + 1) * 1_300 * US, loop.send)
    loop.clock.advance(ms=3_000)
    ready = 0
    for number, execution in enumerate(loop.pool.executed):
        ready = max(ready, execution.requests[0].queue_ns)
        if number > 20:  # the first few are how it learns
            assert execution.start_ns == ready
        ready = execution.start_ns + 5 * MS


def test_no_hold_where_joining_saves_nothing() -> None:
    """If an execution costs the same for every request, waiting is given up."""
    linear: Callable[[FakeExecution], int] = lambda e: e.batch_size * MS  # noqa: E731
    _, busy = ClosedLoop(8, linear, return_us=(300, 500)).run(3)
    assert busy >= 0.95


def test_callers_that_stay_away_are_not_waited_for() -> None:
    """When the callers take longer to return than a hold may last, nothing is held."""
    loop = ClosedLoop(8, 5 * MS, return_us=(4_000, 6_000))
    loop.run(1)
    ready = 0
    for execution in loop.pool.executed:
        ready = max(ready, execution.requests[0].queue_ns)
        assert execution.start_ns - ready <= MS // 2
        ready = execution.start_ns + 5 * MS


@pytest.mark.parametrize("callers", [1, 6])
def test_a_queue_delay_is_not_waited_for_callers_that_do_not_exist(callers: int) -> None:
    """Once all callers are queued, the rest of the 2 ms is not spent: 0.3 ms and 0.2 ms back."""
    loop = ClosedLoop(
        callers,
        300 * US,
        settings="max_queue_delay_microseconds: 2000",
        return_us=(150, 200),
        count=2,
    )
    rate, _ = loop.run(1)
    assert rate > callers / 600e-6


def test_an_open_stream_keeps_its_queue_delay() -> None:
    """Requests that come whatever is answered gather as long as configured."""
    loop = ClosedLoop(0, 200 * US, settings="max_queue_delay_microseconds: 2000", return_us=None)
    when_ns = 0
    for _ in range(3000):
        when_ns += int(loop.random.expovariate(1 / (500 * US)))
        loop.clock.call_at(when_ns, loop.send)
    loop.clock.advance(ms=3000)
    sizes = [execution.batch_size for execution in loop.pool.executed]
    assert sum(sizes) / len(sizes) > 4  # 5 where the whole delay is always waited


def in_step(duration_ns: int | Callable[[FakeExecution], int], settings: str = "") -> ClosedLoop:
    """32 callers of a model with two instances and a queue delay, who are back within 0.2 ms."""
    return ClosedLoop(
        32,
        duration_ns,
        max_batch_size=32,
        settings=f"max_queue_delay_microseconds: 2000 {settings}",
        return_us=(150, 200),
        count=2,
    )


def test_callers_in_step_are_shared_out_where_that_pays() -> None:
    """Executions that cost by the element: two instances serve nearly twice what one does."""
    loop = in_step(lambda execution: execution.batch_size * 40 * US)
    rate, busy = loop.run(1)
    one_instance = 32 / (32 * 40e-6 + 200e-6)
    assert rate > 1.6 * one_instance
    assert busy > 0.75


@pytest.mark.parametrize("fixed_us", [1_500, 6_000])
def test_callers_stay_together_where_instances_take_turns(fixed_us: int) -> None:
    """One device that takes as long for any batch: trials cost it less than 3 %."""
    device_free_ns = 0

    def on_one_device(execution: FakeExecution) -> int:
        nonlocal device_free_ns
        device_free_ns = max(device_free_ns, execution.start_ns) + fixed_us * US
        return device_free_ns - execution.start_ns

    loop = in_step(on_one_device)
    loop.run(3)
    rate, _ = loop.run(5)
    assert rate > 0.97 * 32 / (fixed_us * 1e-6 + 200e-6)
    assert {16, 32} <= set(loop.pool.sizes), "both ways were tried"


def test_sharing_out_ends_with_the_callers_that_wait() -> None:
    """An open stream that follows gathers as configured again."""
    loop = in_step(lambda execution: execution.batch_size * 40 * US)
    loop.run(1)
    assert loop.pool.sizes[-10:] == [16] * 10
    loop.return_us = None
    loop.clock.advance(ms=100)
    when_ns = loop.clock.now_ns()
    for _ in range(40_000):
        when_ns += int(loop.random.expovariate(1 / (250 * US)))
        loop.clock.call_at(when_ns, loop.send)
    loop.clock.advance(ms=10_000)
    sizes = loop.pool.sizes[-100:]
    assert sum(sizes) / len(sizes) > 7  # 9 where the whole delay is always waited


def test_sizes_that_were_asked_for_are_kept_to() -> None:
    """Preferred sizes are not replaced by a share of the callers."""
    loop = in_step(lambda execution: execution.batch_size * 40 * US, "preferred_batch_size: 24")
    loop.run(1)
    assert set(loop.pool.sizes[4:]) == {24}
