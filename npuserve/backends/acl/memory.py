"""Device memory and page-locked host memory.

Copies between the two are asynchronous only with page-locked memory, so tensors are staged in
it; blocks are allocated once per slot and reused.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from npuserve.backends.acl import codes
from npuserve.backends.acl.runtime import Owned, Stream

if TYPE_CHECKING:
    from npuserve.backends.acl.library import AclLibrary


class DeviceBuffer(Owned):
    """`size` bytes on the current context's card, 64-byte aligned, content undefined."""

    def __init__(self, library: AclLibrary, size: int) -> None:
        super().__init__()
        self.library = library
        self.size = size
        self.pointer: int = library.value(
            "acl.rt.malloc", size, codes.MALLOC_HUGE_FIRST, context=f"for {size} bytes"
        )
        self._stack.callback(library.release, "acl.rt.free", self.pointer)


class HostBuffer(Owned):
    """`size` bytes of page-locked host memory, 64-byte aligned, content undefined.

    Attributes:
        array: uint8 view of the memory; must not be used after `close`.
    """

    def __init__(self, library: AclLibrary, size: int) -> None:
        super().__init__()
        self.library = library
        self.size = size
        self.pointer: int = library.value(
            "acl.rt.malloc_host", size, context=f"for {size} page-locked bytes"
        )
        self._stack.callback(library.release, "acl.rt.free_host", self.pointer)
        memory = (ctypes.c_char * size).from_address(self.pointer)
        self.array: NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)

    def download(self, offset: int, source: int, size: int, stream: Stream) -> None:
        """Queue the copy of `size` bytes at a device address to a place in this memory."""
        self.library.call(
            "acl.rt.memcpy_async", self.pointer + offset, self.size - offset, source, size,
            int(codes.MemcpyKind.DEVICE_TO_HOST), stream.handle,
            context=f"copying {size} bytes from the card",
        )  # fmt: skip


class StagingBuffer(Owned):
    """A page-locked block and a device block of the same size, grown when more is needed.

    Attributes:
        capacity: bytes that fit.
    """

    host: HostBuffer
    device: DeviceBuffer

    def __init__(self, library: AclLibrary, size: int) -> None:
        super().__init__()
        self.library = library
        self.capacity = 0
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        with ExitStack() as stack:
            self.host = stack.enter_context(HostBuffer(self.library, size))
            self.device = stack.enter_context(DeviceBuffer(self.library, size))
            self._stack = stack.pop_all()
        self.capacity = size

    def reserve(self, size: int) -> bool:
        """Have room for `size` bytes; True if the addresses changed. Content is lost then."""
        if size <= self.capacity:
            return False
        grown = max(size, 2 * self.capacity)
        self.capacity = 0
        self.close()
        self._allocate(grown)
        return True

    def upload(self, size: int, stream: Stream) -> None:
        """Queue the copy of the first `size` bytes to the card; leave `host` alone until done."""
        self.library.call(
            "acl.rt.memcpy_async", self.device.pointer, self.device.size, self.host.pointer,
            size, int(codes.MemcpyKind.HOST_TO_DEVICE), stream.handle,
            context=f"copying {size} bytes to the card",
        )  # fmt: skip

    def download(self, size: int, stream: Stream) -> None:
        """Queue the copy of the first `size` bytes from the card."""
        self.host.download(0, self.device.pointer, size, stream)


def free_foreign(library: AclLibrary, pointer: int) -> None:
    """Free device memory that the runtime allocated for an output of unknown size."""
    library.release("acl.rt.free", pointer)
