"""The dynamic batcher on a clock that stands still."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from google.protobuf import text_format

from npuserve.errors import NpuserveError, RequestCancelledError, UnavailableError
from npuserve.model_config import ModelConfig
from npuserve.request import InferenceRequest, ModelCall
from npuserve.response import InferenceResponse
from npuserve.server.schedulers.dynamic_batcher import DynamicBatcher
from npuserve.server.statistics import FailureReason
from npuserve.tensor import Tensor
from npuserve.testing.clock import FakeClock
from npuserve.testing.instances import FakeExecution, FakePool, context_of

MS = 1_000_000


class Model:
    """A dynamic batcher over fake instances, and the answers of its requests in order."""

    def __init__(
        self,
        batching: str = "",
        *,
        max_batch_size: int = 8,
        count: int = 1,
        duration_ns: int | Callable[[FakeExecution], int] = 10 * MS,
        more: str = "",
        max_inflight: int = 1,
    ) -> None:
        self.clock = FakeClock()
        config = ModelConfig()
        text = f'name: "m" max_batch_size: {max_batch_size} dynamic_batching {{ {batching} }} '
        text_format.Parse(text + more, config)
        self.pool = FakePool(
            self.clock, count=count, duration_ns=duration_ns, max_inflight=max_inflight
        )
        self.scheduler = DynamicBatcher(context_of(config, self.pool))
        self.answers: list[tuple[str, NpuserveError | None]] = []

    def request(
        self,
        id: str = "",
        rows: int = 1,
        shape: tuple[int, ...] = (1,),
        priority: int = 0,
        timeout_us: int = 0,
    ) -> InferenceRequest:
        """A request not yet sent."""

        def respond(response: InferenceResponse | None, final: bool) -> None:
            assert response is not None
            assert final
            self.answers.append((id, response.error))

        tensor = Tensor("IN", "FP32", [rows, *shape], b"")
        return InferenceRequest(
            "m", {"IN": tensor}, respond, id=id, priority=priority, timeout_us=timeout_us
        )

    def accept(self, request: InferenceRequest) -> InferenceRequest:
        """What the core does with a request."""
        request.batch_size = request.inputs["IN"].shape[0]
        request.start_ns = request.queue_ns = self.clock.now_ns()
        self.pool.statistics.pending += 1
        try:
            self.scheduler.enqueue(request)
        except NpuserveError:
            self.pool.statistics.pending -= 1
            raise
        return request

    def send(
        self,
        id: str = "",
        rows: int = 1,
        shape: tuple[int, ...] = (1,),
        priority: int = 0,
        timeout_us: int = 0,
    ) -> InferenceRequest:
        """Send a request and let the loop run."""
        request = self.accept(self.request(id, rows, shape, priority, timeout_us))
        self.clock.run()
        return request

    def send_together(self, count: int, rows: int = 1) -> None:
        """Requests that arrive in one iteration of the loop."""
        for number in range(count):
            self.accept(self.request(str(number), rows))
        self.clock.run()

    def errors(self) -> dict[str, str]:
        """Texts of the errors by request."""
        return {id: str(error) for id, error in self.answers if error is not None}


def test_requests_of_one_iteration_share_a_batch_without_delay() -> None:
    """Requests read in one loop iteration form one batch, and no time passes."""
    model = Model()
    model.send_together(5)
    assert model.pool.sizes == [5]
    assert model.pool.executed[0].start_ns == model.clock.now_ns()


def test_requests_queued_behind_a_busy_instance_are_joined() -> None:
    """What waits when an instance becomes free is one batch, up to the maximum."""
    model = Model()
    for number in range(11):
        model.send(str(number))
    model.clock.advance(ms=30)
    assert model.pool.sizes == [1, 8, 2]
    assert [id for id, _ in model.answers] == [str(number) for number in range(11)]


def test_a_request_is_never_split_and_never_overtaken() -> None:
    """Three rows and three rows fit into 8, the next three wait, and so does a single behind."""
    model = Model()
    model.send("busy")
    for rows in (3, 3, 3, 1):
        model.send(rows=rows)
    model.clock.advance(ms=50)
    assert model.pool.sizes == [1, 6, 4]


@pytest.mark.parametrize(
    ("count", "rows", "executions"),
    [
        (1, 1, [(200, 1)]),
        (3, 1, [(200, 3)]),
        (4, 1, [(0, 4)]),
        (6, 1, [(0, 4), (300, 2)]),
        (10, 1, [(0, 4), (300, 6)]),
        (2, 3, [(0, 3), (300, 3)]),
        (1, 8, [(0, 8)]),
    ],
)
def test_preferred_sizes_as_observed_on_triton(
    count: int, rows: int, executions: list[tuple[int, int]]
) -> None:
    """Preferred [4], delay 200 ms, maximum 8, 300 ms an execution, one instance."""
    model = Model(
        "preferred_batch_size: 4 max_queue_delay_microseconds: 200000", duration_ns=300 * MS
    )
    begin = model.clock.now_ns()
    model.send_together(count, rows)
    model.clock.advance(ms=2_000)
    seen = [((e.start_ns - begin) // MS, e.batch_size) for e in model.pool.executed]
    assert seen == executions


def test_a_preferred_size_without_delay_is_final() -> None:
    """With no queue delay six waiting requests run as 4 and 2."""
    model = Model("preferred_batch_size: 4")
    model.send("busy")
    model.send_together(6)
    model.clock.advance(ms=50)
    assert model.pool.sizes == [1, 4, 2]


def test_the_delay_is_cut_short_by_a_full_batch() -> None:
    """The request that completes the batch sends it at once."""
    model = Model("max_queue_delay_microseconds: 5000")
    begin = model.clock.now_ns()
    for number in range(8):
        model.send(str(number))
        model.clock.advance(us=100)
    assert model.pool.sizes == [8]
    assert model.pool.executed[0].start_ns == begin + 700_000


def test_different_shapes_do_not_share_a_batch() -> None:
    """Shapes a, b, a, b run as four executions, in order, without waiting for the delay."""
    model = Model(
        "max_queue_delay_microseconds: 1000000",
        more='input { name: "IN" data_type: TYPE_FP32 dims: -1 }',
        duration_ns=0,
    )
    for number in range(4):
        model.accept(model.request(str(number), shape=(1 + number % 2,)))
    model.clock.run()
    assert model.pool.sizes == [1, 1, 1]  # the last one may still find company
    model.clock.advance(ms=1_000)
    assert model.pool.sizes == [1, 1, 1, 1]


def test_ragged_inputs_share_a_batch() -> None:
    """With allow_ragged_batch shapes do not matter."""
    ragged = 'input { name: "IN" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }'
    model = Model(more=ragged)
    for number in range(4):
        model.accept(model.request(str(number), shape=(1 + number % 2,)))
    model.clock.run()
    assert model.pool.sizes == [4]


def test_priorities_are_strict_and_out_of_range_is_the_default() -> None:
    """Level 1 goes first; 0 and 9 mean level 2, the default."""
    model = Model("priority_levels: 3 default_priority_level: 2", max_batch_size=1)
    model.send("busy")
    for id, priority in (("a3", 3), ("b9", 9), ("c1", 1), ("d0", 0), ("e1", 1)):
        model.send(id, priority=priority)
    model.clock.advance(ms=100)
    assert [id for id, _ in model.answers] == ["busy", "c1", "e1", "b9", "d0", "a3"]


def test_a_full_queue_rejects_and_counts() -> None:
    """A full queue answers UNAVAILABLE at once, counts it, and keeps what it has."""
    model = Model("default_queue_policy { max_queue_size: 2 }", max_batch_size=1)
    model.send("busy")
    model.send("a")
    model.send("b")
    with pytest.raises(UnavailableError, match=r"^\[request id: c\] Exceeds maximum queue size$"):
        model.send("c")
    with pytest.raises(UnavailableError, match=r"^\[request id: <id_unknown>\] Exceeds"):
        model.send()
    assert model.pool.statistics.failures[FailureReason.REJECTED] == 2
    model.clock.advance(ms=100)
    assert [id for id, _ in model.answers] == ["busy", "a", "b"]
    assert model.pool.statistics.pending == 0


TIMEOUT = "default_queue_policy { default_timeout_microseconds: 5000 %s }"


def test_a_request_that_waits_too_long_is_rejected_at_its_deadline() -> None:
    """Queue timeout with REJECT: UNAVAILABLE when the time is over, not when an instance frees."""
    model = Model(TIMEOUT % "", max_batch_size=1, duration_ns=100 * MS)
    model.send("busy")
    model.send("late")
    model.clock.advance(us=4_999)
    assert model.answers == []
    model.clock.advance(us=1)
    assert model.errors() == {"late": "Request timeout expired"}
    assert isinstance(model.answers[0][1], UnavailableError)
    assert model.pool.statistics.failures[FailureReason.REJECTED] == 1


@pytest.mark.parametrize(
    ("override", "timeout_us", "rejected_us"),
    [("true", 1_000, 1_000), ("true", 9_000, 5_000), ("false", 1_000, 5_000)],
)
def test_a_request_may_only_shorten_its_timeout(
    override: str, timeout_us: int, rejected_us: int
) -> None:
    """The request's timeout counts if overriding is allowed and it is below the default."""
    model = Model(TIMEOUT % f"allow_timeout_override: {override}", duration_ns=100 * MS)
    model.send("busy")
    model.send("late", timeout_us=timeout_us)
    model.clock.advance(us=rejected_us - 1)
    assert model.answers == []
    model.clock.advance(us=1)
    assert list(model.errors()) == ["late"]


