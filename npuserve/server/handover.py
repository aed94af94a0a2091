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

    One wake-up serves all that is posted until the loop comes to it. A call that raises is reported
    to the loop's exception handler and holds up none of those behind it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._announced = False
        self._closing = threading.Lock()  # nobody may write to a descriptor that is closed
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        loop.add_reader(self._bell, self._rung)

    def post(self, function: Callable[..., None], *args: Any) -> None:
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
            self._loop.call_soon_threadsafe(self._open)
        except RuntimeError:
            logger.debug("the loop is closed: nobody is left to tell")

    def _rung(self) -> None:
        os.eventfd_read(self._bell)
        self._open()

    def _open(self) -> None:
        self._announced = False
        calls = self._calls
        while calls:
            try:
                while calls:
                    function, args = calls.popleft()
                    function(*args)
            except (KeyboardInterrupt, SystemExit):
                self._loop.call_soon(self._open)  # what is left, if the loop is run once more
                raise
            except BaseException as error:  # as the loop does with what it calls itself
                self._loop.call_exception_handler(
                    {"message": "Exception in a call posted to the loop", "exception": error}
                )

    def close(self) -> None:
        """Free the descriptor; what threads that were left behind post still arrives."""
        self._loop.remove_reader(self._bell)
        with self._closing:
            bell, self._bell = self._bell, -1
        os.close(bell)
        self._open()
