"""What the threads and coroutines of a model are waiting for, found out by looking at them.

A call between models is refused only if it can never be answered, so it has to be known that those
who wait for it do nothing else. The port notes who waits for a response; from there this follows
what waits for those: a thread that is joined, `Future.result`, an event loop with nothing to do, a
task that awaits another one, asyncio.gather, wait, to_thread and task groups, a forked process that
is joined, pools of such. Whatever is not recognised counts as going on.

Runs in every interpreter a worker may have: standard library only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import concurrent.futures.thread
import contextlib
import os
import selectors
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from npuserve.backends.worker.pb_request import InferenceRequest
    from npuserve.backends.worker.port import Mailbox

    # Python 3.8 has no such types.
    Wait = tuple[Any, int]  # (call id, responses taken), see `call_graph.Wait`
    Waits = frozenset[Wait]  # any of which makes the waiting one go on

_JOIN = threading.Thread.join.__code__
_RESULT = concurrent.futures.Future.result.__code__
_RUN_LOOP = asyncio.BaseEventLoop.run_until_complete.__code__
_WORK = concurrent.futures.thread._WorkItem.run.__code__
_NO_WORK = concurrent.futures.thread._worker.__code__
_WAIT = asyncio.tasks._wait.__code__  # type: ignore[attr-defined]
_TaskGroup: Any = getattr(asyncio, "TaskGroup", ())  # since Python 3.11

# The innermost frames of a thread that waits in one of these ways.
_PLUMBING = frozenset(
    module.__file__
    for module in (threading, selectors, concurrent.futures._base, asyncio.base_events)
)
# Not imported: few models have processes of their own.
_LIBRARY = os.path.dirname(threading.__file__) + os.sep
_MULTIPROCESSING = os.path.join(_LIBRARY, "multiprocessing", "")
_EXECUTOR = os.path.join(_LIBRARY, "concurrent", "futures", "process.py")

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


class Waiting:
    """The threads and futures of a model that wait for responses; filled by its port."""

    def __init__(self) -> None:
        self.threads: dict[int, Wait] = {}
        self.futures: dict[Any, Wait] = {}
        self.processes: dict[int, Wait] = {}  # forked ones that do nothing else, by id

    @contextlib.contextmanager
    def blocks(self, mailbox: Mailbox) -> Iterator[None]:
        """Note that this thread waits for the next answer."""
        ident = threading.get_ident()
        self.threads[ident] = (mailbox.handle, mailbox.taken)
        try:
            yield
        finally:
            del self.threads[ident]

    @contextlib.contextmanager
    def awaits(self, future: Any, mailbox: Mailbox) -> Iterator[None]:
        """Note that a future is set when the next answer comes."""
        self.futures[future] = (mailbox.handle, mailbox.taken)
        try:
            yield
        finally:
            del self.futures[future]


class Executing(NamedTuple):
    """A batch that a model is executing.

    Attributes:
        task: which runs it; None in the main thread.
    """

    requests: Sequence[InferenceRequest]
    task: Any = None


NOT_BEGUN = Executing(())  # until the main thread comes to it


def report(
    waiting: Waiting,
    main: int,
    batches: Mapping[int, Executing],
    loop: Any = None,
    *,
    idle: bool = False,
    home: str = "",
) -> tuple[dict[int, Waits], list[int], Waits | None]:
    """What an instance is doing, as in `call_graph.Report`.

    Args:
        main: the thread that executes.
        loop: which runs the tasks of the batches, in that thread.
        idle: this thread called from a callback of its event loop, which does nothing else.
        home: see `View`.
    """
    view = View(waiting, idle, home)
    blocked = view.thread(main)
    awaits = blocked is None and loop is not None and view.is_idle(main, loop)
    found = {}
    for number, batch in batches.items():
        waits = view.future(batch.task) if awaits and batch.task is not None else blocked
        if waits:
            found[number] = waits
    senders = [n for n in found if any(r._sender is not None for r in batches[n].requests)]
    own = [batch.task for batch in batches.values()]
    return found, senders, view.others(main, loop, own) if senders else None


class View:
    """One look at a model.

    Args:
        idle: see `report`.
        home: directory of the model whose threads are meant, where others run in this process.
    """

    def __init__(self, waiting: Waiting, idle: bool = False, home: str = "") -> None:
        self._threads = dict(waiting.threads)
        self._futures = dict(waiting.futures)
        self._processes = dict(waiting.processes)
        self._idle = threading.get_ident() if idle else None
        self._home = home
        self._frames = sys._current_frames()
        self._seen: set[Any] = set()  # on the way
        self._loops: set[Any] = set()  # that threads wait for

    # -- threads ------------------------------------------------------------------------------

    def thread(self, ident: int | None) -> Waits | None:
        """What a thread waits for; None if it goes on."""
        if ident in self._threads:
            return frozenset([self._threads[ident]])
        frame = self._frames.get(ident or 0)
        if ident == self._idle:  # what is above the loop is this look
            while frame is not None and frame.f_code.co_filename not in _PLUMBING:
                frame = frame.f_back
        if self._processes and (waits := self._by_processes(frame)):
            return waits
        while frame is not None and frame.f_code.co_filename in _PLUMBING:
            code = frame.f_code
            if code is _JOIN and frame.f_locals["timeout"] is None:
                return self._once(frame.f_locals["self"], self._joined)
            if code is _RESULT and frame.f_locals["timeout"] is None:
                return self._once(frame.f_locals["self"], self._worked_on)
            if code is _RUN_LOOP:
                loop = frame.f_locals["self"]
                self._loops.add(loop)
                return self.future(frame.f_locals["future"]) if self.is_idle(ident, loop) else None
            frame = frame.f_back
        return None

    def is_idle(self, ident: int | None, loop: Any) -> bool:
        """Whether a thread runs a loop that nothing but threads and descriptors makes go on."""
        ready, timers = getattr(loop, "_ready", (None,)), getattr(loop, "_scheduled", (None,))
        if ready or any(timer is None or not timer.cancelled() for timer in timers):
            return False
        frame = self._frames.get(ident or 0)
        selects = frame is not None and frame.f_code.co_filename == selectors.__file__
        return selects or ident == self._idle

    def _joined(self, thread: threading.Thread) -> Waits | None:
        return self.thread(thread.ident)

    def _worked_on(self, future: Any) -> Waits | None:
        """What the thread of a pool waits for that works on a concurrent future."""
        for ident, frame in self._frames.items():
            for each in _stack(frame):
                if each.f_code is _WORK:
                    item = each.f_locals["self"]
                    if item is not None and item.future is future:
                        return self.thread(ident)
                if each.f_code.co_filename == _EXECUTOR and each.f_code.co_name == "run":
                    items = list(each.f_locals["self"].pending_work_items.values())
                    if any(item.future is future for item in items):
                        return self.thread(ident)
        return None

    # -- forked processes ---------------------------------------------------------------------

    def _by_processes(self, frame: FrameType | None) -> Waits | None:
        """What a thread waits for that waits for forked processes without a time-out."""
        while frame is not None:
            file, values = frame.f_code.co_filename, frame.f_locals
            known = file in _PLUMBING or file == _EXECUTOR or file.startswith(_MULTIPROCESSING)
            if not known or values.get("timeout") is not None:
                return None
            found = _FOR_PROCESSES.get((file[len(_LIBRARY) :], frame.f_code.co_name))
            if found is not None:
                processes, tasks = found(values["self"])
                waits = [self._processes[p] for p in processes if p in self._processes]
                # Each of them is in one task: either no process is left, or no task.
                return frozenset(waits) if len(waits) in (len(processes), tasks) else None
            frame = frame.f_back
        return None

    def others(self, main: int, loop: Any, own: Collection[Any]) -> Waits | None:
        """What all threads but one and all tasks wait for, together; None if one of them goes on.

        Args:
            own: tasks of this package that run the model.
        """
        loops = self._loops if loop is None else {loop}
        waits = [self.thread(i) for i, f in self._frames.items() if i != main and self._works(f)]
        waits += [self.future(task) for each in loops for task in _tasks(each, own)]
        return None if None in waits else frozenset().union(*(each or () for each in waits))

    def _works(self, frame: FrameType) -> bool:
        """Whether a thread is the model's, and not one of a pool that has nothing to do."""
        if frame.f_code is _NO_WORK:
            return not frame.f_locals["work_queue"].empty()
        files = [each.f_code.co_filename for each in _stack(frame)]
        begin = next((file for file in reversed(files) if file != threading.__file__), None)
        if begin is None:  # a threading.Timer
            return True
        return not begin.startswith(_PACKAGE) and any(f.startswith(self._home) for f in files)

    # -- coroutines ---------------------------------------------------------------------------

    def future(self, future: Any) -> Waits | None:
        """What a future or task waits for that is not done; None if it goes on."""
        if future in self._futures:
            return frozenset([self._futures[future]])
        return self._once(future, self._awaited)

    def _awaited(self, future: Any) -> Waits | None:
        awaited = getattr(future, "_fut_waiter", None)
        if awaited is not None:
            several = _several(future)
            return self.future(awaited) if several is None else self.all(several)
        children = getattr(future, "_children", None)  # of asyncio.gather
        if children:
            return self.all(children)
        for callback, _ in getattr(future, "_callbacks", None) or ():
            for source in _enclosed(callback):  # wrap_future
                if isinstance(source, concurrent.futures.Future):
                    return self._once(source, self._worked_on)
        return None

    def all(self, futures: Iterable[Any]) -> Waits | None:
        """What those of the futures wait for that are not done; None if one of them goes on."""
        waits: Waits = frozenset()
        for future in futures:
            if not future.done():
                more = self.future(future)
                if more is None:
                    return None
                waits |= more
        return waits or None

    def _once(self, what: Any, follow: Any) -> Waits | None:
        if what in self._seen:  # they wait for each other
            return None
        self._seen.add(what)
        try:
            waits: Waits | None = follow(what)
            return waits
        finally:
            self._seen.discard(what)


