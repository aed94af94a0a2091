"""`acl.rt.*`: device memory, page-locked memory, copies."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from npuserve.testing.simulator.binding import Pending, entry
from npuserve.testing.simulator.device import DOWNLOAD, ON_DEVICE, UPLOAD
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.memory import check_alignment, device_of

if TYPE_CHECKING:
    from npuserve.testing.simulator.runtime import Runtime

_HOST_TO_HOST, _HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE, _DEFAULT = range(5)
_ENGINES = {_HOST_TO_DEVICE: UPLOAD, _DEVICE_TO_HOST: DOWNLOAD, _DEVICE_TO_DEVICE: ON_DEVICE}
_DEVICE_EXCEPTION = 507015


@entry("acl.rt.malloc", "ki", failure=(0,))
def malloc(runtime: Runtime, size: int, policy: int) -> int:
    """Device memory on the current card."""
    card = runtime.current.card
    address = card.memory.allocate(size, "acl.rt.malloc")
    runtime.shared_state.publish(card.index, card.memory.used, card.busy_ns)
    return address


@entry("acl.rt.malloc_align32", "ki", failure=(0,))
def malloc_align32(runtime: Runtime, size: int, policy: int) -> int:
    """The same."""
    return malloc(runtime, size, policy)


@entry("acl.rt.malloc_cached", "ki", failure=(0,))
def malloc_cached(runtime: Runtime, size: int, policy: int) -> int:
    """The same, cached."""
    return malloc(runtime, size, policy)


@entry("acl.rt.mem_flush", "kk")
def mem_flush(runtime: Runtime, address: int, size: int) -> None:
    """Write a cache back."""
    runtime.bytes_at(address, size)


@entry("acl.rt.mem_invalidate", "kk")
def mem_invalidate(runtime: Runtime, address: int, size: int) -> None:
    """Drop a cache."""
    runtime.bytes_at(address, size)


@entry("acl.rt.free", "k")
def free(runtime: Runtime, address: int) -> None:
    """Give device memory back at once, whoever still uses it."""
    runtime.require_init()
    device = device_of(address)
    if not 0 <= device < len(runtime.cards):
        raise RefusedError(107000, f"{address:#x} is not a device address")
    card = runtime.cards[device]
    card.memory.free(address)
    runtime.shared_state.publish(card.index, card.memory.used, card.busy_ns)


@entry("acl.rt.malloc_host", "k", failure=(0,))
def malloc_host(runtime: Runtime, size: int) -> int:
    """Page-locked host memory."""
    runtime.require_context()
    return runtime.host.allocate(size, "acl.rt.malloc_host")


@entry("acl.rt.free_host", "k")
def free_host(runtime: Runtime, address: int) -> None:
    """Give page-locked memory back."""
    runtime.require_init()
    if device_of(address) >= 0:
        raise RefusedError(107000, "free_host of device memory")
    runtime.host.free(address)


@entry("acl.rt.get_mem_info", "i", failure=(0, 0))
def get_mem_info(runtime: Runtime, attribute: int) -> tuple[int, int]:
    """Free and total bytes."""
    memory = runtime.current.card.memory
    if not 0 <= attribute <= 13:
        raise RefusedError(107000, f"memory attribute {attribute} is unknown")
    is_hbm = attribute in (1, 4, 5, 8, 9, 10)
    if is_hbm is not runtime.options.has_hbm and attribute < 12 and runtime.options.has_hbm:
        return 0, 0
    return memory.total - memory.used, memory.total


def _view(runtime: Runtime, address: int, size: int, on_device: bool) -> Any:
    return runtime.bytes_at(address, size) if on_device else runtime.host.view(address, size)


def _sides(runtime: Runtime, destination: int, source: int, kind: int) -> tuple[bool, bool]:
    """(destination on the card?, source on the card?)."""
    if kind == _DEFAULT:
        return device_of(destination) >= 0, device_of(source) >= 0
    if not 0 <= kind < _DEFAULT:
        raise RefusedError(107000, f"copy kind {kind} is unknown")
    return (
        kind in (_HOST_TO_DEVICE, _DEVICE_TO_DEVICE),
        kind in (_DEVICE_TO_HOST, _DEVICE_TO_DEVICE),
    )


def _check_sizes(maximum: int, count: int) -> None:
    if count > maximum:
        raise RefusedError(107000, f"{count} bytes into a destination of {maximum}")
    if not count:
        raise RefusedError(107000, "a copy of 0 bytes")


def copy_ns(runtime: Runtime, count: int) -> int:
    """Modelled time of a copy over PCIe."""
    options = runtime.options
    return int(options.copy_us * 1000 + count / options.pcie_gb_s)


@entry("acl.rt.memcpy", "kkkki", hold=True)
def memcpy(
    runtime: Runtime, destination: int, maximum: int, source: int, count: int, kind: int
) -> Pending:
    """Copy and wait, holding the GIL."""
    context = runtime.current
    _check_sizes(maximum, count)
    to_device, from_device = _sides(runtime, destination, source, kind)
    for stream in context.all_streams:
        stream.advance_to(runtime.clock.now_ns())
    target = _view(runtime, destination, count, to_device)
    target[:] = _view(runtime, source, count, from_device)
    if not (to_device or from_device):
        return Pending(0)
    engine = UPLOAD if to_device else DOWNLOAD
    now = runtime.clock.now_ns()
    return Pending(context.card.occupy(engine, 0, "memcpy", now, copy_ns(runtime, count)))


@entry("acl.rt.memcpy_async", "kkkkik")
def memcpy_async(
    runtime: Runtime, destination: int, maximum: int, source: int, count: int, kind: int,
    handle: int,
) -> Pending | None:  # fmt: skip
    """Queue a copy. Pageable host memory makes it wait."""
    stream = runtime.stream(handle)
    _check_sizes(maximum, count)
    to_device, from_device = _sides(runtime, destination, source, kind)
    if not (to_device or from_device):
        raise RefusedError(107000, "an asynchronous copy from host to host")
    check_alignment(destination, source)
    # Addresses are checked now; whether they are still good is checked when the copy happens.
    _view(runtime, destination, count, to_device)
    sent = None if from_device else zlib.crc32(_view(runtime, source, count, False))

    def copy() -> None:
        origin = _still_there(runtime, source, count, from_device)
        if sent is not None and zlib.crc32(origin) != sent:
            text = f"host memory {source:#x} was changed while its copy was in flight"
            runtime.violations.append(text)
            raise RefusedError(_DEVICE_EXCEPTION, text)
        _still_there(runtime, destination, count, to_device)[:] = origin

    engine = UPLOAD if to_device and not from_device else _ENGINES[kind if kind < 4 else 2]
    name = f"{count} bytes"
    task = stream.queue(runtime.clock.now_ns(), engine, name, copy_ns(runtime, count), copy)
    host_side = source if to_device else destination
    if not (to_device and from_device) and not runtime.host.is_pinned(host_side):
        stream.advance(task)
        return Pending(task.end_ns, stream.take_failure())
    return None


def _still_there(runtime: Runtime, address: int, count: int, on_device: bool) -> Any:
    try:
        return _view(runtime, address, count, on_device)
    except RefusedError as error:
        text = f"memory was freed while a copy was in flight: {error}"
        runtime.violations.append(text)
        raise RefusedError(_DEVICE_EXCEPTION, text) from error


@entry("acl.rt.memset", "kkik")
def memset(runtime: Runtime, address: int, maximum: int, value: int, count: int) -> None:
    """Fill device or host memory."""
    runtime.require_init()
    _check_sizes(maximum, count)
    _view(runtime, address, count, device_of(address) >= 0)[:] = value & 0xFF


@entry("acl.rt.memset_async", "kkikk")
def memset_async(
    runtime: Runtime, address: int, maximum: int, value: int, count: int, handle: int
) -> None:
    """Queue filling memory."""
    stream = runtime.stream(handle)
    _check_sizes(maximum, count)
    on_device = device_of(address) >= 0
    _view(runtime, address, count, on_device)

    def fill() -> None:
        _still_there(runtime, address, count, on_device)[:] = value & 0xFF

    stream.queue(runtime.clock.now_ns(), ON_DEVICE, "memset", copy_ns(runtime, count), fill)
