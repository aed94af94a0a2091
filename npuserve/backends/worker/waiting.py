"""What the threads and coroutines of a model are waiting for, found out by looking at them.

A call between models is refused only if it can never be answered, so it has to be known that those
who wait for it do nothing else. The port notes who waits for a response; from there this follows
what waits for those: a thread that is joined, `Future.result`, an event loop with nothing to do, a
task that awaits another one, asyncio.gather, wait, as_completed, shield, to_thread, task groups and
locks, a forked process that is joined, pools of threads and of processes. Whatever is not
recognised counts as going on.

Runs in every interpreter a worker may have: standard library only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import concurrent.futures.thread
import contextlib
import gc
import inspect
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
_POOLED = concurrent.futures.thread._worker.__code__
_POOLED_THREADS: Any = concurrent.futures.thread._threads_queues
_FUTURES = (concurrent.futures.wait.__code__, concurrent.futures.as_completed.__code__)
_WAIT = asyncio.tasks._wait.__code__  # type: ignore[attr-defined]
_GET = asyncio.Queue.get.__code__
_ACQUIRE = (asyncio.Lock.acquire.__code__, asyncio.Semaphore.acquire.__code__)
_TaskGroup: Any = getattr(asyncio, "TaskGroup", ())  # since Python 3.11

_DONE = (concurrent.futures._base.CANCELLED_AND_NOTIFIED, concurrent.futures._base.FINISHED)

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
        return self._once(ident, self._by_frames)

    def _by_frames(self, ident: int | None) -> Waits | None:
        frame = self._frames.get(ident or 0)
        if ident == self._idle:  # what is above the loop is this look
            while frame is not None and frame.f_code.co_filename not in _PLUMBING:
                frame = frame.f_back
        if waits := self._by_pool(frame):
            return waits
        while frame is not None and frame.f_code.co_filename in _PLUMBING:
            code = frame.f_code
            if code is _JOIN and frame.f_locals["timeout"] is None:
                return self.thread(frame.f_locals["self"].ident)
            if code is _RESULT and frame.f_locals["timeout"] is None:
                return self._worked_on(frame.f_locals["self"])
            if code in _FUTURES and frame.f_locals["timeout"] is None:
                return self._finished(frame.f_locals)
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

    def _finished(self, values: Mapping[str, Any]) -> Waits | None:
        """What a thread waits for in concurrent.futures.wait or as_completed."""
        futures, waiter = values.get("not_done") or values.get("pending"), values.get("waiter")
        if not futures or waiter is None or waiter.event.is_set():
            return None
        waits = [self._worked_on(future) or self._queued(future) for future in futures]
        if values.get("return_when") == concurrent.futures.ALL_COMPLETED:
            waits = [each for each in waits if each]  # it needs each of them, whatever others do
        return _together(waits)

    def _worked_on(self, future: Any) -> Waits | None:
        """What the thread of a pool waits for that works on a concurrent future."""
        if future._state in _DONE:  # it may still be in a callback
            return None
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

    def _queued(self, future: Any) -> Waits | None:
        """What the threads of a pool wait for that has a concurrent future in its queue."""
        threads = [(thread(), queue) for thread, queue in list(_POOLED_THREADS.data.items())]
        for thread, queue in threads:
            if any(getattr(item, "future", None) is future for item in _items(queue)):
                reference = getattr(thread, "_args", (None,))[0]  # unless the thread has ended
                pool = reference and reference()
                fellows = [each for each, its_queue in threads if its_queue is queue]
                if pool is None or len(fellows) < pool._max_workers:  # one more may come
                    return None
                return _together(self.thread(each and each.ident) for each in fellows)
        return None

    # -- pools and forked processes -----------------------------------------------------------

    def _by_pool(self, frame: FrameType | None) -> Waits | None:
        """What a thread waits for that waits for forked processes, or for a pool, without limit."""
        while frame is not None:
            file = frame.f_code.co_filename
            known = file in _PLUMBING or file == _EXECUTOR or file.startswith(_MULTIPROCESSING)
            if not known or (values := frame.f_locals).get("timeout") is not None:
                return None
            found = _FOR_WORKERS.get((file[len(_LIBRARY) :], frame.f_code.co_name))
            if found is not None:
                workers, tasks = found(values["self"])
                waits = [each for each in map(self._worker, workers) if each]
                # Each of them is in one task: either no worker is left, or no task.
                return _together(waits) if len(waits) in (len(workers), tasks) else None
            frame = frame.f_back
        return None

    def _worker(self, worker: Any) -> Waits | None:
        """What a worker of a pool waits for, a thread or a process."""
        if isinstance(worker, threading.Thread):
            return self.thread(worker.ident)
        wait = self._processes.get(worker.pid)
        return None if wait is None else frozenset([wait])

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
        if frame.f_code is _POOLED:
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
            frame = _innermost(future)
            if frame is not None and frame.f_code in _ACQUIRE:
                return self._released(frame.f_locals["self"], awaited.get_loop())
            several = _several(frame, awaited.get_loop())
            return self.future(awaited) if several is None else self.all(several)
        children = getattr(future, "_children", None)  # of asyncio.gather
        if children:
            return self.all(children)
        for callback, _ in getattr(future, "_callbacks", None) or ():
            for source in _enclosed(callback):  # wrap_future
                if isinstance(source, concurrent.futures.Future):
                    return self._worked_on(source) or self._queued(source)
                if callback.__qualname__.startswith("shield.") and asyncio.isfuture(source):
                    return self.future(source)
        return None

    def _released(self, lock: Any, loop: Any) -> Waits | None:
        """What those wait for who have a lock or semaphore, if they are known to be all."""
        most = 1 if isinstance(lock, asyncio.Lock) else getattr(lock, "_bound_value", 0)
        holders = [task for task in asyncio.all_tasks(loop) if _holds(task, lock)]
        return self.all(holders) if len(holders) == most else None

    def all(self, futures: Iterable[Any]) -> Waits | None:
        """What those of the futures wait for that are not done; None if one of them goes on."""
        return _together(self.future(future) for future in futures if not future.done())

    def _once(self, what: Any, follow: Any) -> Waits | None:
        if what in self._seen:  # they wait for each other
            return None
        self._seen.add(what)
        try:
            waits: Waits | None = follow(what)
            return waits
        finally:
            self._seen.discard(what)


def _together(several: Iterable[Waits | None]) -> Waits | None:
    """What all of them wait for; None if there are none, or if one goes on."""
    waits: Waits = frozenset()
    for each in several:
        if each is None:
            return None
        waits |= each
    return waits or None


def _items(queue: Any) -> Iterator[Any]:
    """What is in a SimpleQueue, which lets nobody look."""
    for each in gc.get_referents(queue):
        if isinstance(each, list):  # until Python 3.12
            yield from each
        else:
            yield each


def _of_pool(result: Any) -> tuple[Sequence[Any], int]:
    """The workers and the open tasks of the multiprocessing.Pool that a result comes from."""
    workers = list(result._pool._pool)
    tasks = [_tasks_of(each) for each in list(result._pool._cache.values())]
    if result._items if hasattr(result, "_items") else result.ready():
        return (), 0
    return workers, len(workers) if None in tasks else sum(each or 0 for each in tasks)


def _tasks_of(result: Any) -> int | None:
    """The open tasks of a result of a multiprocessing.Pool; None if more may come."""
    if hasattr(result, "_unsorted"):  # of imap
        length: int | None = result._length
        return length and length - result._index - len(result._unsorted)
    return getattr(result, "_number_left", 1)


# Where a thread waits for workers: gives them, and how many tasks they have.
# (A ProcessPoolExecutor of Python 3.8 does not say.)
_FOR_WORKERS: dict[tuple[str, str], Callable[[Any], tuple[Sequence[Any], int]]] = {
    ("multiprocessing/process.py", "join"): lambda process: ([process], 1),
    ("multiprocessing/pool.py", "get"): _of_pool,
    ("multiprocessing/pool.py", "next"): _of_pool,
    ("concurrent/futures/process.py", "wait_result_broken_or_wakeup"): lambda manager: (
        list(manager.processes.values()), len(manager.pending_work_items),
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


def _coroutines(task: Any) -> list[Any]:
    """What a task runs: its coroutine, the one that that awaits, and so on."""
    coroutines = [task.get_coro()]
    while hasattr(inner := getattr(coroutines[-1], "cr_await", None), "cr_code"):
        coroutines.append(inner)
    return coroutines


def _innermost(task: Any) -> FrameType | None:
    """Where a task awaits."""
    frame: FrameType | None = getattr(_coroutines(task)[-1], "cr_frame", None)
    return frame


def _several(frame: FrameType | None, loop: Any) -> Iterable[Any] | None:
    """The futures that are waited for in asyncio.wait, as_completed or at the end of a group."""
    if frame is None:
        return None
    if frame.f_code is _WAIT:
        futures: Iterable[Any] = frame.f_locals["fs"]
        return tuple(futures)
    this = frame.f_locals.get("self")
    if frame.f_code is _GET:
        return _to_do(this, loop)
    if isinstance(this, _TaskGroup) and frame.f_code.co_name in ("__aexit__", "_aexit"):
        return tuple(this._tasks)
    return None


def _to_do(queue: Any, loop: Any) -> Iterable[Any] | None:
    """The futures that asyncio.as_completed puts into a queue once they are done."""
    for task in asyncio.all_tasks(loop):
        for callback, _ in getattr(task, "_callbacks", None) or ():
            values: Mapping[str, Any] = {}
            name = getattr(callback, "__qualname__", "")
            if name == "as_completed.<locals>._on_completion":
                values = inspect.getclosurevars(callback).nonlocals
            elif name == "_AsCompletedIterator._handle_completion":  # since Python 3.13
                values = {key[1:]: value for key, value in vars(callback.__self__).items()}
            if values.get("done") is queue:
                return tuple(values["todo"])
    return None


def _holds(task: Any, lock: Any) -> bool:
    """Whether a task is in `async with` of a lock or semaphore, or of a condition that has it."""
    coroutines = _coroutines(task)
    frame = _innermost(task)
    if frame is not None and frame.f_code in _ACQUIRE and frame.f_locals["self"] is lock:
        return False  # it wants to enter
    for index, coroutine in enumerate(coroutines):
        # What is called at the end lies on its stack; only until Python 3.10 the frame knows that.
        for each in gc.get_referents(coroutine, getattr(coroutine, "cr_frame", None)):
            if getattr(each, "__name__", "") == "__aexit__":
                owner = getattr(each, "__self__", None)
                if lock is owner or lock is getattr(owner, "_lock", None):
                    return not any(map(_releases, coroutines[index:]))
    return False


def _releases(coroutine: Any) -> bool:
    """Whether it may have let go of a lock for a while, as `Condition.wait` does."""
    return "release" in getattr(coroutine, "cr_code", _JOIN).co_names


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those it was called from."""
    while frame is not None:
        yield frame
        frame = frame.f_back
