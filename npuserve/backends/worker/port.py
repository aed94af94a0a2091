"""What a model's side of the backend asks of the server's side, whatever lies between them.

`child.py` implements it over the channel of a worker process, `thread.py` within the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from npuserve.backends.worker.pb_request import InferenceRequest
    from npuserve.backends.worker.pb_response import InferenceResponse


class Mailbox:
    """The answers to one call, in order; filled by one thread, emptied by another.

    Attributes:
        wake: called after an answer was put, if a coroutine waits for it.
        handle: the port's own note of the call.
        taken: answers taken out so far.
    """

    __slots__ = ("handle", "items", "taken", "wake")

    def __init__(self, handle: Any = None) -> None:
        self.items: deque[Any] = deque()
        self.wake: Callable[[], object] | None = None
        self.handle = handle
        self.taken = 0

    def put(self, item: Any) -> None:
        """Add an answer."""
        self.items.append(item)
        wake, self.wake = self.wake, None
        if wake is not None:
            wake()

    def take(self) -> Any:
        """Take out the next answer, which is there."""
        self.taken += 1
        return self.items.popleft()

    def arrival(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """A future of this loop that is set when the next answer comes."""
        arrived = loop.create_future()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_set, arrived)

        self.wake = wake
        return arrived


def _set(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)


class Port(Protocol):
    """The server as the model's objects see it; every method may be called from any thread."""

    @property
    def forked(self) -> bool:
        """Whether this is a process that the model forked, see `forks.py`."""

    def respond(
        self, key: Any, response: InferenceResponse | None, names: Any, final: bool
    ) -> None:
        """One response of a request.

        Args:
            key: of the request, as it came.
            names: outputs to keep; the others are dropped.
        """

    def is_cancelled(self, key: Any) -> bool:
        """Whether the client of a request has gone."""

    def infer(self, request: InferenceRequest, decoupled: bool) -> Mailbox:
        """Start a request of another model.

        Args:
            decoupled: whether any number of responses is welcome.

        Returns:
            A mailbox that gets (response or None, final) for each response.
        """

    def cancel_infer(self, mailbox: Mailbox) -> None:
        """The answers of a started request are not wanted any more."""

    def wait(self, mailbox: Mailbox) -> Any:
        """The next answer; blocks this thread until it is there."""

    async def wait_async(self, mailbox: Mailbox) -> Any:
        """The next answer; does not block the running event loop."""

    def call(self, method: str, *args: Any) -> Any:
        """Have the server do something and wait for the result.

        Raises:
            TritonModelException: it failed; the text is the reason.
        """

    def notify(self, method: str, *args: Any) -> None:
        """Have the server do something, without a result; in order with other calls."""

    def log(self, level: str, text: str, file: str, line: int) -> None:
        """Write a line to the server's log."""
