"""`acl.himpi.*`: the media system, its memory, channels and their tasks, waiting for channels.

The second interface to the media hardware: channels have numbers, structures are dictionaries,
and results are fetched instead of reported. Return codes are 0xA0<module>80<reason>.

Source: python/pyACL/himpi of the published binding, and the tables of return codes in the media
processing reference.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

from npuserve.testing.simulator.binding import Pending, bare, entry
from npuserve.testing.simulator.device import Stream, Task
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.media_desc import dvpp_free, dvpp_malloc
from npuserve.testing.simulator.media_place import duration_ns
from npuserve.testing.simulator.memory import device_view

if TYPE_CHECKING:
    from npuserve.testing.simulator.pictures import Bytes
    from npuserve.testing.simulator.runtime import Runtime


class Module(IntEnum):
    """Who refuses."""

    SYS = 0x02
    VDEC = 0x05
    VPC = 0x07
    VENC = 0x08
    PNGD = 0x40


class Reason(IntEnum):
    """Why."""

    INVALID_CHN_ID = 0x02
    ILLEGAL_PARAM = 0x03
    EXIST = 0x04
    UNEXIST = 0x05
    NOT_SUPPORT = 0x08
    NOT_PERM = 0x09
    NO_MEM = 0x0C
    BUF_EMPTY = 0x0E
    BUF_FULL = 0x0F
    NOT_READY = 0x10
    BAD_ADDR = 0x11
    TIMEOUT = 0x14
    SYS_ERROR = 0x15


def code(module: Module, reason: Reason) -> int:
    """The return code."""
    return 0xA0000000 | module << 16 | 0x8000 | reason


def refusal(module: Module, reason: Reason, text: str) -> RefusedError:
    """An error with that code."""
    return RefusedError(code(module, reason), text)


@contextmanager
def refusing(module: Module) -> Iterator[None]:
    """Let refusals of the shared checks carry the module's own code."""
    try:
        yield
    except RefusedError as error:
        if error.code >= 0xA0000000:
            raise
        raise refusal(module, Reason.ILLEGAL_PARAM, str(error)) from error


# Structures.


def numbers(runtime: Runtime, call: str, value: Any, *names: str) -> dict[str, int]:
    """Fields of a dictionary that stands for a C structure; those missing are 0.

    The binding takes what is no real int (a NumPy integer, a float) for missing, without a word;
    the simulator notes it.
    """
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise TypeError(f"{call} args parse failed: dict expected, got {value!r}")
    for name in names:
        if name in value and not isinstance(value[name], int):
            runtime.violations.append(f"{call} ignores {name!r}: {value[name]!r} is no int")
    return {name: value[name] if isinstance(value.get(name), int) else 0 for name in names}


# The system and its memory.


@dataclass(eq=False)
class MediaSystem:
    """What `sys_init` makes."""


def require_system(runtime: Runtime, module: Module) -> None:
    """Refuse without a context, or before `sys_init`."""
    runtime.require_context()
    if not any(isinstance(value, MediaSystem) for value in runtime.objects.values()):
        raise refusal(module, Reason.NOT_READY, "acl.himpi.sys_init was not called")


@entry("acl.himpi.sys_init")
def sys_init(runtime: Runtime) -> None:
    """Initialise; once is enough."""
    runtime.require_context()
    if not any(isinstance(value, MediaSystem) for value in runtime.objects.values()):
        runtime.register(MediaSystem(), "media system", "acl.himpi.sys_init")


@entry("acl.himpi.sys_exit")
def sys_exit(runtime: Runtime) -> None:
    """Take that back."""
    runtime.require_context()
    for handle, value in list(runtime.objects.items()):
        if isinstance(value, MediaSystem):
            runtime.drop(handle, MediaSystem)


@entry("acl.himpi.dvpp_get_version", failure=(0, 0, 0))
def dvpp_get_version(runtime: Runtime) -> tuple[int, int, int]:
    """Version of the interface."""
    return 1, 0, 0


@entry("acl.himpi.dvpp_malloc", "ik", failure=(0,))
def himpi_malloc(runtime: Runtime, device: int, size: int) -> int:
    """Memory for pictures and streams on the current card; `device` is 0, or the card's number."""
    if device not in (0, runtime.current.card.index):
        raise refusal(Module.SYS, Reason.ILLEGAL_PARAM, f"device {device} is not the current one")
    try:
        return dvpp_malloc(runtime, size, "acl.himpi.dvpp_malloc")
    except RefusedError as error:
        reason = Reason.ILLEGAL_PARAM if not size else Reason.NO_MEM
        raise refusal(Module.SYS, reason, str(error)) from error


@entry("acl.himpi.dvpp_free", "k")
def himpi_free(runtime: Runtime, address: int) -> None:
    """Give it back."""
    with refusing(Module.SYS):
        dvpp_free(runtime, address)


