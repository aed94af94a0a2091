"""How busy the cards are kept, in modelled time: 5 ms of compute, copies over PCIe.

Modelled time counts the CPU time of the instance's thread, so what the backend itself costs is in
it, and a busy machine is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from npuserve.backends.acl.runner import RunnerOptions
from npuserve.backends.base import Backend, BackendModelContext, ModelInstance
from npuserve.backends.npu_instance import NpuInstance
from npuserve.backends.om import OmBackend, model_path
from npuserve.request import InferenceRequest
from npuserve.tensor import Tensor
from npuserve.testing.backend_driver import BackendDriver
from npuserve.testing.simulator import simulate
from npuserve.testing.simulator.runtime import Runtime
from tests.backends.npu_models import affine, compile_om, make_config, parameters

DEVICE_MS = 5
BATCHES = 60
WIDTH = 64 * 1024  # of FP32: 256 KiB, about 30 µs over PCIe
CONFIG = "max_batch_size: 1 "


def wide_om(model_dir: Path) -> Path:
    affine(model_dir, ["n", WIDTH])
    return compile_om(model_dir, f"--input_shape=x:1,{WIDTH}", f"--simulator_device_ms={DEVICE_MS}")


async def saturate(driver: BackendDriver, batches: int = BATCHES) -> None:
    """Keep every instance as full as it may be until all batches are answered."""
    data = np.ones((1, WIDTH), np.float32)
    left = batches
    answered = 0
    done = asyncio.Event()

    def on_response(response: object, final: bool) -> None:
        nonlocal answered
        answered += final
        if answered == batches:
            done.set()

    def fill(_: object = None) -> None:
        nonlocal left
        while left and (instance := driver.pool.acquire()) is not None:
            left -= 1
            request = InferenceRequest("m", {"x": Tensor.from_numpy("x", data)}, on_response)
            request.batch_size = 1
            driver.pool.statistics.pending += 1
            instance.run([request], 1)

    driver.pool.on_free = fill
    fill()
    async with asyncio.timeout(15):
        await done.wait()
    driver.pool.on_free = None


def executions_per_ns(machine: Runtime) -> float:
    """Throughput of all cards together.

    Each card by its own time: modelled clocks of different threads are not comparable, and how
    many batches a thread gets depends on real time.
    """
    rate = 0.0
    for card in machine.cards:
        spans = list(card.trace)
        time_ns = max(span.end_ns for span in spans) - min(span.start_ns for span in spans)
        rate += sum(span.engine == "compute" for span in spans) / time_ns
    return rate


async def best_of_three(measure: Callable[[], Awaitable[float]]) -> float:
    """What the code can do, whatever else the machine is doing during one of the runs."""
    return max([await measure() for _ in range(3)])


def place_on_cards(driver: BackendDriver) -> BackendDriver:
    """One instance per card."""
    for card, placement in enumerate(driver.context.placements):
        object.__setattr__(placement, "device_id", card)
    return driver


async def test_one_instance_keeps_its_card_busy(tmp_path: Path) -> None:
    """The two streams of a slot pair overlap copies with compute: at least 97 % busy."""
    wide_om(tmp_path)
    with simulate(cards=1, time="modelled") as machine:
        async with BackendDriver(OmBackend(), make_config(CONFIG), tmp_path) as driver:
            await saturate(driver)
            assert machine.cards[0].busy_share() >= 0.97


async def test_two_instances_keep_their_card_busy(tmp_path: Path) -> None:
    """The same with two instances that run one batch at a time, as without pipelining."""
    wide_om(tmp_path)
    config = make_config(CONFIG + parameters(pipeline_depth="1"))
    with simulate(cards=1, time="modelled") as machine:
        async with BackendDriver(OmBackend(), config, tmp_path, instances=2) as driver:
            await saturate(driver)
            assert machine.cards[0].busy_share() >= 0.97


async def test_without_pipelining_the_card_waits(tmp_path: Path) -> None:
    """One batch at a time: copies and the host's work are in the way, which the trace shows."""
    wide_om(tmp_path)
    config = make_config(CONFIG + parameters(pipeline_depth="1"))
    with simulate(cards=1, time="modelled", pcie_gb_s=0.25) as machine:
        async with BackendDriver(OmBackend(), config, tmp_path) as driver:
            await saturate(driver)
            assert machine.cards[0].busy_share() < 0.9
            assert overlaps(machine) == 0


def overlaps(machine: Runtime) -> int:
    """Uploads that ran while the card computed something else."""
    computes = [span for span in machine.spans() if span.engine == "compute"]
    return sum(
        any(c.start_ns < span.start_ns and span.end_ns < c.end_ns for c in computes)
        for span in machine.spans()
        if span.engine == "copy to device"
    )


async def test_the_next_batch_is_copied_during_compute(tmp_path: Path) -> None:
    """The trace shows uploads inside the compute of the batch before."""
    wide_om(tmp_path)
    with simulate(cards=1, time="modelled") as machine:
        async with BackendDriver(OmBackend(), make_config(CONFIG), tmp_path) as driver:
            await saturate(driver)
            assert overlaps(machine) > 0.5 * BATCHES  # a busy machine may split some off
            machine.write_trace(tmp_path / "trace.json")
            assert '"copy to device"' in (tmp_path / "trace.json").read_text()


async def test_four_cards_with_an_instance_each_are_3_8_times_one(tmp_path: Path) -> None:
    """KIND_GPU with four cards: throughput grows with the cards."""
    wide_om(tmp_path)

    async def speedup() -> float:
        rates = {}
        for cards in (1, 4):
            with simulate(cards=cards, time="modelled") as machine:
                driver = place_on_cards(
                    BackendDriver(OmBackend(), make_config(CONFIG), tmp_path, instances=cards)
                )
                async with driver:
                    await saturate(driver, 4 * BATCHES)
                    rates[cards] = executions_per_ns(machine)
        return rates[4] / rates[1]

    assert await best_of_three(speedup) >= 3.8


class LanesBackend(Backend):
    """One instance that feeds several cards from its one thread."""

    def __init__(self, cards: int) -> None:
        self.cards = cards

    def load(self, context: BackendModelContext) -> list[ModelInstance]:
        path = model_path(context)
        return [NpuInstance(context, path, [RunnerOptions(c) for c in range(self.cards)])]


async def test_one_thread_feeds_four_cards(tmp_path: Path) -> None:
    """The host's work for four cards fits into one thread: still 3.8 times one card."""
    wide_om(tmp_path)
    config = CONFIG + (
        f"input {{ name: 'x' data_type: TYPE_FP32 dims: {WIDTH} }} "
        f"output {{ name: 'y' data_type: TYPE_FP32 dims: {WIDTH} }}"
    )

    async def speedup() -> float:
        rates = {}
        for cards in (1, 4):
            with simulate(cards=cards, time="modelled") as machine:
                backend = LanesBackend(cards)
                async with BackendDriver(backend, make_config(config), tmp_path) as driver:
                    await saturate(driver, 4 * BATCHES)
                    rates[cards] = executions_per_ns(machine)
                    counts = [sum(s.engine == "compute" for s in c.trace) for c in machine.cards]
                    assert max(counts) - min(counts) <= 8
        return rates[4] / rates[1]

    assert await best_of_three(speedup) >= 3.8