def test_delayed_requests_are_served_after_the_others() -> None:
    """Queue timeout with DELAY: the expired request runs behind those that have time left."""
    model = Model(TIMEOUT % "timeout_action: DELAY", max_batch_size=1)
    model.send("busy")
    model.send("old")
    model.clock.advance(ms=7)
    model.send("new")
    model.clock.advance(ms=100)
    assert [id for id, _ in model.answers] == ["busy", "new", "old"]
    assert model.errors() == {}


def test_a_cancelled_request_is_answered_at_once_and_never_runs() -> None:
    """Cancellation in the queue: CANCELLED with an empty message, its place is free."""
    model = Model()
    model.send("busy")
    model.send("a")
    gone = model.send("gone")
    model.send("b")
    gone.cancel()
    assert model.answers[0][0] == "gone"
    assert isinstance(model.answers[0][1], RequestCancelledError)
    assert str(model.answers[0][1]) == ""
    assert model.pool.statistics.failures[FailureReason.CANCELED] == 1
    model.clock.advance(ms=50)
    assert model.pool.sizes == [1, 2]


def test_preserve_ordering_holds_back_a_faster_instance() -> None:
    """Two instances, slow then fast: the second answer waits for the first."""
    slow_first: Callable[[FakeExecution], int] = lambda e: (90 if e.instance == 0 else 10) * MS  # noqa: E731
    model = Model("preserve_ordering: true", max_batch_size=1, count=2, duration_ns=slow_first)
    model.send("slow")
    model.send("fast")
    model.clock.advance(ms=89)
    assert model.answers == []
    model.clock.advance(ms=1)
    assert [id for id, _ in model.answers] == ["slow", "fast"]


