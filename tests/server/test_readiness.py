"""Asking instances whether they are ready: shared questions and the time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from npuserve.backends.base import LoopInstance, ModelInstance
from npuserve.server import readiness
from npuserve.server.instance import Instance
from npuserve.server.readiness import Readiness


class Asked(LoopInstance):
    """Answers when the test says so."""

    has_readiness = True

    def __init__(self) -> None:
        self.questions = 0
        self.answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def is_ready(self) -> bool:
        """See `LoopInstance.is_ready`."""
        self.questions += 1
        return await self.answer


def instances(*backend_instances: LoopInstance | ModelInstance) -> Sequence[Instance]:
    """As `Readiness` sees them."""
    made: list[Any] = [
        SimpleNamespace(name=f"m_0_{index}", backend_instance=instance)
        for index, instance in enumerate(backend_instances)
    ]
    return cast("Sequence[Instance]", made)


@pytest.fixture
async def asks() -> Readiness:
    """A new one."""
    return Readiness(asyncio.get_running_loop())


async def test_an_instance_without_opinion_is_not_asked(asks: Readiness) -> None:
    """Most models have no `is_ready`: their readiness costs no round trip."""
    assert await asks.check(instances(LoopInstance(), ModelInstance()))


async def test_checks_at_the_same_time_share_one_question(asks: Readiness) -> None:
    """A hundred probes are one call of the model."""
    asked = Asked()
    checks = [asyncio.ensure_future(asks.check(instances(asked))) for _ in range(100)]
    await asyncio.sleep(0)
    asked.answer.set_result(True)
    assert all(await asyncio.gather(*checks))
    assert asked.questions == 1


async def test_all_instances_must_be_ready(asks: Readiness) -> None:
    """One instance that is not ready makes the model not ready."""
    good, bad = Asked(), Asked()
    good.answer.set_result(True)
    bad.answer.set_result(False)
    assert await asks.check(instances(good, good))
    assert not await asks.check(instances(good, bad))


async def test_an_instance_that_hangs_is_not_ready(
    asks: Readiness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check gives up at the limit; the open question serves the checks that follow."""
    monkeypatch.setattr(readiness, "ANSWER_LIMIT_S", 0.01)
    asked = Asked()
    assert not await asks.check(instances(asked))
    assert not await asks.check(instances(asked))
    assert asked.questions == 1
    asked.answer.set_result(True)
    assert await asks.check(instances(asked))


async def test_closing_ends_open_checks(asks: Readiness) -> None:
    """A model that is unloaded while it is asked is not ready."""
    check = asyncio.ensure_future(asks.check(instances(Asked())))
    await asyncio.sleep(0)
    asks.close()
    assert not await check