def reach(module: Module) -> Callable[[Runtime, int, int], Bytes]:
    """A look-up of memory that a module can reach.

    On 310P that is memory of `dvpp_malloc` only; other chips take memory of `acl.rt.malloc` too.
    """

    def find(runtime: Runtime, address: int, size: int) -> Bytes:
        memory = runtime.current.card.memory
        try:
            view = device_view(memory, address, size)
        except RefusedError as error:
            raise refusal(module, Reason.BAD_ADDR, str(error)) from error
        block = memory.blocks.find(address)
        if "310P" in runtime.options.soc_name and not (block and block.dvpp):
            text = f"{address:#x} is not memory of dvpp_malloc"
            raise refusal(module, Reason.BAD_ADDR, text)
        return view

    return find


# Channels and tasks.


@dataclass(eq=False)
class MediaTask:
    """Work of a channel, and how it ended."""

    number: int
    data: Any = None
    task: Task | None = None
    failure: RefusedError | None = None


@dataclass(eq=False)
class MediaChannel:
    """A channel of one kind; its tasks run one after the other."""

    number: int
    stream: Stream
    handle: int = 0
    tasks: list[MediaTask] = field(default_factory=list)
    is_started: bool = False
    sent: int = 0
    arrived: threading.Event = field(default_factory=threading.Event)


Channel = TypeVar("Channel", bound=MediaChannel)


def channels(runtime: Runtime, kind: type[Channel]) -> list[Channel]:
    """All open channels of a kind."""
    return [value for value in runtime.objects.values() if isinstance(value, kind)]


def find_channel(
    runtime: Runtime, kind: type[Channel], module: Module, number: int, limit: int
) -> Channel:
    """The open channel of a number, on the current card."""
    require_system(runtime, module)
    if not 0 <= number < limit:
        raise refusal(module, Reason.INVALID_CHN_ID, f"channel {number} is not in [0, {limit})")
    for channel in channels(runtime, kind):
        if channel.number == number:
            if channel.stream.context.card is not runtime.current.card:
                raise refusal(module, Reason.UNEXIST, f"channel {number} is on another device")
            return channel
    raise refusal(module, Reason.UNEXIST, f"channel {number} was not created, or is destroyed")


def check_new(
    runtime: Runtime, kind: type[Channel], module: Module, number: int, limit: int
) -> Stream:
    """A stream for a channel of a number that is free."""
    require_system(runtime, module)
    if not 0 <= number < limit:
        raise refusal(module, Reason.INVALID_CHN_ID, f"channel {number} is not in [0, {limit})")
    if any(channel.number == number for channel in channels(runtime, kind)):
        raise refusal(module, Reason.EXIST, f"channel {number} is there already")
    return Stream(0, runtime.current)


def add_channel(runtime: Runtime, channel: MediaChannel, call: str) -> None:
    """Open a channel."""
    channel.handle = runtime.register(channel, f"channel {channel.number}", call)


def remove_channel(runtime: Runtime, channel: MediaChannel) -> Pending:
    """Close a channel when its tasks are over."""
    channel.stream.advance(None)
    runtime.drop(channel.handle, type(channel))
    channel.arrived.set()
    return Pending(channel.stream.end_ns)


def start_task(
    runtime: Runtime, channel: MediaChannel, engine: str, name: str, pixels: int,
    work: Callable[[], None], data: Any = None,
) -> MediaTask:  # fmt: skip
    """Queue work of a channel."""
    channel.sent += 1
    started = MediaTask(channel.sent, data)

    def run() -> None:
        try:
            work()
        except RefusedError as error:
            started.failure = error

    now = runtime.clock.now_ns()
    started.task = channel.stream.queue(now, engine, name, duration_ns(pixels), run)
    channel.tasks.append(started)
    channel.arrived.set()
    return started


def take_first(
    runtime: Runtime, channel: MediaChannel, module: Module, wait_ms: int,
    result: Callable[[MediaTask], Any],
) -> Pending:  # fmt: skip
    """The result of the oldest task: at once (0), within a time, or whenever it is there (-1)."""

    def then() -> None:
        pending.result = _take(runtime, channel, module, wait_ms, result)

    pending = Pending(then=then)
    return pending


# How long a wait without limit may take in real time before the simulator takes it for a mistake.
_PATIENCE_S = 10.0


def _take(
    runtime: Runtime, channel: MediaChannel, module: Module, wait_ms: int,
    result: Callable[[MediaTask], Any],
) -> Any:  # fmt: skip
    until = runtime.clock.now_ns() + wait_ms * 1_000_000
    deadline = time.monotonic() + (_PATIENCE_S if wait_ms < 0 else wait_ms / 1000)
    while True:
        with runtime.lock:
            channel.arrived.clear()
            first = channel.tasks[0] if channel.tasks else None
            end = first.task.end_ns if first is not None and first.task is not None else 0
            if first is not None and (wait_ms < 0 or end <= until):
                channel.tasks.pop(0)
                break
            is_open = runtime.objects.get(channel.handle) is channel
        if first is not None:  # on its way, but not in this time
            runtime.clock.wait_until(until)
            raise refusal(module, Reason.BUF_EMPTY, f"nothing after {wait_ms} ms")
        if not is_open:
            raise refusal(module, Reason.UNEXIST, "the channel was destroyed meanwhile")
        if not channel.arrived.wait(max(deadline - time.monotonic(), 0)):
            raise refusal(module, Reason.BUF_EMPTY, "nothing was sent")
    runtime.clock.wait_until(end)
    with runtime.lock:
        channel.stream.advance(first.task)
        return result(first)


