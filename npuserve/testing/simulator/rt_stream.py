"""`acl.rt.*`: streams, events, synchronisation, callbacks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npuserve.testing.simulator.binding import Pending, bare, entry
from npuserve.testing.simulator.device import Event, Stream, Task
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.runtime import current

if TYPE_CHECKING:
    from npuserve.testing.simulator.runtime import Runtime

_EVENT_SYNC = 0x1

# Making and destroying.


@entry("acl.rt.create_stream", failure=(0,))
def create_stream(runtime: Runtime) -> int:
    """A stream of the current context."""
    context = runtime.current
    stream = Stream(0, context)
    stream.handle = runtime.register(stream, "stream", "acl.rt.create_stream")
    context.streams[stream.handle] = stream
    return stream.handle


@entry("acl.rt.create_stream_with_config", "ii", failure=(0,))
def create_stream_with_config(runtime: Runtime, priority: int, flag: int) -> int:
    """The same with a priority."""
    if not 0 <= priority <= 7:
        raise RefusedError(107000, f"priority {priority} is not in 0..7")
    return create_stream(runtime)


@entry("acl.rt.destroy_stream", "k")
def destroy_stream(runtime: Runtime, handle: int) -> Pending:
    """Wait for a stream and destroy it."""
    stream = runtime.stream(handle)
    if not handle:
        raise RefusedError(107000, "the default stream cannot be destroyed")
    stream.advance(None)
    runtime.drop(handle, Stream)
    del stream.context.streams[handle]
    return Pending(stream.end_ns)


@entry("acl.rt.destroy_stream_force", "k")
def destroy_stream_force(runtime: Runtime, handle: int) -> None:
    """Destroy a stream with what is queued there."""
    stream = runtime.stream(handle)
    _drop_tasks(stream)
    runtime.drop(handle, Stream)
    del stream.context.streams[handle]


@entry("acl.rt.stream_abort", "k")
def stream_abort(runtime: Runtime, handle: int) -> None:
    """Forget what is queued."""
    _drop_tasks(runtime.stream(handle))


def _drop_tasks(stream: Stream) -> None:
    for task in stream.tasks:
        task.done = True
    stream.tasks.clear()


@entry("acl.rt.get_stream_available_num", failure=(0,))
def get_stream_available_num(runtime: Runtime) -> int:
    """Streams that can still be made."""
    return 1984 - len(runtime.current.streams)


@entry("acl.rt.create_event", failure=(0,))
def create_event(runtime: Runtime) -> int:
    """An event."""
    event = Event(0, runtime.current)
    event.handle = runtime.register(event, "event", "acl.rt.create_event")
    return event.handle


@entry("acl.rt.create_event_with_flag", "i", failure=(0,))
def create_event_with_flag(runtime: Runtime, flag: int) -> int:
    """An event; with ACL_EVENT_SYNC one that has to be reset before it is recorded again."""
    handle = create_event(runtime)
    runtime.event(handle).needs_reset = bool(flag & _EVENT_SYNC)
    return handle


@entry("acl.rt.create_event_ex_with_flag", "i", failure=(0,))
def create_event_ex_with_flag(runtime: Runtime, flag: int) -> int:
    """An event."""
    return create_event(runtime)


@entry("acl.rt.destroy_event", "k")
def destroy_event(runtime: Runtime, handle: int) -> None:
    """Destroy an event."""
    runtime.require_init()
    runtime.drop(handle, Event, 107017)


# Synchronisation.


@entry("acl.rt.synchronize_stream", "k")
def synchronize_stream(runtime: Runtime, handle: int) -> Pending:
    """Wait for a stream."""
    stream = runtime.stream(handle)
    stream.advance(None)
    return Pending(stream.end_ns, stream.take_failure())


@entry("acl.rt.synchronize_stream_with_timeout", "ko")
def synchronize_stream_with_timeout(runtime: Runtime, handle: int, ms: int) -> Pending:
    """Wait for a stream, not longer than that."""
    stream = runtime.stream(handle)
    limit = runtime.clock.now_ns() + ms * 1_000_000
    if ms >= 0 and stream.end_ns > limit:
        return Pending(limit, RefusedError(507046, f"stream not done after {ms} ms"))
    return synchronize_stream(runtime, handle)


@entry("acl.rt.stream_query", "k", failure=(0,))
def stream_query(runtime: Runtime, handle: int) -> int:
    """0: everything is done, 1: not yet."""
    stream = runtime.stream(handle)
    stream.advance_to(runtime.clock.now_ns())
    failure = stream.take_failure()
    if failure is not None:
        raise failure
    return 1 if stream.tasks else 0


@entry("acl.rt.record_event", "kk")
def record_event(runtime: Runtime, handle: int, stream_handle: int) -> None:
    """The event happens when the stream gets there."""
    event = runtime.event(handle)
    if event.needs_reset and event.task is not None:
        raise RefusedError(107000, "the event was not reset since it was recorded")
    event.task = runtime.stream(stream_handle).mark(runtime.clock.now_ns())


@entry("acl.rt.reset_event", "kk")
def reset_event(runtime: Runtime, handle: int, stream_handle: int) -> None:
    """The event has not happened. Only for those of `create_event_with_flag(ACL_EVENT_SYNC)`."""
    runtime.stream(stream_handle)
    event = runtime.event(handle)
    if not event.needs_reset:
        raise RefusedError(107000, "reset_event is undefined for this kind of event")
    event.task = None


@entry("acl.rt.query_event_status", "k", failure=(0,))
def query_event_status(runtime: Runtime, handle: int) -> int:
    """1: happened, 0: not yet."""
    task = runtime.event(handle).task
    return int(task is None or task.end_ns <= runtime.clock.now_ns())


@entry("acl.rt.query_event", "k", failure=(0,))
def query_event(runtime: Runtime, handle: int) -> int:
    """The opposite; deprecated."""
    return 1 - query_event_status(runtime, handle)


@entry("acl.rt.synchronize_event", "k")
def synchronize_event(runtime: Runtime, handle: int) -> Pending:
    """Wait for an event."""
    task = runtime.event(handle).task
    if task is None:
        return Pending(0)
    task.stream.advance(task)
    return Pending(task.end_ns, task.stream.take_failure())


@entry("acl.rt.synchronize_event_with_timeout", "ko")
def synchronize_event_with_timeout(runtime: Runtime, handle: int, ms: int) -> Pending:
    """Wait for an event, not longer than that."""
    task = runtime.event(handle).task
    limit = runtime.clock.now_ns() + ms * 1_000_000
    if task is not None and ms >= 0 and task.end_ns > limit:
        return Pending(limit, RefusedError(507047, f"event not there after {ms} ms"))
    return synchronize_event(runtime, handle)


@entry("acl.rt.event_elapsed_time", "kk", failure=(0.0,))
def event_elapsed_time(runtime: Runtime, start: int, end: int) -> float:
    """Milliseconds between two events."""
    first, last = runtime.event(start).task, runtime.event(end).task
    if first is None or last is None:
        raise RefusedError(107000, "the event was not recorded")
    return (last.end_ns - first.end_ns) / 1e6


@entry("acl.rt.stream_wait_event", "kk")
def stream_wait_event(runtime: Runtime, handle: int, event_handle: int) -> None:
    """Later tasks of the stream wait for the event's last recording."""
    stream = runtime.stream(handle)
    task = runtime.event(event_handle).task
    if task is not None:
        stream.wait_for(task)


