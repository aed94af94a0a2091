"""Jobs to a thread and calls back to the loop: all of them, in order; no descriptor is left."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.server.handover import JobQueue, Mailbox


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def opened(loop: asyncio.AbstractEventLoop | None = None) -> Mailbox:
    mailbox = Mailbox(loop or asyncio.get_running_loop())
    mailbox.open()
    return mailbox


async def test_jobs_arrive_in_order_and_wake_a_thread_that_waits() -> None:
    """Also those that are put while it is not waiting."""
    jobs: JobQueue[int | threading.Event | None] = JobQueue()
    got: list[int] = []

    def work() -> None:
        while (job := jobs.get()) is not None:
            if isinstance(job, int):
                got.append(job)
            else:
                job.set()

    thread = threading.Thread(target=work)
    thread.start()
    for number in range(1000):
        jobs.put(number)
        if number % 100 == 0:
            done = threading.Event()
            jobs.put(done)
            await asyncio.to_thread(done.wait)
            assert jobs.empty
    jobs.put(None)
    await asyncio.to_thread(thread.join)
    jobs.close()
    assert got == list(range(1000))


async def test_calls_of_many_threads_are_made_on_the_loop() -> None:
    """Each thread's calls in its order; none lost however the wake-ups fall together."""
    mailbox = opened()
    loop_thread = threading.get_ident()
    got: list[tuple[int, int]] = []
    everything = asyncio.Event()

    def arrive(thread: int, number: int) -> None:
        assert threading.get_ident() == loop_thread
        got.append((thread, number))
        if len(got) == 4 * 500:
            everything.set()

    def work(thread: int) -> None:
        for number in range(500):
            mailbox.post(arrive, thread, number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(60):
        await everything.wait()
    for thread in threads:
        thread.join()
    mailbox.close()
    for number in range(4):
        assert [n for t, n in got if t == number] == list(range(500))


async def test_a_call_may_post_the_next_one() -> None:
    """From the loop's own thread, too."""
    mailbox = opened()
    ended = asyncio.Event()

    def call(left: int) -> None:
        if left:
            mailbox.post(call, left - 1)
        else:
            ended.set()

    mailbox.post(call, 10)
    async with asyncio.timeout(60):
        await ended.wait()
    mailbox.close()


async def test_calls_posted_meanwhile_wait_for_the_loops_next_turn() -> None:
    """A thread that never ceases to post does not keep the loop from all else."""
    mailbox = opened()
    got: list[str] = []
    ended = asyncio.Event()

    def first() -> None:
        asyncio.get_running_loop().call_soon(got.append, "the loop's own")
        mailbox.post(got.append, "posted meanwhile")
        mailbox.post(ended.set)

    mailbox.post(first)
    async with asyncio.timeout(60):
        await ended.wait()
    mailbox.close()
    assert got == ["the loop's own", "posted meanwhile"]


async def test_a_mailbox_is_idle_when_the_last_call_is_over() -> None:
    """Not as soon as it is taken out: what it does may still be under way."""
    mailbox, loop = opened(), asyncio.get_running_loop()
    states = [mailbox.idle]
    over = asyncio.Event()

    def look() -> None:
        states.append(mailbox.idle)
        if len(states) == 4:
            over.set()

    mailbox.post(look)
    look()
    mailbox.post(loop.call_soon, look)
    async with asyncio.timeout(60):
        await over.wait()
    assert states == [True, False, False, True]  # before, posted, during, after
    mailbox.close()


async def test_a_mailbox_keeps_the_order_while_it_is_opened_and_closed() -> None:
    """However the loop is woken."""
    mailbox = Mailbox(asyncio.get_running_loop())
    got: list[int] = []
    ended = asyncio.Event()
    mailbox.post(got.append, 0)
    mailbox.open()
    mailbox.post(got.append, 1)
    mailbox.close()
    mailbox.post(got.append, 2)
    mailbox.post(ended.set)
    async with asyncio.timeout(60):
        await ended.wait()
    assert got == [0, 1, 2]


class Calls:
    """Calls posted to a loop by several threads, some of which raise; each says when it was made.

    Args:
        plan: for each thread, whether each of its calls raises.
    """

    def __init__(self, plan: list[list[bool]]) -> None:
        self.plan = plan
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._report)
        self.mailbox = opened(self.loop)
        self.made: list[tuple[int, int]] = []
        self.reported: list[Any] = []
        self.all_made = asyncio.Event()
        self.first_turn: asyncio.Future[int] = self.loop.create_future()  # calls made in it
        self.threads = [threading.Thread(target=self._post, args=(n,)) for n in range(len(plan))]
        for thread in self.threads:
            thread.start()

    def _report(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.reported.append(context["exception"].args)

    def _post(self, thread: int) -> None:
        for number in range(len(self.plan[thread])):
            self.mailbox.post(self._call, thread, number)

    def _call(self, thread: int, number: int) -> None:
        if not self.made:
            self.loop.call_soon(lambda: self.first_turn.set_result(len(self.made)))
        self.made.append((thread, number))
        if len(self.made) == sum(map(len, self.plan)):
            self.all_made.set()
        if self.plan[thread][number]:
            raise RuntimeError(thread, number)

    def check(self) -> None:
        """Each call was made once, in its thread's order; each exception was reported once."""
        for thread, calls in enumerate(self.plan):
            assert [n for t, n in self.made if t == thread] == list(range(len(calls)))
        assert self.reported == [(t, n) for t, n in self.made if self.plan[t][n]]


plans = st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=4)


