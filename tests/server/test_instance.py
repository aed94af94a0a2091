"""Instances at work: batches, answers, statistics, failures, life and death."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from npuserve.backends.base import ExecutionBatch, LoopInstance, ModelInstance, Placement
from npuserve.errors import InternalError, NpuserveError, UnavailableError
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.instance_pool import InstancePool
from npuserve.server.statistics import ModelStatistics
from npuserve.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Blocking(ModelInstance):
    """A blocking instance made of one function."""

    def __init__(self, execute: Callable[[ExecutionBatch], None]) -> None:
        self.run_batch = execute
        self.threads: list[int] = []
        self.finalized = threading.Event()

    def initialize(self) -> None:
        self.threads.append(threading.get_ident())

    def execute(self, batch: ExecutionBatch) -> None:
        self.threads.append(threading.get_ident())
        self.run_batch(batch)

    def finalize(self) -> None:
        self.threads.append(threading.get_ident())
        self.finalized.set()


class OnLoop(LoopInstance):
    """A loop-driven instance that keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[ExecutionBatch] = []

    def start(self, batch: ExecutionBatch) -> None:
        self.batches.append(batch)


class Client:
    """Collects the responses of one request."""

    def __init__(self) -> None:
        self.responses: list[tuple[InferenceResponse | None, bool]] = []
        self.done = asyncio.Event()
        self.request = InferenceRequest("m", {}, self.receive)
        self.request.batch_size = 1
        self.request.start_ns = self.request.queue_ns = 1

    def receive(self, response: InferenceResponse | None, final: bool) -> None:
        self.responses.append((response, final))
        if final:
            self.done.set()

    @property
    def error(self) -> NpuserveError | None:
        response = self.responses[-1][0]
        return response.error if response else None


@asynccontextmanager
async def pool_of(
    *instances: ModelInstance | LoopInstance, decoupled: bool = False
) -> AsyncIterator[InstancePool]:
    pool = InstancePool("m", 1, asyncio.get_running_loop(), ModelStatistics(), decoupled)
    for index, instance in enumerate(instances):
        pool.add(Placement(f"m_{index}", "CPU", 0, 0, index), instance)
    await pool.initialize()
    try:
        yield pool
    finally:
        await pool.wait_idle()
        await pool.finalize()


def answer_all(batch: ExecutionBatch) -> None:
    for request in batch.requests:
        batch.send(request, InferenceResponse([Tensor("Y", "UINT8", [1], b"\x07")]))


def run(pool: InstancePool, *clients: Client) -> None:
    instance = pool.acquire()
    assert instance is not None
    pool.statistics.pending += len(clients)
    instance.run([client.request for client in clients], len(clients))


async def test_every_method_of_a_blocking_instance_runs_in_its_own_thread() -> None:
    """initialize, execute and finalize see one thread, and it is not the loop's."""
    instance = Blocking(answer_all)
    client = Client()
    async with pool_of(instance) as pool:
        run(pool, client)
        await client.done.wait()
    assert len(instance.threads) == 3
    assert len(set(instance.threads)) == 1
    assert threading.get_ident() not in instance.threads


async def test_a_batch_answers_its_requests_and_counts_them() -> None:
    """Two requests in one execution: inference count 2, execution count 1."""
    clients = [Client(), Client()]
    async with pool_of(Blocking(answer_all)) as pool:
        run(pool, *clients)
        for client in clients:
            await client.done.wait()
        await pool.wait_idle()
        statistics = pool.statistics
    assert [c.responses[0][0].outputs[0].data for c in clients if c.responses[0][0]] == [
        b"\7",
        b"\7",
    ]
    assert (statistics.inference_count, statistics.execution_count) == (2, 1)
    assert statistics.batch[2].compute_infer.count == 1
    assert (statistics.success.count, statistics.pending) == (2, 0)


@pytest.mark.parametrize("raised", [ValueError("odd"), SystemExit(3), KeyboardInterrupt("k")])
async def test_what_execute_raises_reaches_every_request_and_the_instance_lives(
    raised: BaseException,
) -> None:
    """An exception of any class fails the batch only; the next batch is executed."""
    faults = [raised]

    def execute(batch: ExecutionBatch) -> None:
        if faults:
            raise faults.pop()
        answer_all(batch)

    first, second = Client(), Client()
    async with pool_of(Blocking(execute)) as pool:
        run(pool, first)
        await first.done.wait()
        await pool.wait_idle()
        run(pool, second)
        await second.done.wait()
        await pool.wait_idle()
        assert pool.statistics.failures["BACKEND"] == 1
        assert pool.statistics.success.count == 1
    assert type(raised).__name__ in str(first.error)
    assert second.error is None


async def test_a_request_left_without_an_answer_gets_an_error_at_once() -> None:
    """An instance that returns without answering does not leave the client hanging."""
    client = Client()
    async with pool_of(Blocking(lambda batch: None)) as pool:
        run(pool, client)
        await client.done.wait()
    assert isinstance(client.error, InternalError)
    assert "without a response" in str(client.error)


async def test_a_request_kept_open_is_answered_later_from_another_thread() -> None:
    """keep_open lets a model answer after execute returned."""
    kept: list[tuple[ExecutionBatch, InferenceRequest]] = []

    def execute(batch: ExecutionBatch) -> None:
        for request in batch.requests:
            batch.keep_open(request)
            kept.append((batch, request))

    client = Client()
    async with pool_of(Blocking(execute)) as pool:
        run(pool, client)
        await pool.wait_idle()
        assert not client.responses
        batch, request = kept[0]
        threading.Thread(target=batch.send, args=(request, InferenceResponse([]))).start()
        await client.done.wait()
        assert pool.statistics.success.count == 1