# Callbacks.


@dataclass(eq=False)
class Report:
    """A call that a callback thread is to make when its task is over."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    task: Task
    is_due: bool = False
    made: threading.Event = field(default_factory=threading.Event)


_reports: dict[int, queue.SimpleQueue[Report]] = {}  # by subscribed thread


def subscribe(thread_id: int, stream: Stream) -> None:
    """Let a thread make the calls of a stream."""
    _reports.setdefault(thread_id, queue.SimpleQueue())
    stream.callback_thread = thread_id


def unsubscribe(stream: Stream, others: Iterable[Stream]) -> None:
    """Take that back; `others` are all streams."""
    thread_id, stream.callback_thread = stream.callback_thread, None
    if thread_id is not None and all(other.callback_thread != thread_id for other in others):
        _reports.pop(thread_id, None)


def queue_report(
    stream: Stream, now_ns: int, function: Callable[..., Any], *arguments: Any
) -> Report:
    """Queue a call that the stream's thread makes when the stream gets there."""
    if stream.callback_thread is None:
        raise RefusedError(107015, "no thread is subscribed to the stream")

    def become_due() -> None:
        report.is_due = True

    report = Report(function, arguments, stream.mark(now_ns, become_due))
    _reports[stream.callback_thread].put(report)
    return report


@entry("acl.rt.subscribe_report", "kk")
def subscribe_report(runtime: Runtime, thread_id: int, handle: int) -> None:
    """Name the thread that runs a stream's callbacks."""
    subscribe(thread_id, runtime.stream(handle))


@entry("acl.rt.unsubscribe_report", "kk")
def unsubscribe_report(runtime: Runtime, thread_id: int, handle: int) -> None:
    """Take that back."""
    stream = runtime.stream(handle)
    if stream.callback_thread != thread_id:
        raise RefusedError(107015, "the thread is not subscribed to the stream")
    unsubscribe(stream, runtime.streams())


@entry("acl.rt.launch_callback", "ooik")
def launch_callback(
    runtime: Runtime, function: Callable[[Any], Any], data: Any, block: int, handle: int
) -> None:
    """Queue a call that the subscribed thread makes when the stream gets there."""
    queue_report(runtime.stream(handle), runtime.clock.now_ns(), function, data)


def process_report(timeout_ms: int) -> int:
    """Run one waiting callback in the calling thread; 107019 when none comes in time.

    One that is on its way is waited for.
    """
    reports = _reports.get(threading.get_ident())
    if reports is None:
        return 107015
    try:
        report = reports.get(timeout=None if timeout_ms < 0 else timeout_ms / 1000)
    except queue.Empty:
        return 107019
    runtime = current()
    runtime.clock.enter()
    runtime.clock.wait_until(report.task.end_ns)
    with runtime.lock:
        report.task.stream.advance(report.task)
    runtime.clock.leave()
    try:
        if report.is_due:  # else its stream was aborted, or its context is poisoned
            report.function(*report.arguments)
    finally:
        report.made.set()
    return 0


@bare("acl.rt.set_exception_info_callback", "o")
def set_exception_info_callback(runtime: Runtime, function: Any) -> int:
    """Taken and never called: the simulator reports failures at synchronisation."""
    return 0