def test_stop_refuses_new_requests_and_finishes_the_queue() -> None:
    """After stop, requests are refused with Triton's text and the queue runs without delay."""
    model = Model("max_queue_delay_microseconds: 60000000")
    model.send("queued")
    model.scheduler.stop()
    assert model.pool.sizes == [1]
    with pytest.raises(
        UnavailableError, match=r"^\[request id: x\] Server is stopping, scheduler for model has "
    ):
        model.send("x")
    model.clock.advance(ms=10)
    assert model.scheduler.queued == 0


def test_an_instance_that_answers_at_once_does_not_recurse() -> None:
    """Ten thousand executions of zero length run in one loop, not in nested calls."""
    model = Model(max_batch_size=1, duration_ns=0)
    model.send_together(10_000)
    assert len(model.answers) == 10_000


def test_max_batch_size_zero_is_accepted_and_forms_no_batches() -> None:
    """dynamic_batching with max_batch_size 0 runs requests one by one."""
    model = Model(max_batch_size=0)
    model.send_together(3)
    model.clock.advance(ms=100)
    assert model.pool.sizes == [1, 1, 1]


def test_the_second_batch_in_an_instance_is_only_started_full() -> None:
    """With two batches in flight allowed, a partial second one waits for the first to end."""
    model = Model(max_batch_size=4, max_inflight=2)
    model.send("first")
    model.send_together(3)
    assert model.pool.sizes == [1]
    model.send("completes it")
    assert model.pool.sizes == [1, 4]
    model.send("third")
    model.clock.advance(ms=10)
    assert model.pool.sizes == [1, 4, 1]


