"""`acl.rt.*`: devices, contexts, core limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npuserve.testing.simulator.binding import Pending, entry
from npuserve.testing.simulator.device import Card, Context, Stream
from npuserve.testing.simulator.faults import RefusedError

if TYPE_CHECKING:
    from npuserve.testing.simulator.runtime import Runtime

_CORES = {0: 24, 1: 48}  # cube and vector cores of a card


@entry("acl.rt.set_device", "i")
def set_device(runtime: Runtime, device_id: int) -> None:
    """Use a card in this thread, through its default context."""
    runtime.require_init()
    card = runtime.card(device_id)
    if card.default_context is None:
        card.default_context = Context(0, card)
    card.users += 1
    runtime.enter_context(card.default_context)


@entry("acl.rt.reset_device", "i")
def reset_device(runtime: Runtime, device_id: int) -> None:
    """Undo one `set_device`."""
    runtime.require_init()
    card = runtime.card(device_id)
    if not card.users:
        raise RefusedError(107000, f"device {device_id} is not set")
    card.users -= 1
    if not card.users:
        _free_default_context(runtime, card)


@entry("acl.rt.reset_device_force", "i")
def reset_device_force(runtime: Runtime, device_id: int) -> None:
    """Undo all `set_device` calls."""
    runtime.require_init()
    card = runtime.card(device_id)
    card.users = 0
    _free_default_context(runtime, card)


def _free_default_context(runtime: Runtime, card: Card) -> None:
    context, card.default_context = card.default_context, None
    if context is not None and runtime.is_current(context):
        runtime.enter_context(None)


@entry("acl.rt.get_device", failure=(0,))
def get_device(runtime: Runtime) -> int:
    """Card of this thread's context."""
    return runtime.current.card.index


@entry("acl.rt.get_device_count", failure=(0,))
def get_device_count(runtime: Runtime) -> int:
    """Visible cards."""
    runtime.require_init()
    return len(runtime.cards)


@entry("acl.rt.get_run_mode", failure=(0,))
def get_run_mode(runtime: Runtime) -> int:
    """1: a host with PCIe cards. Needs no `acl.init`: public samples ask while they import."""
    return 1


@entry("acl.rt.create_context", "i", failure=(0,))
def create_context(runtime: Runtime, device_id: int) -> int:
    """A context of one's own, current in this thread."""
    runtime.require_init()
    card = runtime.card(device_id)
    context = Context(0, card)
    context.handle = runtime.register(context, "context", "acl.rt.create_context")
    runtime.enter_context(context)
    return context.handle


@entry("acl.rt.set_context", "k")
def set_context(runtime: Runtime, handle: int) -> None:
    """Switch this thread."""
    runtime.require_init()
    for card in runtime.cards:
        default = card.default_context
        if default is not None and handle == id(default):
            runtime.enter_context(default)
            return
    runtime.enter_context(runtime.find(handle, Context, 107000))


@entry("acl.rt.get_context", failure=(0,))
def get_context(runtime: Runtime) -> int:
    """Context of this thread."""
    context = runtime.current
    return context.handle or id(context)


@entry("acl.rt.destroy_context", "k")
def destroy_context(runtime: Runtime, handle: int) -> None:
    """Destroy an explicit context; what it still owns stays as a leak."""
    runtime.require_init()
    context = runtime.drop(handle, Context, 107000)
    for stream in context.all_streams:
        stream.advance(None)
    if runtime.is_current(context):
        runtime.enter_context(None)


@entry("acl.rt.synchronize_device")
def synchronize_device(runtime: Runtime) -> Pending:
    """Wait for everything on the card."""
    card = runtime.current.card
    streams = [
        stream
        for stream in (*runtime.objects.values(), runtime.current.default_stream)
        if isinstance(stream, Stream) and stream.context.card is card
    ]
    for stream in streams:
        stream.advance(None)
    failures = [failure for stream in streams if (failure := stream.take_failure()) is not None]
    return Pending(max(stream.end_ns for stream in streams), failures[0] if failures else None)