# Waiting for several channels.

_ADD, _MODIFY, _DELETE = 1, 2, 3
_IN = 1


@dataclass(eq=False)
class Epoll:
    """Channels that somebody waits for: descriptor → (events, data)."""

    watched: dict[int, tuple[int, int]] = field(default_factory=dict)


def _epoll(runtime: Runtime, number: int) -> Epoll:
    require_system(runtime, Module.SYS)
    found = runtime.objects.get(number)
    if not isinstance(found, Epoll):
        raise refusal(Module.SYS, Reason.UNEXIST, f"epoll {number} was not created, or is closed")
    return found


@entry("acl.himpi.sys_create_epoll", "i", failure=(0,))
def sys_create_epoll(runtime: Runtime, size: int) -> int:
    """Something that waits for channels."""
    require_system(runtime, Module.SYS)
    if size <= 0:
        raise refusal(Module.SYS, Reason.ILLEGAL_PARAM, f"size {size}")
    return runtime.register_model(Epoll(), "acl.himpi.sys_create_epoll", "epoll")


@entry("acl.himpi.sys_close_epoll", "i")
def sys_close_epoll(runtime: Runtime, number: int) -> None:
    """Destroy it."""
    _epoll(runtime, number)
    runtime.drop(number, Epoll)


@entry("acl.himpi.sys_ctl_epoll", "iiio")
def sys_ctl_epoll(
    runtime: Runtime, number: int, operation: int, descriptor: int, event: Any
) -> None:
    """Watch a channel, or do so no longer."""
    watched = _epoll(runtime, number).watched
    wanted = numbers(runtime, "acl.himpi.sys_ctl_epoll", event, "events", "data")
    if operation not in (_ADD, _MODIFY, _DELETE):
        raise refusal(Module.SYS, Reason.ILLEGAL_PARAM, f"operation {operation}")
    if (operation == _ADD) is (descriptor in watched):
        reason = Reason.EXIST if operation == _ADD else Reason.UNEXIST
        raise refusal(Module.SYS, reason, f"descriptor {descriptor}")
    if operation == _DELETE:
        del watched[descriptor]
        return
    channel_of(runtime, descriptor)
    watched[descriptor] = (wanted["events"], wanted["data"])


def descriptor_of(channel: MediaChannel) -> int:
    """A number that stands for a channel."""
    return channel.handle & 0x7FFFFFFF


def channel_of(runtime: Runtime, descriptor: int) -> MediaChannel:
    """The channel of a descriptor."""
    for channel in channels(runtime, MediaChannel):
        if descriptor_of(channel) == descriptor:
            return channel
    raise refusal(Module.SYS, Reason.ILLEGAL_PARAM, f"descriptor {descriptor} is of no channel")


@entry("acl.himpi.sys_wait_epoll", "iii", failure=([], 0))
def sys_wait_epoll(runtime: Runtime, number: int, most: int, wait_ms: int) -> Pending:
    """Wait until a channel has something; events as many as asked for, and how many are meant."""
    if not 0 <= most <= 4096:
        raise TypeError("invalid num of maxEvents")
    watched = _epoll(runtime, number).watched
    limit = runtime.clock.now_ns() + (wait_ms * 1_000_000 if wait_ms >= 0 else 1 << 62)
    ready = sorted(
        (channel.tasks[0].task.end_ns, data)
        for descriptor, (events, data) in watched.items()
        for channel in channels(runtime, MediaChannel)
        if descriptor_of(channel) == descriptor and events & _IN and channel.tasks
        if channel.tasks[0].task is not None
    )
    if not ready or ready[0][0] > limit:
        empty = [{"events": 0, "data": 0} for _ in range(most)]
        return Pending(limit if wait_ms >= 0 else 0, result=(empty, 0))
    until = max(runtime.clock.now_ns(), ready[0][0])
    meant = [{"events": _IN, "data": data} for end, data in ready if end <= until][:most]
    padding = [{"events": 0, "data": 0} for _ in range(most - len(meant))]
    return Pending(until, result=(meant + padding, len(meant)))


def watching(family: str, kind: type[MediaChannel], module: Module, limit: int) -> None:
    """Register `<family>_get_fd` and `<family>_close_fd`."""

    def get_fd(runtime: Runtime, number: int) -> int:
        return descriptor_of(find_channel(runtime, kind, module, number, limit))

    def close_fd(runtime: Runtime, number: int) -> None:
        find_channel(runtime, kind, module, number, limit)

    bare(f"acl.himpi.{family}_get_fd", "i", failed=0)(get_fd)
    entry(f"acl.himpi.{family}_close_fd", "i")(close_fd)