@pytest.mark.parametrize(
    ("duration_ms", "batching", "inflight"),
    [
        (5, "", 2),
        (50, "", 1),  # a long execution hides the gap
        (5, "priority_levels: 2 default_priority_level: 1", 1),
        (5, "default_queue_policy { max_queue_size: 100 }", 1),
        (5, "default_queue_policy { default_timeout_microseconds: 1000000 }", 1),
    ],
)
def test_the_next_full_batch_is_at_hand_when_a_short_execution_ends(
    duration_ms: int, batching: str, inflight: int
) -> None:
    """One more batch than runs is given to the instance, unless it could still be reordered."""
    model = Model(batching, max_batch_size=4, duration_ns=duration_ms * MS)
    model.pool.prefetches = True
    model.send("learn how long one takes")
    model.clock.advance(ms=100)
    model.send_together(4 * 4)
    assert model.pool.instances[0].inflight == inflight
    model.clock.advance(ms=1_000)
    assert model.pool.sizes == [1, 4, 4, 4, 4]


def test_nothing_is_handed_over_early_once_a_model_asks() -> None:
    """The request of a model may have to be answered for the running execution to end."""
    model = Model(max_batch_size=4, duration_ns=5 * MS)
    model.pool.prefetches = True
    model.send("learn how long one takes")
    model.clock.advance(ms=100)
    asked = model.request("asked")
    asked.for_model = cast("ModelCall", object())
    model.accept(asked)
    model.send_together(4 * 4 - 1)
    assert model.pool.instances[0].inflight == 1
    model.clock.advance(ms=1_000)
    assert sum(model.pool.sizes) == 1 + 4 * 4


def test_a_partial_batch_is_not_handed_over_early() -> None:
    """It goes when the instance is free, or the moment it is full."""
    model = Model(max_batch_size=4, duration_ns=5 * MS)
    model.pool.prefetches = True
    model.send("learn")
    model.clock.advance(ms=100)
    model.send_together(4)
    model.send_together(3)
    assert (model.pool.instances[0].inflight, model.scheduler.queued) == (1, 3)
    model.send("fourth")
    assert (model.pool.instances[0].inflight, model.scheduler.queued) == (2, 0)
    model.send_together(2)
    model.clock.advance(ms=5)
    assert model.scheduler.queued == 2
    model.clock.advance(ms=50)
    assert model.pool.sizes == [1, 4, 4, 2]


def test_a_hundred_thousand_queued_requests_leave_nothing_behind() -> None:
    """A queue of 100,000 with every third one cancelled empties completely."""
    model = Model(max_batch_size=64, duration_ns=1)
    requests = [model.accept(model.request(str(number))) for number in range(100_000)]
    for request in requests[::3]:
        request.cancel()
    model.clock.advance(ms=10)
    assert len(model.answers) == 100_000
    assert model.scheduler.queued == 0
    assert model.pool.statistics.pending == 0
    assert len(model.pool.executed) == -(-66_666 // 64)