@entry("acl.rt.get_device_info", "ii", failure=(0,))
def get_device_info(runtime: Runtime, device_id: int, attribute: int) -> int:
    """A number about the chip; cut to a C int, as the binding does."""
    runtime.card(device_id)
    values = {
        1: 6, 101: _CORES[0], 102: _CORES[0], 201: _CORES[1],
        301: runtime.options.memory_bytes & 0x7FFFFFFF, 302: 192 << 20,
    }  # fmt: skip
    if attribute not in values:
        raise RefusedError(107000, f"attribute {attribute} is unknown")
    return values[attribute]


@entry("acl.rt.get_device_utilization_rate", "i", failure=({},))
def get_device_utilization_rate(runtime: Runtime, device_id: int) -> dict[str, Any]:
    """Percentages; the simulator tells the share of time computed."""
    card = runtime.card(device_id)
    return {
        "cube_utilization": int(100 * card.busy_share()), "vector_utilization": 0,
        "aicpu_utilization": -1,
        "memory_utilization": int(100 * card.memory.used / card.memory.total),
        "utilization_extend": 0,
    }  # fmt: skip


@entry("acl.rt.get_last_error", "i", failure=None, bare=0)
def get_last_error(runtime: Runtime, level: int) -> int:
    """Code of this thread's last error."""
    return runtime.last_error_code


@entry("acl.rt.peek_at_last_error", "i", failure=None, bare=0)
def peek_at_last_error(runtime: Runtime, level: int) -> int:
    """The same without clearing."""
    return runtime.last_error_code


@entry("acl.rt.set_op_wait_timeout", "i")
def set_op_wait_timeout(runtime: Runtime, seconds: int) -> None:
    """Operators of the simulator never hang."""
    runtime.require_init()


@entry("acl.rt.set_op_execute_time_out", "i")
def set_op_execute_time_out(runtime: Runtime, seconds: int) -> None:
    """Operators of the simulator never hang."""
    runtime.require_init()


# Core limits.


def _limit(limits: dict[int, int], kind: int, value: int) -> None:
    if kind not in _CORES or not 0 < value <= _CORES[kind]:
        raise RefusedError(107000, f"limit {value} of core type {kind}; cores: {_CORES}")
    limits[kind] = value


@entry("acl.rt.set_device_res_limit", "iii")
def set_device_res_limit(runtime: Runtime, device_id: int, kind: int, value: int) -> None:
    """Limit the cores of a card in this process."""
    _limit(runtime.card(device_id).core_limits, kind, value)


@entry("acl.rt.get_device_res_limit", "ii", failure=(0,))
def get_device_res_limit(runtime: Runtime, device_id: int, kind: int) -> int:
    """The limit, or all cores."""
    return runtime.card(device_id).core_limits.get(kind, _CORES[kind])


@entry("acl.rt.reset_device_res_limit", "i")
def reset_device_res_limit(runtime: Runtime, device_id: int) -> None:
    """No limit."""
    runtime.card(device_id).core_limits.clear()


@entry("acl.rt.set_stream_res_limit", "kii")
def set_stream_res_limit(runtime: Runtime, handle: int, kind: int, value: int) -> None:
    """Limit the cores of a stream."""
    _limit(runtime.stream(handle).core_limits, kind, value)


@entry("acl.rt.get_stream_res_limit", "ki", failure=(0,))
def get_stream_res_limit(runtime: Runtime, handle: int, kind: int) -> int:
    """The limit, or all cores."""
    return runtime.stream(handle).core_limits.get(kind, _CORES[kind])


@entry("acl.rt.reset_stream_res_limit", "k")
def reset_stream_res_limit(runtime: Runtime, handle: int) -> None:
    """No limit."""
    runtime.stream(handle).core_limits.clear()


@entry("acl.rt.use_stream_res_in_current_thread", "k")
def use_stream_res_in_current_thread(runtime: Runtime, handle: int) -> None:
    """Make the limit of a stream count."""
    runtime.stream(handle)


@entry("acl.rt.unuse_stream_res_in_current_thread", "k")
def unuse_stream_res_in_current_thread(runtime: Runtime, handle: int) -> None:
    """Make it count no more."""
    runtime.stream(handle)


@entry("acl.rt.get_res_in_current_thread", "i", failure=(0,))
def get_res_in_current_thread(runtime: Runtime, kind: int) -> int:
    """Cores of this thread."""
    return runtime.current.card.core_limits.get(kind, _CORES[kind])
