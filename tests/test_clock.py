"""The clock of the loop is finer than the loop's own timers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from npuserve.clock import Appointment, LoopClock
from npuserve.testing.clock import FakeClock

# No deadline is over before all timers of a test are set, however busy the machine is.
AHEAD_NS = 300_000_000


@pytest.fixture
async def clock() -> AsyncIterator[LoopClock]:
    """The clock of the test's loop."""
    clock = LoopClock(asyncio.get_running_loop())
    yield clock
    clock.close()


async def test_timers_fire_in_deadline_order_and_never_early(clock: LoopClock) -> None:
    """Timers set in any order fire by deadline, each after its time."""
    begin = clock.now_ns() + AHEAD_NS
    fired: list[tuple[int, int]] = []
    done = asyncio.Event()
    for delay_us in (3_000, 200, 900, 1_500):
        clock.call_at(
            begin + delay_us * 1_000,
            lambda d=delay_us: fired.append((d, clock.now_ns() - begin)),  # type: ignore[misc]
        )
    clock.call_at(begin + 4_000_000, done.set)
    await done.wait()
    assert [delay for delay, _ in fired] == [200, 900, 1_500, 3_000]
    assert all(after >= delay * 1_000 for delay, after in fired)


async def test_a_past_time_is_called_soon(clock: LoopClock) -> None:
    """A time that is over already does not wait."""
    done = asyncio.Event()
    clock.call_at(clock.now_ns() - 1, done.set)
    await asyncio.sleep(0)
    assert done.is_set()


async def test_a_cancelled_timer_does_not_fire(clock: LoopClock) -> None:
    """Neither a waiting one, nor one that is due and cancelled by another callback."""
    done = asyncio.Event()
    fired: list[str] = []
    when_ns = clock.now_ns() + AHEAD_NS
    clock.call_at(when_ns, lambda: second.cancel())
    second = clock.call_at(when_ns, lambda: fired.append("second"))
    clock.call_at(when_ns + 1, done.set)
    await done.wait()
    assert fired == []


async def test_an_exception_of_one_callback_stops_no_other(clock: LoopClock) -> None:
    """Callbacks are isolated from each other."""
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    done = asyncio.Event()
    when_ns = clock.now_ns() + AHEAD_NS
    clock.call_at(when_ns, lambda: [][0])
    clock.call_at(when_ns, done.set)
    await done.wait()
    assert len(problems) == 1


async def test_cancelled_timers_are_forgotten(clock: LoopClock) -> None:
    """A million far timers, each cancelled, would not stay in memory."""
    far_ns = clock.now_ns() + (1 << 50)
    for _ in range(10_000):
        clock.call_at(far_ns, lambda: None).cancel()
    assert len(clock._timers) < 200


async def test_sub_millisecond_delays_are_kept(clock: LoopClock) -> None:
    """The best of twenty 200 us timers is late by less than half a millisecond."""
    late = []
    for _ in range(20):
        done = asyncio.Event()
        when_ns = clock.now_ns() + 200_000
        clock.call_at(when_ns, done.set)
        await done.wait()
        late.append(time.monotonic_ns() - when_ns)
    assert 0 <= min(late) < 500_000


def test_the_fake_clock_calls_timers_at_their_own_time() -> None:
    """Advance stops at each deadline on the way."""
    clock = FakeClock(now_ns=1_000)
    seen: list[int] = []
    clock.call_at(1_500, lambda: seen.append(clock.now_ns()))
    clock.call_at(1_200, lambda: seen.append(clock.now_ns()))
    clock.call_at(1_300, lambda: seen.append(0)).cancel()
    clock.call_soon(lambda: seen.append(clock.now_ns()))
    clock.advance(ns=400)
    assert seen == [1_000, 1_200]
    assert (clock.now_ns(), clock.next_timer_ns) == (1_400, 1_500)


def test_an_appointment_is_kept_once_at_the_earliest_time() -> None:
    """A later wish changes nothing, 0 is none, and after the call a new one can be made."""
    clock = FakeClock()
    kept: list[int] = []
    appointment = Appointment(clock, lambda: kept.append(clock.now_ns()))
    begin = clock.now_ns()
    for delay_ns in (500, 200, 900):
        appointment.by(begin + delay_ns)
    appointment.by(0)
    clock.advance(ns=1_000)
    assert kept == [begin + 200]
    appointment.by(begin + 1_500)
    clock.advance(ns=1_000)
    assert kept == [begin + 200, begin + 1_500]


def test_an_appointment_that_was_cancelled_can_be_made_anew() -> None:
    """Nothing is left of the first one."""
    clock = FakeClock()
    kept: list[int] = []
    appointment = Appointment(clock, lambda: kept.append(clock.now_ns()))
    begin = clock.now_ns()
    appointment.by(begin + 100)
    appointment.cancel()
    appointment.cancel()
    assert clock.next_timer_ns == 0
    appointment.by(begin + 300)
    clock.advance(ns=1_000)
    assert kept == [begin + 300]
