"""Context, stream and event of a card, as context managers.

A context belongs to a thread only while it is current there: `Context.activate` before every
group of calls. Each loaded model gets an explicit context of its own, since the default context
of a device is shared by all threads of the process and any of them may destroy it.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from npuserve.backends.acl import codes
from npuserve.backends.acl.library import AclCallError, AclLibrary
from npuserve.errors import InvalidArgumentError


class Owned:
    """Base of what must be given back: `close` once, whatever happened before."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back, in reverse order; harmless when repeated.

        Raises:
            AclCallError: a call failed twice; all the others were made nevertheless.
        """
        self._stack.pop_all().close()


def device_count(library: AclLibrary) -> int:
    """Cards this process may use (`ASCEND_RT_VISIBLE_DEVICES` applied)."""
    count: int = library.value("acl.rt.get_device_count")
    return count


# How many contexts of this process limit the cores of each card.
_limits: Counter[int] = Counter()
_limits_lock = threading.Lock()


class Context(Owned):
    """An explicit context on one card, current in the creating thread.

    Args:
        device_id: logical id, 0 … count-1.

    Raises:
        InvalidArgumentError: there is no such card.
    """

    def __init__(self, library: AclLibrary, device_id: int) -> None:
        super().__init__()
        self.library = library
        self.device_id = device_id
        count = device_count(library)
        if not 0 <= device_id < count:
            cards = ", ".join(map(str, range(count))) or "none"
            raise InvalidArgumentError(f"there is no NPU {device_id}; cards there are: {cards}")
        with ExitStack() as stack:
            library.call("acl.rt.set_device", device_id, context=f"for NPU {device_id}")
            stack.callback(library.release, "acl.rt.reset_device", device_id)
            self.handle: int = library.value("acl.rt.create_context", device_id)
            stack.callback(library.release, "acl.rt.destroy_context", self.handle)
            self._stack = stack.pop_all()

    def activate(self) -> None:
        """Make it the calling thread's context; a thread starts with none."""
        self.library.call("acl.rt.set_context", self.handle)

    def reactivate(self) -> None:
        """`activate` for tearing down: what belongs to a context can only be freed in it."""
        self.library.release("acl.rt.set_context", self.handle)

    def memory(self) -> tuple[int, int]:
        """(free, total) device memory in bytes; the context must be current."""
        try:
            free, total = self._memory(codes.MemoryAttribute.HBM)
        except AclCallError:
            return self._memory(codes.MemoryAttribute.DDR)
        return (free, total) if total else self._memory(codes.MemoryAttribute.DDR)

    def _memory(self, attribute: codes.MemoryAttribute) -> tuple[int, int]:
        free, total = self.library.value("acl.rt.get_mem_info", int(attribute))
        return free, total

    def limit_cores(self, cube: int, vector: int) -> bool:
        """Use at most so many AI cores on this card (0: no limit of that kind).

        Returns:
            False when this CANN has no such call.
        """
        if not self.library.has("acl.rt.set_device_res_limit"):
            return False
        with _limits_lock:
            _limits[self.device_id] += 1
        self._stack.callback(self._lift_limit)
        for kind, value in ((codes.CoreKind.CUBE, cube), (codes.CoreKind.VECTOR, vector)):
            if value:
                self.library.call(
                    "acl.rt.set_device_res_limit", self.device_id, int(kind), value,
                    context=f"to limit {kind.name.lower()} cores to {value}",
                )  # fmt: skip
        return True

    def _lift_limit(self) -> None:
        """The card has all its cores again when nobody is left who limited them."""
        with _limits_lock:
            _limits[self.device_id] -= 1
            if not _limits[self.device_id]:
                self.library.release("acl.rt.reset_device_res_limit", self.device_id)


class Stream(Owned):
    """An ordered queue of work on the current context's card."""

    def __init__(self, library: AclLibrary) -> None:
        super().__init__()
        self.library = library
        self.handle: int = library.value("acl.rt.create_stream")
        self._stack.callback(library.release, "acl.rt.destroy_stream", self.handle)

    def synchronize(self) -> None:
        """Wait until everything queued so far is done; releases the GIL while waiting.

        Raises:
            AclCallError: a queued task failed.
        """
        self.library.call("acl.rt.synchronize_stream", self.handle)

    def wait_for(self, event: Event) -> None:
        """Later work of this stream starts once `event` has happened (waited for on the card)."""
        self.library.call("acl.rt.stream_wait_event", self.handle, event.handle)

    def limit_cores(self, cube: int, vector: int) -> bool:
        """Use at most so many AI cores for this stream, from the calling thread (0: no limit).

        Returns:
            False when this CANN has no such call.
        """
        library = self.library
        if not library.has("acl.rt.set_stream_res_limit"):
            return False
        for kind, value in ((codes.CoreKind.CUBE, cube), (codes.CoreKind.VECTOR, vector)):
            if value:
                library.call(
                    "acl.rt.set_stream_res_limit", self.handle, int(kind), value,
                    context=f"to limit {kind.name.lower()} cores to {value}",
                )  # fmt: skip
        # Without this the limit of a stream has no effect.
        library.call("acl.rt.use_stream_res_in_current_thread", self.handle)
        self._stack.callback(
            library.release, "acl.rt.unuse_stream_res_in_current_thread", self.handle
        )
        return True


class Event(Owned):
    """A point in a stream that another stream, or the host, can wait for."""

    def __init__(self, library: AclLibrary) -> None:
        super().__init__()
        self.library = library
        # Recorded again and again, so it must be of a kind that need not be reset after each
        # wait: events of create_event_with_flag would have to be, these cannot be.
        if library.has("acl.rt.create_event_ex_with_flag"):
            handle = library.value("acl.rt.create_event_ex_with_flag", codes.EVENT_SYNC)
        else:
            handle = library.value("acl.rt.create_event")
        self.handle: int = handle
        self._stack.callback(library.release, "acl.rt.destroy_event", self.handle)

    def record(self, stream: Stream) -> None:
        """Happens when `stream` has done what is queued there now."""
        self.library.call("acl.rt.record_event", self.handle, stream.handle)