async def test_what_is_flushed_arrives_while_the_execution_goes_on() -> None:
    """Answers of a model that is not decoupled wait for its end otherwise."""
    clients, go_on = [Client(), Client()], threading.Event()

    def execute(batch: ExecutionBatch) -> None:
        first, second = batch.requests
        batch.send(first, InferenceResponse([]))
        batch.flush()
        batch.send(second, InferenceResponse([]))
        go_on.wait(60)

    async with pool_of(Blocking(execute)) as pool:
        run(pool, *clients)
        await clients[0].done.wait()
        assert not clients[1].responses
        go_on.set()
        await clients[1].done.wait()


async def test_a_decoupled_request_ends_with_its_final_flag_only() -> None:
    """Any number of responses in order, then an end without a response."""

    def execute(batch: ExecutionBatch) -> None:
        for request in batch.requests:
            for value in (b"\1", b"\2"):
                batch.send(request, InferenceResponse([Tensor("Y", "UINT8", [1], value)]), False)
            batch.send(request, None, True)

    client = Client()
    async with pool_of(Blocking(execute), decoupled=True) as pool:
        run(pool, client)
        await client.done.wait()
    seen = [(r.outputs[0].data if r else None, final) for r, final in client.responses]
    assert seen == [(b"\1", False), (b"\2", False), (None, True)]


async def test_an_error_response_counts_as_a_failure() -> None:
    """A model that answers with an error has not succeeded."""

    def execute(batch: ExecutionBatch) -> None:
        for request in batch.requests:
            batch.send(request, InferenceResponse.from_error(UnavailableError("later")))

    client = Client()
    async with pool_of(Blocking(execute)) as pool:
        run(pool, client)
        await client.done.wait()
        await pool.wait_idle()
        assert pool.statistics.failures["BACKEND"] == 1
        assert pool.statistics.success.count == 0


async def test_answers_after_the_final_one_are_dropped() -> None:
    """A request is answered exactly once as final."""
    instance = OnLoop()
    client = Client()
    async with pool_of(instance) as pool:
        run(pool, client)
        batch = instance.batches[0]
        batch.send(client.request, InferenceResponse([]))
        batch.send(client.request, InferenceResponse([]))
        batch.done()
        batch.done(InternalError("again"))
        assert len(client.responses) == 1
        assert pool.statistics.success.count == 1


async def test_done_with_an_error_fails_what_is_open() -> None:
    """A worker that dies answers exactly the requests it held."""
    instance = OnLoop()
    first, second = Client(), Client()
    async with pool_of(instance, decoupled=True) as pool:
        run(pool, first, second)
        batch = instance.batches[0]
        batch.send(first.request, InferenceResponse([]))
        batch.done(InternalError("worker died"))
        assert first.error is None
        assert str(second.error) == "worker died"


async def test_an_unavailable_instance_is_not_acquired_and_reports_when_it_is_back() -> None:
    """While a worker restarts its instance takes no batch; its return wakes the scheduler."""
    instance = OnLoop()
    async with pool_of(instance) as pool:
        woken: list[str] = []
        pool.on_free = lambda free: woken.append(free.name)
        assert instance.on_available_change is not None
        instance.available = False
        instance.on_available_change()
        assert pool.acquire() is None
        assert not pool.healthy
        instance.available = True
        instance.on_available_change()
        assert woken == ["m_0"]
        assert pool.acquire() is pool.instances[0]


async def test_free_instances_take_turns() -> None:
    """Two idle instances get one batch each."""
    first, second = OnLoop(), OnLoop()
    clients = [Client(), Client()]
    async with pool_of(first, second) as pool:
        for client in clients:
            run(pool, client)
        assert (len(first.batches), len(second.batches)) == (1, 1)
        assert pool.acquire() is None
        for instance in (first, second):
            instance.batches[0].done(InternalError("end"))


async def test_a_failing_initialize_is_raised_and_finalized() -> None:
    """The load fails with the instance's own error, and finalize has run."""

    class Bad(Blocking):
        def initialize(self) -> None:
            raise ValueError("no device")

    instance = Bad(answer_all)
    pool = InstancePool("m", 1, asyncio.get_running_loop(), ModelStatistics(), False)
    pool.add(Placement("m_0", "CPU", 0, 0, 0), instance)
    with pytest.raises(InternalError, match="ValueError: no device"):
        await pool.initialize()
    await pool.finalize()
    assert instance.finalized.is_set()


async def test_outputs_the_configuration_does_not_name_are_dropped() -> None:
    """A client never sees an output that the model's metadata does not list."""
    instance = OnLoop()
    client = Client()
    async with pool_of(instance) as pool:
        pool.output_names = frozenset({"Y"})
        run(pool, client)
        batch = instance.batches[0]
        tensors = [Tensor("X", "UINT8", [0], b""), Tensor("Y", "UINT8", [0], b"")]
        batch.send(client.request, InferenceResponse(tensors))
        batch.done()
    response = client.responses[0][0]
    assert response is not None
    assert [tensor.name for tensor in response.outputs] == ["Y"]
