"""The loop and quick instances take turns on one core. Owned by the core.

Waking a thread on another core takes 20 to 50 us (an interrupt, an idle core, cold caches), and
a request of a quick model is little but two such hand-overs. Where the two sides do not work at
the same time anyway, one core does better:

- a Python model in a thread, as only one thread runs Python at a time (1.3 to 1.5 times the
  requests of two cores);
- a worker process, or a library that lets go of the interpreter, as long as requests come one at
  a time.

Longer executions keep all cores: there the hand-over is of no account. A batch may take longer
by so much for every request that there are hand-overs for: the loop reads requests meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Set

    from npuserve.clock import Clock, Timer

logger = logging.getLogger(__name__)

_LOOK_NS = 100_000_000
_REST_NS = 1_000_000_000  # between looks while there is nobody to look at
_MIN_EVERY_NS = 5_000_000  # a request; fewer are not worth it
# Processor time of one execution. Two limits, so that a model in between keeps its place.
_QUICK_NS = 250_000
_SLOW_NS = 400_000
# The loop's own, per execution: where it has more to do (large bodies), hand-overs do not count.
_LOOP_NS = 500_000
# More of them for each further request of a batch.
_QUICK_REQUEST_NS = 30_000
_LOOP_REQUEST_NS = 50_000
_LONE_SHARE = 0.9  # of the executions: then requests come one at a time
# So often they are let loose for a moment: the kernel moves them if others crowd in, and whether
# requests come one at a time shows only where two could be served at a time.
_LOOKS_IN_A_ROW = 10
_LOOSE_NS = 20_000_000


class Executor(Protocol):
    """What has to be known of an instance; see `Instance`."""

    @property
    def native_thread_id(self) -> int:
        """Kernel's id of the thread, or of the process, that executes."""

    @property
    def overlaps(self) -> bool:
        """Whether the loop can do something while it executes."""

    executions: int
    requests: int
    lone_executions: int

    def core_shared(self, shared: bool) -> None:
        """Told when it begins and ends to share the loop's core."""


class Cores(Protocol):
    """The kernel's side; threads are named by the kernel's ids."""

    def allowed(self) -> frozenset[int]:
        """Cores the calling thread may use."""

    def current(self) -> int:
        """The core the calling thread runs on."""

    def siblings(self, thread: int) -> frozenset[int]:
        """All threads of the process of this one; none if it has ended."""

    def processor_ns(self, thread: int) -> int:
        """Processor time used by a thread so far; 0 for one that has ended."""

    def is_confined(self, thread: int, core: int) -> bool:
        """Whether a thread may use this core only."""

    def confine(self, thread: int, cores: Set[int]) -> None:
        """Let a thread use these cores only; nothing happens if it has ended.

        Raises:
            OSError: the kernel refuses.
        """


class _Count(NamedTuple):
    executions: int
    requests: int
    lone: int
    used_ns: int


