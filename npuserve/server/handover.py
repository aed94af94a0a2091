"""How the loop and the thread of an instance hand work to each other.

What wakes the other side is a write to an eventfd, because Python lets go of the interpreter lock
meanwhile: the thread that wakes up finds it free. After a wake-up under the lock (SimpleQueue,
call_soon_threadsafe) it would run just to find the lock taken and fall asleep again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_Job = TypeVar("_Job")


class JobQueue(Generic[_Job]):
    """First in, first out; for one thread that puts and one that gets."""

    def __init__(self) -> None:
        self._jobs: deque[_Job] = deque()
        self._count = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)

    def put(self, job: _Job) -> None:
        """Wake the other thread for it."""
        self._jobs.append(job)
        os.eventfd_write(self._count, 1)

    def get(self) -> _Job:
        """The next job; waits until there is one."""
        os.eventfd_read(self._count)
        return self._jobs.popleft()

    @property
    def empty(self) -> bool:
        """Whether `get` would wait."""
        return not self._jobs

    def close(self) -> None:
        """Free the descriptor; nobody may put or get any more."""
        os.close(self._count)


class Mailbox:
    """Calls to be made on the loop's thread, in the order posted; from any thread.

    One for all threads of a server, so that whatever one does in a row happens in that order. One
    wake-up serves all that is posted until the loop comes to it. A call that raises is reported to
    the loop's exception handler and holds up none of those behind it.

    Works without being opened, or after it was closed, by slower wake-ups.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._announced = False
        self._working = False
        self._closing = threading.Lock()  # nobody may write to a descriptor that is closed
        self._bell = -1

    def open(self) -> None:
        """Take the descriptor that wakes the loop. Loop thread."""
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._loop.add_reader(self._bell, self._rung)

    @property
    def idle(self) -> bool:
        """Whether all that was posted has been done."""
        return not self._calls and not self._working  # in this order, see `_make_calls`

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function(*args)` on the loop's thread."""
        self._calls.append((function, args))
        if self._announced:
            return
        self._announced = True
        with self._closing:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)
                return
        try:
            self._loop.call_soon_threadsafe(self._make_calls)
        except RuntimeError:
            logger.debug("the loop is closed: nobody is left to tell")

    def _rung(self) -> None:
        os.eventfd_read(self._bell)
        self._make_calls()

    def _make_calls(self) -> None:
        self._working = True  # before the first one is taken out
        self._announced = False
        calls = self._calls
        left = len(calls)  # what comes meanwhile has rung again: the loop has more to do than this
        while left:
            try:
                while left:
                    left -= 1
                    function, args = calls.popleft()
                    function(*args)
            except (KeyboardInterrupt, SystemExit):
                # What is left, if the loop is run once more.
                self._loop.call_soon(self._make_calls)
                raise
            except BaseException as error:  # as the loop does with what it calls itself
                self._loop.call_exception_handler(
                    {"message": "Exception in a call posted to the loop", "exception": error}
                )
        self._working = False

    def close(self) -> None:
        """Free the descriptor; what threads that were left behind post still arrives."""
        with self._closing:
            bell, self._bell = self._bell, -1
        if bell >= 0:
            self._loop.remove_reader(bell)
            os.close(bell)
        self._make_calls()
