"""Simulated memory: device addresses that only the simulator can resolve, real host blocks.

Device addresses lie far outside of anything mapped, so code that uses one as a host pointer
crashes as it would with a card. They are never given out twice: a use after free always shows.
"""

from __future__ import annotations

import bisect
import ctypes
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npuserve.testing.simulator.faults import RefusedError

_DEVICE_BASE = 0x7000_0000_0000_0000
_DEVICE_SPACE = 0x0010_0000_0000_0000
_HOST_QUARANTINE_BYTES = 64 << 20

# Return codes, see backends/acl/codes.py.
_BAD_PARAMETER = 107000
_UNALIGNED = 107008
_OUT_OF_DEVICE_MEMORY = 207001


@dataclass(frozen=True)
class Block:
    """One allocation.

    Attributes:
        address: device address or host pointer.
        size: bytes asked for.
        charged: bytes taken from the card.
        data: uint8 content of `size` bytes.
        call: what made it.
        device: card, -1 for host memory.
        dvpp: memory for the media hardware, which only `dvpp_free` takes back.
    """

    address: int
    size: int
    charged: int
    data: NDArray[np.uint8] = field(repr=False)
    call: str
    device: int
    dvpp: bool = False


class AddressMap:
    """Live blocks by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Take a block in."""
        bisect.insort(self._starts, block.address)
        self._blocks[block.address] = block

    def pop(self, address: int) -> Block | None:
        """Take the block that starts there out; None if there is none."""
        block = self._blocks.pop(address, None)
        if block is not None:
            del self._starts[bisect.bisect_left(self._starts, address)]
        return block

    def find(self, address: int) -> Block | None:
        """The block that `address` lies in."""
        position = bisect.bisect_right(self._starts, address) - 1
        if position < 0:
            return None
        block = self._blocks[self._starts[position]]
        return block if address < block.address + block.size else None

    def __iter__(self) -> Any:
        return iter(list(self._blocks.values()))


class DeviceMemory:
    """The memory of one card."""

    def __init__(self, device: int, total: int) -> None:
        self.device = device
        self.total = total
        self.used = 0
        self.blocks = AddressMap()
        self._next = _DEVICE_BASE + device * _DEVICE_SPACE

    def allocate(self, size: int, call: str, dvpp: bool = False) -> int:
        """Device address of a new block; content is noise, as on a card."""
        if size <= 0:
            raise RefusedError(_BAD_PARAMETER, f"{call}: size must be positive")
        charged = (size + 31) // 32 * 32 + 32
        if self.used + charged > self.total:
            raise RefusedError(
                _OUT_OF_DEVICE_MEMORY,
                f"EL0004: Failed to allocate memory: {charged} bytes asked, "
                f"{self.total - self.used} of {self.total} free on device {self.device}",
            )
        address = self._next
        self._next += (charged + 127) // 64 * 64
        # Large blocks are left to the system, which takes memory only for what is touched.
        data = np.full(size, 0xA5, np.uint8) if size <= 1 << 20 else np.empty(size, np.uint8)
        self.blocks.add(Block(address, size, charged, data, call, self.device, dvpp))
        self.used += charged
        return address

    def free(self, address: int, dvpp: bool = False) -> None:
        """Give a block back to what it came from."""
        block = self.blocks.find(address)
        if block is None or block.address != address:
            raise RefusedError(
                _BAD_PARAMETER, f"address {address:#x} is not allocated (freed twice?)"
            )
        if block.dvpp is not dvpp:
            raise RefusedError(_BAD_PARAMETER, f"memory of {block.call} is freed otherwise")
        self.blocks.pop(address)
        self.used -= block.charged


def device_of(address: int) -> int:
    """Card of a device address, -1 for a host address."""
    return (address - _DEVICE_BASE) // _DEVICE_SPACE if address >= _DEVICE_BASE else -1


class HostMemory:
    """Page-locked host memory: real blocks, 64-byte aligned."""

    def __init__(self) -> None:
        self.blocks = AddressMap()
        self._freed = AddressMap()
        self._freed_order: deque[Block] = deque()
        self._freed_bytes = 0

    def allocate(self, size: int, call: str) -> int:
        """Pointer to a new block; content is noise."""
        if size <= 0:
            raise RefusedError(_BAD_PARAMETER, f"{call}: size must be positive")
        raw = np.full(size + 64, 0x5A, np.uint8)
        offset = -raw.ctypes.data % 64
        data = raw[offset : offset + size]
        self.blocks.add(Block(data.ctypes.data, size, 0, data, call, -1))
        return data.ctypes.data

    def free(self, address: int) -> None:
        """Free; the memory is kept for a while, so that a use after free can be told."""
        block = self.blocks.pop(address)
        if block is None:
            raise RefusedError(
                _BAD_PARAMETER,
                f"{address:#x} is not page-locked memory (freed twice, or not by malloc_host?)",
            )
        self._freed.add(block)
        self._freed_order.append(block)
        self._freed_bytes += block.size
        while self._freed_bytes > _HOST_QUARANTINE_BYTES:
            oldest = self._freed_order.popleft()
            self._freed.pop(oldest.address)
            self._freed_bytes -= oldest.size

    def view(self, address: int, size: int) -> NDArray[np.uint8]:
        """Host bytes; pageable memory of other owners is trusted to be as large as said."""
        if not address:
            raise RefusedError(_BAD_PARAMETER, "host address is null")
        if device_of(address) >= 0:
            raise RefusedError(_BAD_PARAMETER, f"{address:#x} is a device address")
        block = self.blocks.find(address)
        if block is None:
            if self._freed.find(address) is not None:
                raise RefusedError(_BAD_PARAMETER, f"host memory {address:#x} was freed")
            memory = (ctypes.c_uint8 * size).from_address(address)
            return np.frombuffer(memoryview(memory), np.uint8)
        return _slice(block, address, size)

    def is_pinned(self, address: int) -> bool:
        """Whether the address lies in page-locked memory."""
        return self.blocks.find(address) is not None


def device_view(memory: DeviceMemory, address: int, size: int) -> NDArray[np.uint8]:
    """Bytes on a card."""
    if not address:
        raise RefusedError(_BAD_PARAMETER, "device address is null")
    block = memory.blocks.find(address)
    if block is None:
        raise RefusedError(
            _BAD_PARAMETER,
            f"{address:#x} is no allocated memory of device {memory.device} (freed, or a host "
            "address?)",
        )
    return _slice(block, address, size)


def check_alignment(*addresses: int) -> None:
    """Addresses of an asynchronous copy must be multiples of 64."""
    for address in addresses:
        if address % 64:
            raise RefusedError(_UNALIGNED, f"address {address:#x} is not 64-byte aligned")


def _slice(block: Block, address: int, size: int) -> NDArray[np.uint8]:
    start = address - block.address
    if start + size > block.size:
        raise RefusedError(
            _BAD_PARAMETER,
            f"{size} bytes at {address:#x} reach past the block of {block.size} bytes",
        )
    return block.data[start : start + size]
