"""Random arrivals, sizes, priorities, deadlines, cancels and speeds: nothing goes wrong."""

from __future__ import annotations

from typing import Any

from google.protobuf import text_format
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from npuserve.errors import NpuserveError, UnavailableError
from npuserve.model_config import ModelConfig
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.schedulers.dynamic_batcher import DynamicBatcher
from npuserve.tensor import Tensor
from npuserve.testing.clock import FakeClock
from npuserve.testing.instances import FakeExecution, FakePool, context_of

MS = 1_000_000
LONGEST_MS = 20


class BatcherMachine(RuleBasedStateMachine):
    """The dynamic batcher against a list of what waits, which knows who must be next."""

    clock: FakeClock
    pool: FakePool
    scheduler: DynamicBatcher

    @initialize(
        max_batch_size=st.sampled_from([1, 2, 4, 7, 16]),
        preferred=st.sets(st.integers(1, 16), max_size=2),
        delay_us=st.sampled_from([0, 0, 500, 5_000]),
        levels=st.sampled_from([0, 2, 3]),
        timeout_us=st.sampled_from([0, 3_000, 30_000]),
        delays=st.booleans(),
        max_queue_size=st.sampled_from([0, 0, 3]),
        variable=st.booleans(),
        count=st.integers(1, 3),
        prefetches=st.booleans(),
        speeds=st.lists(st.integers(0, LONGEST_MS), min_size=1, max_size=5),
    )
    def configure(
        self,
        max_batch_size: int,
        preferred: set[int],
        delay_us: int,
        levels: int,
        timeout_us: int,
        delays: bool,
        max_queue_size: int,
        variable: bool,
        count: int,
        prefetches: bool,
        speeds: list[int],
    ) -> None:
        """Make a model of these settings."""
        sizes = "".join(f"preferred_batch_size: {n} " for n in preferred if n <= max_batch_size)
        text = f"""
            name: "m" max_batch_size: {max_batch_size}
            input {{ name: "IN" data_type: TYPE_FP32 dims: {-1 if variable else 1} }}
            dynamic_batching {{
              {sizes} max_queue_delay_microseconds: {delay_us}
              priority_levels: {levels} default_priority_level: {min(levels, 1)}
              default_queue_policy {{
                default_timeout_microseconds: {timeout_us} allow_timeout_override: true
                timeout_action: {"DELAY" if delays else "REJECT"}
                max_queue_size: {max_queue_size} }} }}"""
        config = ModelConfig()
        text_format.Parse(text, config)
        self.clock = FakeClock()
        self.speeds = speeds
        self.pool = FakePool(
            self.clock,
            count=count,
            duration_ns=self._begin_execution,
            prefetches=prefetches,
            on_run=self._check_batch,
        )
        self.scheduler = DynamicBatcher(context_of(config, self.pool))
        self.max_batch_size, self.variable = max_batch_size, variable
        self.levels, self.delays = levels, delays
        self.timeout_ns, self.delay_ns = timeout_us * 1_000, delay_us * 1_000
        self.sent = 0
        self.waiting: dict[int, InferenceRequest] = {}  # in order of arrival
        self.answers: dict[int, list[NpuserveError | None]] = {}
        self.instance_free_ns = [0] * count

    @rule(
        burst=st.lists(
            st.tuples(
                st.integers(1, 4), st.integers(1, 2), st.integers(0, 4), st.integers(0, 5_000)
            ),
            min_size=1,
            max_size=6,
        )
    )
    def send(self, burst: list[tuple[int, int, int, int]]) -> None:
        """Requests (rows, length, priority, timeout in us) that arrive in one iteration."""
        for rows, length, priority, timeout_us in burst:
            self._send(
                min(rows, self.max_batch_size), length if self.variable else 1, priority, timeout_us
            )
        self.clock.run()

    def _send(self, rows: int, length: int, priority: int, timeout_us: int) -> None:
        number = self.sent
        self.sent += 1

        def respond(response: InferenceResponse | None, final: bool) -> None:
            assert response is not None
            assert final
            self.waiting.pop(number, None)
            self.answers[number].append(response.error)

        request = InferenceRequest(
            "m",
            {"IN": Tensor("IN", "FP32", [rows, length], b"")},
            respond,
            id=str(number),
            priority=priority,
            timeout_us=timeout_us,
        )
        request.batch_size = rows
        request.start_ns = request.queue_ns = self.clock.now_ns()
        self.answers[number] = []
        self.waiting[number] = request
        self.pool.statistics.pending += 1
        try:
            self.scheduler.enqueue(request)
        except UnavailableError as error:
            self.pool.statistics.pending -= 1
            self.waiting.pop(number)
            self.answers[number].append(error)

    @rule(ms=st.floats(0.01, 40))
    def let_time_pass(self, ms: float) -> None:
        """Time passes; timers and executions end on the way."""
        self.clock.advance(ms=ms)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A client goes away."""
        if self.waiting:
            number = data.draw(st.sampled_from(sorted(self.waiting)))
            self.waiting[number].cancel()
            assert len(self.answers[number]) == 1

    @invariant()
    def counts_agree(self) -> None:
        """The scheduler, the gauge and the list agree on what is queued."""
        if hasattr(self, "scheduler"):
            assert self.scheduler.queued == len(self.waiting)
            assert self.pool.statistics.pending == len(self.waiting)

    @invariant()
    def nothing_outstays_its_timeout(self) -> None:
        """A request that is to be rejected is, at its deadline."""
        for request in getattr(self, "waiting", {}).values():
            deadline_ns = self._deadline_ns(request)
            assert self.delays or not 0 < deadline_ns <= self.clock.now_ns()

    @invariant()
    def nothing_is_answered_twice(self) -> None:
        """One answer at most."""
        assert all(len(answers) <= 1 for answers in getattr(self, "answers", {}).values())

    def teardown(self) -> None:
        """Everything is answered in the end, and the clock has nothing left to do."""
        if not hasattr(self, "scheduler"):
            return
        self.clock.advance(ms=1_000 + self.sent * LONGEST_MS)
        assert all(len(answers) == 1 for answers in self.answers.values())
        assert self.scheduler.queued == 0
        assert not self.clock.next_timer_ns

    # ---------------------------------------------------------------- who must be next

    def _check_batch(self, execution: FakeExecution) -> None:
        """An instance was given a batch."""
        requests = execution.requests
        assert execution.batch_size == sum(request.batch_size for request in requests)
        assert execution.batch_size <= self.max_batch_size
        assert len({tuple(request.inputs["IN"].shape[1:]) for request in requests}) == 1
        expected = sorted(self.waiting.values(), key=self._service_order)
        assert [r.id for r in requests] == [r.id for r in expected[: len(requests)]]
        self._check_not_late(execution)
        for request in requests:
            del self.waiting[int(request.id)]

    def _begin_execution(self, execution: FakeExecution) -> int:
        """A batch starts; returns how long it runs."""
        duration_ns = self.speeds[len(self.pool.executed) % len(self.speeds)] * MS
        self.instance_free_ns[execution.instance] = self.clock.now_ns() + duration_ns
        return duration_ns

    def _service_order(self, request: InferenceRequest) -> tuple[Any, ...]:
        level = 1
        if self.levels:
            level = request.priority if 0 < request.priority <= self.levels else 1
        deadline_ns = self._deadline_ns(request)
        expired = 0 < deadline_ns <= self.clock.now_ns()
        assert self.delays or not expired
        return level, expired, deadline_ns if expired else 0, int(request.id)

    def _deadline_ns(self, request: InferenceRequest) -> int:
        timeout_ns = self.timeout_ns
        if 0 < request.timeout_us * 1_000 < timeout_ns:
            timeout_ns = request.timeout_us * 1_000
        return request.queue_ns + timeout_ns if timeout_ns else 0

    def _check_not_late(self, execution: FakeExecution) -> None:
        """With this instance free and this request there, a batch starts within the delay.

        Plus half an execution at most, for callers to come back (regrouping).
        """
        ready_ns = max(self.instance_free_ns[execution.instance], execution.requests[0].queue_ns)
        hold_ns = 0 if self.delay_ns else LONGEST_MS * MS // 2
        assert execution.start_ns - ready_ns <= self.delay_ns + hold_ns


BatcherMachine.TestCase.settings = settings(stateful_step_count=30)
TestBatcher = BatcherMachine.TestCase
