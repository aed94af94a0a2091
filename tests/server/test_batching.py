"""The batching rules as a pure function."""

from __future__ import annotations

from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from npuserve.model_config import ModelConfig
from npuserve.request import InferenceRequest
from npuserve.server.batching import NOTHING, BatchRules, batch_signature, plan_batch
from npuserve.server.queue import PriorityQueue, QueuePolicy
from npuserve.tensor import Tensor

NOW = 1_000_000


def queue_of(sizes: list[int], ages: list[int] | None = None) -> PriorityQueue:
    queue = PriorityQueue(QueuePolicy())
    for position, size in enumerate(sizes):
        request = InferenceRequest("m", {}, lambda *_: None)
        request.batch_size = size
        request.queue_ns = NOW - (ages[position] if ages else 0)
        queue.push(request, request.queue_ns)
    return queue


@given(
    sizes=st.lists(st.integers(0, 9), max_size=30),
    max_batch=st.integers(1, 16),
    preferred=st.frozensets(st.integers(1, 16), max_size=3),
    delay_ns=st.sampled_from([0, 10]),
    age=st.integers(0, 20),
    grow=st.booleans(),
)
def test_a_plan_is_legal_and_as_large_as_the_rules_allow(
    sizes: list[int],
    max_batch: int,
    preferred: frozenset[int],
    delay_ns: int,
    age: int,
    grow: bool,
) -> None:
    """A plan fits, waits only for the delay, and leaves nothing that had to be taken."""
    rules = BatchRules.make(max_batch, frozenset(n for n in preferred if n <= max_batch), delay_ns)
    queue = queue_of(sizes, [age] * len(sizes))
    plan = plan_batch(queue, NOW, rules, grow)
    rows = [size or 1 for size in sizes]
    if not sizes:
        assert plan == NOTHING
        return
    if not plan.count:
        assert delay_ns > age
        assert plan.wait_until_ns == NOW - age + delay_ns
        assert sum(rows) < rules.max_preferred
        return
    assert plan.batch_size == sum(rows[: plan.count])
    assert plan.count == 1 or plan.batch_size <= max_batch
    rest = rows[plan.count :]
    if rest and not plan.full:
        raise AssertionError("a plan that left requests behind calls itself open")
    if rest and plan.batch_size not in rules.preferred:
        assert plan.batch_size + rest[0] > min(rules.max_preferred, max_batch)
    if delay_ns and age >= delay_ns and rest:
        assert plan.batch_size + rest[0] > max_batch


def test_the_oldest_request_decides_about_the_delay() -> None:
    """The age counts from the oldest of the batch, not from its first."""
    rules = BatchRules.make(8, delay_ns=100)
    assert plan_batch(queue_of([1, 1], [10, 100]), NOW, rules).count == 2
    assert plan_batch(queue_of([1, 1], [10, 90]), NOW, rules).wait_until_ns == NOW + 10


def signature_of(text: str, **inputs: Tensor) -> object:
    config = ModelConfig()
    text_format.Parse(text, config)
    signature = batch_signature(config)
    assert signature is not None
    return signature(InferenceRequest("m", inputs, lambda *_: None))


def test_fixed_shapes_need_no_signature() -> None:
    """A model whose inputs are all fixed and required never compares requests."""
    config = ModelConfig()
    text_format.Parse('input { name: "A" dims: 3 } input { name: "B" dims: 4 }', config)
    assert batch_signature(config) is None


def test_the_set_of_inputs_counts_if_any_is_optional() -> None:
    """Requests with and without an optional input do not share a batch."""
    text = 'input { name: "A" dims: 3 } input { name: "B" dims: 4 optional: true }'
    a, b = Tensor("A", "FP32", [1, 3], b""), Tensor("B", "FP32", [1, 4], b"")
    assert signature_of(text, A=a) != signature_of(text, A=a, B=b)
    assert signature_of(text, B=b, A=a) == signature_of(text, A=a, B=b)


def test_contents_of_shape_tensors_count() -> None:
    """Two requests whose shape tensors differ do not share a batch."""
    text = 'input { name: "S" dims: 2 is_shape_tensor: true }'
    one = Tensor("S", "INT32", [2], bytes(8))
    two = Tensor("S", "INT32", [2], bytes(7) + b"\1")
    assert signature_of(text, S=one) != signature_of(text, S=two)


def test_the_batch_dimension_does_not_count() -> None:
    """Only what follows the batch dimension is compared."""
    text = 'input { name: "A" dims: -1 }'
    assert signature_of(text, A=Tensor("A", "FP32", [1, 3], b"")) == signature_of(
        text, A=Tensor("A", "FP32", [4, 3], b"")
    )