@given(plans)
def test_calls_behind_one_that_raises_are_made_in_the_same_turn(plan: list[list[bool]]) -> None:
    """Whichever of them raise; the loop's exception handler hears of each."""

    async def main() -> None:
        calls = Calls(plan)
        for thread in calls.threads:
            thread.join()  # all is posted before the loop goes on
        assert await calls.first_turn == sum(map(len, plan))
        calls.check()
        calls.mailbox.close()

    asyncio.run(main())


@given(plans)
def test_calls_that_raise_while_others_are_posted_lose_none(plan: list[list[bool]]) -> None:
    """However the threads and the turns of the loop fall together."""

    async def main() -> None:
        calls = Calls(plan)
        async with asyncio.timeout(60):
            await calls.all_made.wait()
        for thread in calls.threads:
            thread.join()
        calls.check()
        calls.mailbox.close()

    asyncio.run(main())


def test_calls_behind_one_that_ends_the_loop_are_made_when_it_goes_on() -> None:
    """The tasks that are cleaned up then may wait for them."""
    loop = asyncio.new_event_loop()
    mailbox = opened(loop)
    got: list[str] = []

    def leave() -> None:
        raise SystemExit

    mailbox.post(leave)
    mailbox.post(got.append, "behind")
    with pytest.raises(SystemExit):
        loop.run_forever()
    assert not got
    loop.run_until_complete(asyncio.sleep(0))
    assert got == ["behind"]
    mailbox.close()
    loop.close()


async def test_closing_makes_the_calls_behind_one_that_raises() -> None:
    """Whoever closes is not the one to hear of it."""
    reported: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    mailbox = opened(loop)
    got: list[str] = []
    error = RuntimeError("broken")

    def fail() -> None:
        raise error

    mailbox.post(fail)
    mailbox.post(got.append, "behind")
    mailbox.close()
    assert got == ["behind"]
    assert reported == [error]


async def test_what_is_posted_late_still_arrives() -> None:
    """A thread that a model left behind posts after the end of its instance."""
    mailbox = opened()
    got: list[str] = []
    mailbox.post(got.append, "before")
    mailbox.close()
    assert got == ["before"]
    late = asyncio.Event()
    await asyncio.to_thread(mailbox.post, late.set)
    async with asyncio.timeout(60):
        await late.wait()


def test_after_the_loop_nobody_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is raised in the thread."""
    caplog.set_level("DEBUG")

    async def make() -> Mailbox:
        mailbox = opened()
        mailbox.close()
        return mailbox

    mailbox = asyncio.run(make())
    mailbox.post(print)
    assert "the loop is closed" in caplog.text


async def test_closing_frees_the_descriptors() -> None:
    """The numbers may belong to somebody else from then on."""
    before = descriptors()
    mailbox, jobs = opened(), JobQueue[int]()
    assert len(descriptors()) == len(before) + 2
    mailbox.close()
    jobs.close()
    assert descriptors() == before
