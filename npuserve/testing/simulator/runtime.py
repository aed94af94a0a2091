"""The state of the simulated runtime in one process: cards, handles, threads, faults, leaks."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import sys
import threading
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from npuserve.testing.simulator.clock import make_clock
from npuserve.testing.simulator.device import Card, Context, Event, Span, Stream
from npuserve.testing.simulator.faults import Fault, RefusedError, parse
from npuserve.testing.simulator.memory import HostMemory, device_of, device_view
from npuserve.testing.simulator.options import SimulatorOptions
from npuserve.testing.simulator.telemetry import SharedState

if TYPE_CHECKING:
    from npuserve.testing.simulator.op_file import OpDescription

T = TypeVar("T")

_INVALID_PARAM = 100000
_UNINITIALIZED = 100001
_BAD_DEVICE = 107001
_NO_CONTEXT = 107002
_BAD_HANDLE = 107017
_FORKED = 507033

_LOG_LENGTH = 100_000


class Runtime:
    """Everything behind one `acl` module.

    Attributes:
        calls: number of calls of each function.
        log: names of the functions in the order called, the last ones.
        faults: failures to come.
        violations: broken rules that no return code shows.
        op_models: the single operators that are loaded.
        has_op_dir: whether `acl.op.set_model_dir` was called.
    """

    def __init__(self, options: SimulatorOptions) -> None:
        self.options = options
        self.clock = make_clock(options.time)
        self.lock = threading.RLock()
        self.host = HostMemory()
        self.cards = [
            Card(index, physical, options.memory_bytes)
            for index, physical in enumerate(options.visible_cards)
        ]
        self.faults: list[Fault] = parse(options.faults)
        self.calls: Counter[str] = Counter()
        self.log: deque[str] = deque(maxlen=_LOG_LENGTH)
        self.violations: list[str] = []
        self.init_count = 0
        self.objects: dict[int, Any] = {}
        self.origins: dict[int, str] = {}
        self.encoder_settings: dict[int, dict[str, int]] = {}  # of acl.himpi, by module
        self.op_models: list[OpDescription] = []
        self.has_op_dir = False
        self.shared_state = SharedState(options.state_dir, len(self.cards))
        self._handles = itertools.count(0x5555_0000_0001_0000, 0x40)
        self._model_ids = itertools.count(1)
        self._dead: dict[int, str] = {}
        self._local = threading.local()
        self._pid = os.getpid()
        atexit.register(self.report_at_exit)

    # What every call passes through (see binding.py).

    def check_process(self) -> None:
        """Refuse to work in a forked child."""
        if os.getpid() != self._pid:
            raise RefusedError(_FORKED, "the runtime was initialised before this process forked")

    def strike(self, call: str, can_fail: bool) -> None:
        """Count a call, and fail it if that was asked for."""
        self.calls[call] += 1
        self.log.append(call)
        for fault in self.faults:
            if fault.strikes(call) and can_fail:
                raise RefusedError(fault.code, f"EE9999: {call} was made to fail")

    @property
    def last_error(self) -> str | None:
        """Text of this thread's last error; reading it clears it."""
        text = getattr(self._local, "error", None)
        self._local.error = None
        return text

    def remember_error(self, error: RefusedError) -> None:
        """Keep the text for `get_recent_err_msg`."""
        self._local.error = str(error)
        self._local.error_code = error.code

    @property
    def last_error_code(self) -> int:
        """Code of this thread's last error."""
        return getattr(self._local, "error_code", 0)

    # Handles.

    def register(self, value: T, kind: str, call: str) -> int:
        """A new handle for an object."""
        handle = next(self._handles)
        self.objects[handle] = value
        self.origins[handle] = f"{kind} of {call}"
        return handle

    def register_model(self, value: Any, call: str, kind: str = "model") -> int:
        """A new id of a model, or of what else has a small number of its own."""
        model_id = next(self._model_ids)
        self.objects[model_id] = value
        self.origins[model_id] = f"{kind} of {call}"
        return model_id

    def find(self, handle: int, kind: type[T], code: int = _INVALID_PARAM) -> T:
        """The object of a handle."""
        value = self.objects.get(handle)
        if isinstance(value, kind):
            return value
        if not handle:
            raise RefusedError(code, f"{kind.__name__} handle is null")
        gone = self._dead.get(handle)
        what = f"was destroyed ({gone})" if gone else f"is no {kind.__name__}"
        raise RefusedError(code, f"handle {handle:#x} {what}")

    def drop(self, handle: int, kind: type[T], code: int = _INVALID_PARAM) -> T:
        """Take an object out; its handle is dead from now on."""
        value = self.find(handle, kind, code)
        del self.objects[handle]
        self._dead[handle] = self.origins.pop(handle)
        if len(self._dead) > _LOG_LENGTH:  # forget the oldest
            del self._dead[next(iter(self._dead))]
        return value

    # Where a thread is.

    def require_init(self) -> None:
        """Refuse before `acl.init`."""
        if not self.init_count:
            raise RefusedError(_UNINITIALIZED, "acl.init was not called")

    @property
    def current(self) -> Context:
        """Context of the calling thread."""
        self.require_init()
        context: Context | None = getattr(self._local, "context", None)
        if context is None:
            raise RefusedError(_NO_CONTEXT, "EE1001: context is null in this thread")
        if context is not context.card.default_context and context.handle not in self.objects:
            raise RefusedError(_NO_CONTEXT, "the context of this thread was destroyed")
        return context

    def require_context(self) -> None:
        """Refuse in a thread without a context."""
        _ = self.current

    def enter_context(self, context: Context | None) -> None:
        """Make a context current in this thread."""
        self._local.context = context

    def is_current(self, context: Context) -> bool:
        """Whether it is this thread's context."""
        return getattr(self._local, "context", None) is context

    def card(self, device_id: int) -> Card:
        """A card by logical id."""
        if not 0 <= device_id < len(self.cards):
            raise RefusedError(
                _BAD_DEVICE,
                f"EE1001: device id {device_id} is not in [0, {len(self.cards)})",
            )
        return self.cards[device_id]

    def stream(self, handle: int) -> Stream:
        """A stream of the current context; 0 is its default stream."""
        context = self.current
        if not handle:
            return context.default_stream
        stream = self.find(handle, Stream, _BAD_HANDLE)
        if stream.context is not context:
            raise RefusedError(107003, "the stream belongs to another context")
        return stream

    def streams(self) -> list[Stream]:
        """All streams there are, default ones included."""
        contexts = [card.default_context for card in self.cards]
        contexts += [value for value in self.objects.values() if isinstance(value, Context)]
        return [stream for context in contexts if context for stream in context.all_streams]

    def event(self, handle: int) -> Event:
        """An event."""
        return self.find(handle, Event, _BAD_HANDLE)

    def bytes_at(self, address: int, size: int) -> Any:
        """Content of device memory on whichever card."""
        device = device_of(address)
        if not 0 <= device < len(self.cards):
            raise RefusedError(107000, f"{address:#x} is not a device address")
        return device_view(self.cards[device].memory, address, size)

    # What is left.

    def leaks(self) -> list[str]:
        """What somebody forgot to give back, a line each."""
        lines = [f"{origin} (handle {handle:#x})" for handle, origin in self.origins.items()]
        for card in self.cards:
            lines += [
                f"{block.size} bytes of device {card.index} at {block.address:#x} by {block.call}"
                for block in card.memory.blocks
            ]
            if card.users:
                lines.append(f"device {card.index}: set_device without reset_device")
        lines += [f"{block.size} page-locked bytes by {block.call}" for block in self.host.blocks]
        return lines

    def spans(self) -> list[Span]:
        """The trace of all cards in order of time."""
        spans = [span for card in self.cards for span in card.trace]
        return sorted(spans, key=lambda span: span.start_ns)

    def write_trace(self, path: Path) -> None:
        """The trace as Chrome trace events (chrome://tracing, Perfetto)."""
        events = [
            {
                "name": span.name, "ph": "X", "pid": f"NPU {span.device}", "tid": span.engine,
                "ts": span.start_ns / 1000, "dur": (span.end_ns - span.start_ns) / 1000,
                "args": {"stream": span.stream},
            }
            for span in self.spans()
        ]  # fmt: skip
        path.write_text(json.dumps({"traceEvents": events}))

    def report_at_exit(self) -> None:
        """Say what leaked; the last thing in the life of the process."""
        if os.getpid() != self._pid:
            return
        self.shared_state.close()
        problems = self.leaks() + self.violations
        if self.options.trace_file:
            self.write_trace(Path(self.options.trace_file.replace("{pid}", str(self._pid))))
        if not problems:
            return
        text = "\n".join(problems) + "\n"
        sys.stderr.write(f"NPU simulator: process {self._pid} leaked or misused:\n{text}")
        if self.options.report_dir:
            Path(self.options.report_dir, f"{self._pid}.txt").write_text(text)


_current: Runtime | None = None


def current() -> Runtime:
    """The runtime of this process, made from the environment when first asked for."""
    global _current
    if _current is None:
        _current = Runtime(SimulatorOptions.from_environment())
    return _current


def replace(runtime: Runtime | None) -> Runtime | None:
    """Put another runtime in place (None: to be made anew); the former one."""
    global _current
    former, _current = _current, runtime
    if former is not None:
        atexit.unregister(former.report_at_exit)
        former.shared_state.close()
    return former
