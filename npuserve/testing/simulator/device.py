"""A simulated card: engines with modelled time, contexts, streams, events.

A task queued on a stream gets its modelled start and end at once: it starts when the host queued
it, its stream's former task is over, the events it waits for have happened and its engine
(compute, or one of the two copy directions) is free. Its effect on memory happens later, when
somebody synchronises or asks; until then nobody can tell the difference, except by breaking the
rules, and that is what the simulator looks for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.memory import DeviceMemory

COMPUTE = "compute"
UPLOAD = "copy to device"
DOWNLOAD = "copy to host"
ON_DEVICE = "copy on device"
# Hardware for pictures and video.
VPC = "image processing"
JPEGD = "JPEG decoder"
JPEGE = "JPEG encoder"
PNGD = "PNG decoder"
VDEC = "video decoder"
VENC = "video encoder"
_ENGINES = (COMPUTE, UPLOAD, DOWNLOAD, ON_DEVICE, VPC, JPEGD, JPEGE, PNGD, VDEC, VENC)

_TRACE_LENGTH = 200_000


@dataclass(frozen=True)
class Span:
    """One task in the trace: when which engine of which card was busy."""

    device: int
    engine: str
    stream: int
    name: str
    start_ns: int
    end_ns: int


@dataclass(eq=False)
class Task:
    """Work queued on a stream."""

    stream: Stream
    end_ns: int
    effect: Callable[[], None] | None
    after: Task | None = None  # a task of another stream whose effect comes first
    done: bool = False


class Card:
    """One card: memory, engines, what has been done."""

    def __init__(self, index: int, physical: int, memory_bytes: int) -> None:
        self.index = index
        self.physical = physical
        self.memory = DeviceMemory(index, memory_bytes)
        self.users = 0  # set_device calls not yet reset
        self.default_context: Context | None = None
        self.core_limits: dict[int, int] = {}
        self.trace: deque[Span] = deque(maxlen=_TRACE_LENGTH)
        self.busy_ns = 0
        self._free_at = dict.fromkeys(_ENGINES, 0)

    def occupy(self, engine: str, stream: int, name: str, ready_ns: int, duration_ns: int) -> int:
        """Take an engine as soon as it is free; the end of the task, ns."""
        start = max(ready_ns, self._free_at[engine])
        end = start + duration_ns
        self._free_at[engine] = end
        self.trace.append(Span(self.index, engine, stream, name, start, end))
        if engine == COMPUTE:
            self.busy_ns += duration_ns
        return end

    def busy_share(self, engine: str = COMPUTE) -> float:
        """Part of the time from the first to the last task that the engine was busy, 0 … 1."""
        spans = [span for span in self.trace if span.engine == engine]
        if not spans:
            return 0.0
        total = max(span.end_ns for span in spans) - min(span.start_ns for span in spans)
        return sum(span.end_ns - span.start_ns for span in spans) / total if total else 1.0


class Stream:
    """Tasks of one context in order."""

    def __init__(self, handle: int, context: Context) -> None:
        self.handle = handle
        self.context = context
        self.tasks: deque[Task] = deque()
        self.end_ns = 0
        self.last: Task | None = None
        self.error: RefusedError | None = None
        self.complaint: RefusedError | None = None  # of one task; told once
        self.pending_wait: Task | None = None
        self.callback_thread: int | None = None
        self.core_limits: dict[int, int] = {}

    def queue(
        self, now_ns: int, engine: str, name: str, duration_ns: int, effect: Callable[[], None]
    ) -> Task:
        """Append work for an engine."""
        card = self.context.card
        end = card.occupy(engine, self.handle, name, max(now_ns, self.end_ns), duration_ns)
        return self._append(end, effect)

    def mark(self, now_ns: int, effect: Callable[[], None] | None = None) -> Task:
        """Append a point in time without work."""
        return self._append(max(now_ns, self.end_ns), effect)

    def _append(self, end_ns: int, effect: Callable[[], None] | None) -> Task:
        task = Task(self, end_ns, effect, self.pending_wait)
        self.pending_wait = None
        self.end_ns = end_ns
        self.tasks.append(task)
        self.last = task
        return task

    def wait_for(self, task: Task) -> None:
        """Let the following tasks start after `task` of another stream."""
        self.end_ns = max(self.end_ns, task.end_ns)
        if not task.done:
            self.pending_wait = task
            self.mark(0)

    def advance(self, until: Task | None) -> None:
        """Let the effects of the tasks up to `until` (None: all) happen.

        A failing task poisons the context: later tasks do nothing and report the same.
        """
        while self.tasks and not (until is not None and until.done):
            task = self.tasks[0]
            if task.after is not None and not task.after.done:
                task.after.stream.advance(task.after)
            self.tasks.popleft()
            self._perform(task)

    def _perform(self, task: Task) -> None:
        task.done = True
        context = self.context
        if context.error is not None and task.effect is not None:
            self.error = context.error
        elif task.effect is not None:
            try:
                task.effect()
            except RefusedError as error:
                self.error = context.error = error
        task.effect = None

    def advance_to(self, now_ns: int) -> None:
        """Let the effects happen of all tasks that are over by now."""
        while self.tasks and self.tasks[0].end_ns <= now_ns:
            self.advance(self.tasks[0])

    def take_failure(self) -> RefusedError | None:
        """What a synchronisation of this stream reports."""
        complaint, self.complaint = self.complaint, None
        return self.error or self.context.error or complaint


@dataclass(eq=False)
class Event:
    """The state of its last recording."""

    handle: int
    context: Context
    task: Task | None = None
    needs_reset: bool = False  # before it is recorded again


@dataclass(eq=False)
class Context:
    """Owner of streams, events and models on one card."""

    handle: int
    card: Card
    default_stream: Stream = field(init=False)
    streams: dict[int, Stream] = field(default_factory=dict)
    error: RefusedError | None = None

    def __post_init__(self) -> None:
        self.default_stream = Stream(0, self)

    @property
    def all_streams(self) -> list[Stream]:
        """Default stream included."""
        return [self.default_stream, *self.streams.values()]
