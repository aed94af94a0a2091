"""`acl.util.*`: addresses of Python objects, threads."""

from __future__ import annotations

import ctypes
import signal
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from npuserve.testing.simulator.binding import bare
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.memory import device_of

if TYPE_CHECKING:
    from npuserve.testing.simulator.runtime import Runtime

_buffer_address = ctypes.pythonapi.PyBytes_AsString
_buffer_address.restype = ctypes.c_void_p
_buffer_address.argtypes = [ctypes.py_object]


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"acl.util.{name} will be deprecated, use {instead}", Warning, stacklevel=4)


@bare("acl.util.bytes_to_ptr", "o")
def bytes_to_ptr(runtime: Runtime, data: Any) -> int:
    """Address of the content of a bytes object."""
    if not isinstance(data, bytes):
        raise ValueError("acl.util.bytes_to_ptr: bytes expected")
    address: int = _buffer_address(data)
    return address


@bare("acl.util.ptr_to_bytes", "kk", failed=None)
def ptr_to_bytes(runtime: Runtime, address: int, size: int) -> bytes:
    """A copy of host memory."""
    if device_of(address) >= 0:
        raise RefusedError(107000, "ptr_to_bytes of a device address")
    return runtime.host.view(address, size).tobytes()


@bare("acl.util.numpy_to_ptr", "o")
def numpy_to_ptr(runtime: Runtime, array: NDArray[Any]) -> int:
    """Address of an array; only a warning when it is not contiguous."""
    _deprecated("numpy_to_ptr", "bytes_to_ptr")
    if not array.flags["C_CONTIGUOUS"]:
        warnings.warn("the array is not contiguous", Warning, stacklevel=3)
    return int(array.ctypes.data)


@bare("acl.util.numpy_contiguous_to_ptr", "o", failed=(0, None))
def numpy_contiguous_to_ptr(runtime: Runtime, array: NDArray[Any]) -> tuple[int, NDArray[Any]]:
    """Address of a contiguous copy, and the copy."""
    _deprecated("numpy_contiguous_to_ptr", "bytes_to_ptr")
    contiguous = np.ascontiguousarray(array)
    return int(contiguous.ctypes.data), contiguous


@bare("acl.util.ptr_to_numpy", "koi", failed=None)
def ptr_to_numpy(
    runtime: Runtime, address: int, shape: tuple[int, ...], type_number: int
) -> NDArray[Any]:
    """A view of host memory that owns nothing."""
    _deprecated("ptr_to_numpy", "ptr_to_bytes")
    if not isinstance(shape, tuple):
        raise TypeError("acl.util.ptr_to_numpy: the shape must be a tuple")
    dtypes: dict[int, np.dtype[Any]] = {
        np.dtype(code).num: np.dtype(code) for code in "?bBhHiIlLqQefdFD"
    }
    dtype = dtypes[type_number]
    size = int(np.prod(shape)) * dtype.itemsize
    return runtime.host.view(address, size).view(dtype).reshape(shape)


class _Thread(threading.Thread):
    """A thread that keeps what its function raised."""

    def __init__(self, function: Callable[..., Any], argument: Any) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._argument = argument
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            if self._argument is None:
                self._function()
            else:
                self._function(self._argument)
        except BaseException as error:  # handed to stop_thread
            self.error = error


_threads: dict[int, _Thread] = {}


def start_thread(function: Callable[..., Any], argument: Any, /) -> tuple[int, int]:
    """Start a thread; its id is what `subscribe_report` wants. Resets the SIGINT handler."""
    thread = _Thread(function, argument)
    thread.start()
    assert thread.ident is not None
    _threads[thread.ident] = thread
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return thread.ident, 0


def stop_thread(thread_id: int, /) -> int:
    """Wait for a thread; RuntimeError when its function raised."""
    thread = _threads.pop(thread_id, None)
    if thread is None:
        return -1
    thread.join()
    if thread.error is not None:
        raise RuntimeError("the thread's function failed") from thread.error
    return 0
