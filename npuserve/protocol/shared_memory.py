"""Shared-memory regions that clients registered: system (POSIX) ones; CUDA is answered as absent.

Regions are reached with `pread` and `pwrite` on a kept file descriptor, never through a mapping:
a client may make its object shorter at any time, and touching a mapping past the new end would
kill the server with SIGBUS. All methods belong to the event loop's thread; `reader` is for others.
"""

from __future__ import annotations

import asyncio
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from npuserve.errors import (
    AlreadyExistsError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from npuserve.tensor import Buffer

_SHM_DIRECTORY = "/dev/shm"
# Objects of Triton's own python backend; not for clients.
_RESERVED_PREFIX = "triton_python_backend_shm_region_"


@dataclass(eq=False)
class Region:
    """One registered region: `byte_size` bytes from `offset` of the object called `key`."""

    name: str
    key: str
    offset: int
    byte_size: int
    fd: int = field(repr=False)
    users: int = 0  # requests that will still write to it
    unregistered: bool = False  # removed as soon as users == 0


class RegionSlice:
    """Where an output goes: `byte_size` bytes of a region, kept registered until `release`."""

    __slots__ = ("_region", "_registry", "byte_size", "offset")

    def __init__(
        self, registry: SharedMemoryRegistry, region: Region, offset: int, byte_size: int
    ) -> None:
        self._registry = registry
        self._region: Region | None = region
        self.offset = offset
        self.byte_size = byte_size

    def write(self, output_name: str, data: Buffer) -> None:
        """Copy an output's bytes to the slice.

        Raises:
            InternalError: the slice or the object behind it is too small.
        """
        region = self._region
        if region is None:
            raise InternalError(f"output '{output_name}' was written after its request ended")
        if len(data) > self.byte_size:
            raise InternalError(
                "shared memory size specified with the request for output "
                f"'{output_name}' ({self.byte_size} bytes) should be at least {len(data)} bytes "
                "to hold the results"
            )
        start = region.offset + self.offset
        _check_length(region, start + len(data))
        view = memoryview(data)
        while view:
            written = os.pwrite(region.fd, view, start)
            view, start = view[written:], start + written

    def release(self) -> None:
        """Let go of the region; harmless when repeated."""
        region, self._region = self._region, None
        if region is not None:
            self._registry.release(region)


class SharedMemoryRegistry:
    """The regions of one server, by name.

    Args:
        enabled: `--allow-client-shm`; when False everything but the status calls is refused.
        lease: makes the writable buffer that an input is read into.
    """

    def __init__(
        self,
        enabled: bool = True,
        lease: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size)),
    ) -> None:
        self._enabled = enabled
        self._lease = lease
        self._regions: dict[str, Region] = {}

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register part of the POSIX shared-memory object `key`.

        Raises:
            InvalidArgumentError: bad name, key, offset or size, or there is no such object.
            AlreadyExistsError: the name is taken.
        """
        self._check_enabled()
        if not name:
            # Differs from Triton: over gRPC it takes a region without a name.
            raise InvalidArgumentError(
                "'region name' is necessary to register system shared memory region"
            )
        path = _object_path(name, key)
        if name in self._regions:
            raise _already_there(name)
        if offset < 0 or byte_size <= 0:
            raise _invalid_args(name)
        # Differs from Triton, which maps it: the offset need not be that of a page, and an object
        # may be registered under several names.
        fd = _open_object(path, key)
        if offset + byte_size > os.fstat(fd).st_size:
            os.close(fd)
            raise _invalid_args(name)
        self._regions[name] = Region(name, key, offset, byte_size, fd)

    def register_cuda(self, name: str) -> None:
        """Refuse: there is no CUDA device.

        Raises:
            AlreadyExistsError: a system region has the name.
            InvalidArgumentError: otherwise.
        """
        self._check_enabled()
        if not name:
            raise InvalidArgumentError(
                "'region name' is necessary to register cuda shared memory region"
            )
        if name in self._regions:
            raise _already_there(name)
        raise InvalidArgumentError(
            f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
        )

    def system_status(self, name: str = "") -> list[Region]:
        """The region of this name, or all in order of registration.

        Raises:
            NotFoundError: no region has this name.
        """
        if not name:
            return list(self._regions.values())
        region = self._regions.get(name)
        if region is None:
            raise NotFoundError(f"Unable to find system shared memory region: '{name}'")
        return [region]

    def cuda_status(self, name: str = "") -> None:
        """Check the name of a status request; there are never regions to tell of.

        Raises:
            NotFoundError: a name was given.
        """
        if name in self._regions:
            raise NotFoundError(
                f"The region named '{name}' is registered as system shared memory, "
                "not CUDA shared memory"
            )
        if name:
            raise NotFoundError(f"Unable to find cuda shared memory region: '{name}'")

    def unregister_system(self, name: str = "") -> None:
        """Remove one region, or all without a name; an unknown one is no error.

        A region that running requests still write to stays visible until they are done.
        """
        self._check_enabled()
        names = [name] if name else list(self._regions)
        for each in names:
            region = self._regions.get(each)
            if region is None:
                continue
            region.unregistered = True
            if not region.users:
                self._remove(region)

    def unregister_cuda(self, name: str = "") -> None:
        """Nothing is registered, so nothing happens."""
        self._check_enabled()

    def read(self, name: str, offset: int, byte_size: int) -> memoryview:
        """A copy of `byte_size` bytes from `offset` of a region.

        Raises:
            NotFoundError: no such region.
            InvalidArgumentError: outside of the region.
            InternalError: the object behind it was made shorter.
        """
        region = self._find(name, offset, byte_size)
        buffer = self._lease(byte_size)
        done, start = 0, region.offset + offset
        while done < byte_size:
            got = os.preadv(region.fd, [buffer[done:]], start + done)
            if not got:
                raise _truncated(region)
            done += got
        return buffer

    def reader(self, loop: asyncio.AbstractEventLoop) -> Callable[[str, int, int], memoryview]:
        """`read` for another thread: regions come and go on the loop, so it runs there."""

        def read(name: str, offset: int, byte_size: int) -> memoryview:
            async def on_loop() -> memoryview:
                return self.read(name, offset, byte_size)

            return asyncio.run_coroutine_threadsafe(on_loop(), loop).result()

        return read

    def acquire(self, name: str, offset: int, byte_size: int) -> RegionSlice:
        """A slice to write an output to. The caller releases it.

        Raises:
            NotFoundError: no such region.
            InvalidArgumentError: outside of the region.
        """
        region = self._find(name, offset, byte_size)
        region.users += 1
        return RegionSlice(self, region, offset, byte_size)

    def release(self, region: Region) -> None:
        """One user less; for `RegionSlice` only."""
        region.users -= 1
        if region.unregistered and not region.users:
            self._remove(region)

    def close(self) -> None:
        """Forget all regions."""
        for region in list(self._regions.values()):
            self._remove(region)

    def _remove(self, region: Region) -> None:
        del self._regions[region.name]
        os.close(region.fd)

    def _find(self, name: str, offset: int, byte_size: int) -> Region:
        self._check_enabled()
        region = self._regions.get(name)
        if region is None:
            raise NotFoundError(f"Unable to find shared memory region: '{name}'")
        if not 0 <= offset < region.byte_size:
            raise InvalidArgumentError(f"Invalid offset for shared memory region: '{name}'")
        if byte_size <= 0 or offset + byte_size > region.byte_size:
            raise InvalidArgumentError(
                f"Invalid offset + byte size for shared memory region: '{name}'"
            )
        return region

    def _check_enabled(self) -> None:
        if not self._enabled:
            raise UnsupportedError(
                "Client shared memory is disabled. Start the server with "
                "'--allow-client-shm=true' to enable."
            )


def _object_path(name: str, key: str) -> str:
    """Path of the object that `shm_open(key)` would open.

    Raises:
        InvalidArgumentError: a key that is empty or reserved.
    """
    object_name = key.lstrip("/")
    # Differs from Triton: it cuts a key at a zero byte.
    if object_name in ("", ".", "..") or "\0" in object_name:
        raise InvalidArgumentError(
            f"cannot register shared memory region '{name}' - invalid shm key '{key}'"
        )
    if object_name.startswith(_RESERVED_PREFIX):
        raise InvalidArgumentError(
            f"cannot register shared memory region '{name}' with key '{key}' as the key "
            f"contains the reserved prefix '{_RESERVED_PREFIX}'"
        )
    if "/" in object_name:  # shm_open knows no directories; never leave /dev/shm
        raise _cannot_open(key)
    return f"{_SHM_DIRECTORY}/{object_name}"


def _open_object(path: str, key: str) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, UnicodeEncodeError) as error:
        raise _cannot_open(key) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _cannot_open(key)
    return fd


def _cannot_open(key: str) -> InvalidArgumentError:
    # Differs from Triton: 400 instead of 500, it was the client who named the object.
    return InvalidArgumentError(f"Unable to open shared memory region: '{key}'")


def _already_there(name: str) -> AlreadyExistsError:
    return AlreadyExistsError(f"shared memory region '{name}' already in manager")


def _check_length(region: Region, end: int) -> None:
    if os.fstat(region.fd).st_size < end:
        raise _truncated(region)


def _truncated(region: Region) -> InternalError:
    return InternalError(
        f"shared memory object '{region.key}' of region '{region.name}' is shorter than when it "
        "was registered"
    )


def _invalid_args(name: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"failed to register shared memory region '{name}': invalid args")
