"""Jobs to a thread and calls back to the loop: all of them, in order; no descriptor is left."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from npuserve.server.handover import JobQueue, Mailbox


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


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
    mailbox = Mailbox(asyncio.get_running_loop())
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
    mailbox = Mailbox(asyncio.get_running_loop())
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


async def test_what_is_posted_late_still_arrives() -> None:
    """A thread that a model left behind posts after the end of its instance."""
    mailbox = Mailbox(asyncio.get_running_loop())
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
        mailbox = Mailbox(asyncio.get_running_loop())
        mailbox.close()
        return mailbox

    mailbox = asyncio.run(make())
    mailbox.post(print)
    assert "the loop is closed" in caplog.text


async def test_closing_frees_the_descriptors() -> None:
    """The numbers may belong to somebody else from then on."""
    before = descriptors()
    mailbox, jobs = Mailbox(asyncio.get_running_loop()), JobQueue[int]()
    assert len(descriptors()) == len(before) + 2
    mailbox.close()
    jobs.close()
    assert descriptors() == before