def _of_pool(result: Any) -> tuple[Sequence[int], int]:
    """The processes and the open tasks of the multiprocessing.Pool that a result comes from."""
    pool = result._pool
    results = list(pool._cache.values())
    processes = [process.pid for process in pool._pool]
    if any(hasattr(each, "_index") for each in results):  # imap: nobody knows of how many tasks
        return processes, len(processes)
    return processes, sum(getattr(each, "_number_left", 1) for each in results)


# Where a thread waits for forked processes: gives their ids, and how many tasks they have.
# (A ProcessPoolExecutor of Python 3.8 does not say.)
_FOR_PROCESSES: dict[tuple[str, str], Callable[[Any], tuple[Sequence[int], int]]] = {
    ("multiprocessing/process.py", "join"): lambda process: ([process.pid], 1),
    ("multiprocessing/pool.py", "get"): _of_pool,
    ("concurrent/futures/process.py", "wait_result_broken_or_wakeup"): lambda manager: (
        list(manager.processes), len(manager.pending_work_items),
    ),
}  # fmt: skip


def _tasks(loop: Any, own: Collection[Any]) -> list[Any]:
    """The tasks of a model on a loop."""
    return [
        task
        for task in asyncio.all_tasks(loop)
        if task in own
        or not getattr(task.get_coro(), "cr_code", _JOIN).co_filename.startswith(_PACKAGE)
    ]


def _enclosed(callback: Any) -> Iterator[Any]:
    """The values in a function's closure."""
    for cell in getattr(callback, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not set yet
            yield cell.cell_contents


def _several(task: Any) -> Iterable[Any] | None:
    """The futures that a task waits for in asyncio.wait or at the end of a task group."""
    coroutine = task.get_coro()
    while (inner := getattr(coroutine, "cr_await", None)) is not None and hasattr(inner, "cr_code"):
        coroutine = inner
    frame = getattr(coroutine, "cr_frame", None)
    if frame is None:
        return None
    if frame.f_code is _WAIT:
        futures: Iterable[Any] = frame.f_locals["fs"]
        return tuple(futures)
    group = frame.f_locals.get("self")
    if isinstance(group, _TaskGroup) and frame.f_code.co_name in ("__aexit__", "_aexit"):
        return tuple(group._tasks)
    return None


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those it was called from."""
    while frame is not None:
        yield frame
        frame = frame.f_back
