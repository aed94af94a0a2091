"""Instances with more than one batch on their device."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from npuserve.backends.base import ExecutionBatch, PipelinedInstance, Placement
from npuserve.errors import InternalError
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.instance_pool import InstancePool
from npuserve.server.statistics import ModelStatistics


class Device(PipelinedInstance):
    """Notes what happens; `collect` waits for `release`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.collecting = threading.Event()
        self.release = threading.Semaphore(0)

    def submit(self, batch: ExecutionBatch) -> None:
        name = batch.requests[0].id
        self.events.append(f"submit {name}")
        if name == "bad":
            raise InternalError("refused")

    def collect(self, batch: ExecutionBatch) -> None:
        name = batch.requests[0].id
        self.events.append(f"collect {name}")
        self.collecting.set()
        assert self.release.acquire(timeout=5)
        for request in batch.requests:
            batch.send(request, InferenceResponse([]))


@asynccontextmanager
async def pool_of(device: PipelinedInstance) -> AsyncIterator[InstancePool]:
    loop = asyncio.get_running_loop()
    pool = InstancePool("m", 1, loop, ModelStatistics(), decoupled=False)
    pool.add(Placement("m_0", "CPU", 0, 0, 0), device)
    await pool.initialize()
    try:
        yield pool
    finally:
        await pool.wait_idle()
        await pool.finalize()


def run(pool: InstancePool, name: str) -> asyncio.Future[InferenceResponse | None]:
    """Start one batch of one request."""
    done: asyncio.Future[InferenceResponse | None] = asyncio.get_running_loop().create_future()
    request = InferenceRequest("m", {}, lambda response, final: done.set_result(response), id=name)
    pool.statistics.pending += 1
    instance = pool.acquire()
    assert instance is not None
    instance.run([request], 1)
    return done


async def test_the_next_batch_is_submitted_before_the_first_is_collected() -> None:
    """Two on the device, a third one at hand; collected in order."""
    device = Device()
    async with pool_of(device) as pool:
        first = run(pool, "0")
        await asyncio.to_thread(device.collecting.wait, 5)
        second, third = run(pool, "1"), run(pool, "2")
        assert pool.acquire() is None
        device.release.release(3)
        await asyncio.gather(first, second, third)
        assert device.events == [
            "submit 0", "collect 0", "submit 1", "submit 2", "collect 1", "collect 2"
        ]  # fmt: skip


async def test_a_lone_batch_is_collected_at_once() -> None:
    """Nobody waits for a second one."""
    device = Device()
    device.release.release()
    async with pool_of(device) as pool:
        assert await run(pool, "0") is not None
        assert device.events == ["submit 0", "collect 0"]


async def test_a_batch_that_cannot_be_submitted_gets_the_error() -> None:
    """It is not collected, and the instance lives on."""
    device = Device()
    device.release.release()
    async with pool_of(device) as pool:
        bad = await run(pool, "bad")
        assert bad is not None
        assert str(bad.error) == "refused"
        good = await run(pool, "good")
        assert good is not None
        assert good.error is None
        assert device.events == ["submit bad", "submit good", "collect good"]