class CoreSharing:
    """Looks ten times a second which instances are quick, and puts them on the loop's core.

    Threads and processes inherit the cores of the thread that makes them. So nothing is confined
    while a model is loaded (`with sharing:`), and a thread born on the shared core is set free.

    Args:
        executors: the instances that may share.
        loop_thread: the loop's thread, on which everything here is called.
    """

    def __init__(
        self,
        clock: Clock,
        executors: Callable[[], Iterable[Executor]],
        loop_thread: int,
        cores: Cores,
    ) -> None:
        self._clock = clock
        self._executors = executors
        self._loop_thread = loop_thread
        self._cores = cores
        self._allowed: frozenset[int] = frozenset()  # to the loop, when it is not confined
        self._core: int | None = None  # the shared one
        self._sharers: dict[int, Executor] = {}  # those on it, by thread
        self._known: frozenset[int] = frozenset()  # threads that were there before, or are free
        self._seen: dict[int, _Count] = {}  # by thread, at the last look
        self._loop_ns = 0  # processor time of the loop then
        self._looks = 0
        self._pauses = 0
        self._refused = False  # by the kernel, or what stands for one
        self._timer: Timer | None = None

    def start(self) -> None:
        """Begin to look."""
        self._plan(_REST_NS, self._look)

    def stop(self) -> None:
        """Set everything free and look no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._part()

    def __enter__(self) -> None:
        """Confine nothing until `__exit__`; nests."""
        self._pauses += 1
        self._part()

    def __exit__(self, *exc: object) -> None:
        """See `__enter__`."""
        self._pauses -= 1

    def _plan(self, delay_ns: int, then: Callable[[], None]) -> None:
        self._timer = self._clock.call_at(self._clock.now_ns() + delay_ns, then)

    def _look(self) -> None:
        self._looks += 1
        if self._core is not None and self._looks % _LOOKS_IN_A_ROW == 0:
            self._count(_LOOK_NS)
            self._part()
            self._plan(_LOOSE_NS, lambda: self._settle(self._count(_LOOSE_NS)))
        else:
            self._settle(self._count(_LOOK_NS))

    def _settle(self, quick: dict[int, Executor]) -> None:
        if quick and not self._pauses:
            self._meet(quick)
        else:
            self._part()
        if self._refused:
            self._part()
        else:
            self._plan(_LOOK_NS if self._seen else _REST_NS, self._look)

    def _count(self, elapsed_ns: int) -> dict[int, Executor]:
        """Those that executed much since the last count, and quickly, and gain by sharing."""
        enough = elapsed_ns // _MIN_EVERY_NS
        before, self._seen = self._seen, {}
        loop_before, self._loop_ns = self._loop_ns, self._cores.processor_ns(self._loop_thread)
        loop_ns = self._loop_ns - loop_before
        busy = loop_limit_ns = 0
        quick: dict[int, Executor] = {}
        alone: dict[int, Executor] = {}
        spared: dict[int, Executor] = {}  # others had the work
        for executor in self._executors():
            thread = executor.native_thread_id
            last = before.get(thread)
            if last is not None and executor.executions == last.executions:
                self._seen[thread] = last
                if thread in self._sharers and not executor.overlaps:
                    spared[thread] = executor
                continue
            used_ns = self._cores.processor_ns(thread)
            now = _Count(executor.executions, executor.requests, executor.lone_executions, used_ns)
            self._seen[thread] = now
            if last is None:
                continue
            executions = now.executions - last.executions
            requests = now.requests - last.requests
            joined = requests - executions
            loop_limit_ns += _LOOP_NS * executions + _LOOP_REQUEST_NS * joined
            if requests < enough:
                continue
            busy += 1
            limit_ns = _SLOW_NS if thread in self._sharers else _QUICK_NS
            limit_ns = limit_ns * executions + _QUICK_REQUEST_NS * joined
            if 0 < used_ns - last.used_ns < limit_ns:  # 0: the kernel does not count
                if not executor.overlaps:
                    quick[thread] = executor
                elif now.lone - last.lone > _LONE_SHARE * executions:
                    alone[thread] = executor
        if loop_ns > loop_limit_ns:
            return {}
        if busy == len(alone) == 1:
            return alone
        return quick and quick | spared

    def _meet(self, quick: dict[int, Executor]) -> None:
        if self._core is None:
            self._allowed = self._cores.allowed()
            if len(self._allowed) == 1:
                return
            self._core = self._cores.current()
            self._join(self._loop_thread, self._core)
        for thread in self._sharers.keys() - quick.keys():
            self._sharers.pop(thread).core_shared(False)
            self._confine(thread, self._allowed)
        for thread in quick.keys() - self._sharers.keys():
            self._join(thread, self._core)
            quick[thread].core_shared(True)
        self._sharers = quick
        self._free_the_newborn(self._core)

    def _join(self, thread: int, core: int) -> None:
        self._known |= self._cores.siblings(thread)
        self._confine(thread, {core})

    def _confine(self, thread: int, cores: Set[int]) -> None:
        try:
            self._cores.confine(thread, cores)
        except OSError as error:
            if not self._refused:
                logger.warning("cores are not shared: %s (thread %d)", error, thread)
            self._refused = True

    def _part(self) -> None:
        if self._core is None:
            return
        self._free_the_newborn(self._core)
        for thread, executor in self._sharers.items():
            executor.core_shared(False)
            self._confine(thread, self._allowed)
        self._confine(self._loop_thread, self._allowed)
        self._core = None
        self._sharers = {}
        self._known = frozenset()

    def _free_the_newborn(self, core: int) -> None:
        """Set free what a confined thread has started."""
        cores = self._cores
        for parent in (self._loop_thread, *self._sharers):
            siblings = cores.siblings(parent)
            for thread in siblings - self._known:
                if cores.is_confined(thread, core):
                    self._confine(thread, self._allowed)
            self._known |= siblings


class LinuxCores:
    """The `Cores` of this machine."""

    _sched_getcpu = ctypes.CDLL(None).sched_getcpu

    def allowed(self) -> frozenset[int]:
        """See `Cores.allowed`."""
        return frozenset(os.sched_getaffinity(0))

    def current(self) -> int:
        """See `Cores.current`."""
        return int(self._sched_getcpu())

    def siblings(self, thread: int) -> frozenset[int]:
        """See `Cores.siblings`."""
        try:
            return frozenset(map(int, os.listdir(f"/proc/{thread}/task")))
        except FileNotFoundError:
            return frozenset()

    def processor_ns(self, thread: int) -> int:
        """See `Cores.processor_ns`."""
        try:
            # Not as text: see machine.py.
            content = Path(f"/proc/{thread}/schedstat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return int(content.split()[0])

    def is_confined(self, thread: int, core: int) -> bool:
        """See `Cores.is_confined`; False for a thread that has ended."""
        try:
            return os.sched_getaffinity(thread) == {core}
        except ProcessLookupError:
            return False

    def confine(self, thread: int, cores: Set[int]) -> None:
        """See `Cores.confine`."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, cores)
