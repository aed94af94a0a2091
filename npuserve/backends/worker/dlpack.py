"""DLPack in both directions without a framework.

NumPy's own support lacks BF16, read-only arrays and capsules. Structures follow dlpack.h
(version 0, the unversioned capsule that all frameworks read).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CPU = 1
CUDA_HOST = 3
EXT_DEV = 12  # kDLExtDev, what torch_npu calls its device

_CAPSULE_NAME = b"dltensor"
_USED_NAME = b"used_dltensor"

# (DLDataTypeCode, bits) ↔ wire datatype
_DATATYPE_OF = {
    (6, 8): "BOOL", (1, 8): "UINT8", (1, 16): "UINT16", (1, 32): "UINT32", (1, 64): "UINT64",
    (0, 8): "INT8", (0, 16): "INT16", (0, 32): "INT32", (0, 64): "INT64", (2, 16): "FP16",
    (2, 32): "FP32", (2, 64): "FP64", (4, 16): "BF16",
}  # fmt: skip
_DL_TYPE_OF = {name: key for key, name in _DATATYPE_OF.items()}


class DLPackError(ValueError):
    """A DLPack tensor that cannot be taken; the text is Triton's."""


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# Called by whoever consumed the tensor, in any thread, with or without the GIL.
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# Called by the interpreter, which holds the GIL.
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("dl_tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", _Deleter),
    )


_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(
    ("PyCapsule_New", _api)
)
# Capsules are passed as bare addresses: a destructor must not revive its capsule.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_SetName", _api)
)

# Exported tensors by the address of their struct, until their consumer deletes them.
_exported: dict[int, tuple[_DLManagedTensor, Any]] = {}


def is_capsule(value: Any) -> bool:
    """Whether `value` is an unused DLPack capsule."""
    return type(value).__name__ == "PyCapsule" and bool(_is_valid(id(value), _CAPSULE_NAME))


def _delete(address: int) -> None:
    _exported.pop(address, None)


def _destroy(capsule: int) -> None:
    if _is_valid(capsule, _CAPSULE_NAME):  # nobody consumed it
        _exported.pop(_get_pointer(capsule, _CAPSULE_NAME), None)


_delete_callback = _Deleter(_delete)
_destroy_callback = _Destructor(_destroy)


def export(array: np.ndarray[Any, Any], datatype: str) -> Any:
    """A capsule over `array`, C-contiguous, which lives until the capsule's consumer lets go.

    Args:
        array: of any shape; its element size is that of `datatype` (uint16 bits for BF16).
    """
    dims = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)
    code, bits = _DL_TYPE_OF[datatype]
    managed = _DLManagedTensor()
    tensor = managed.dl_tensor
    tensor.data = array.ctypes.data
    tensor.device = _DLDevice(CPU, 0)
    tensor.ndim = array.ndim
    tensor.dtype = _DLDataType(code, bits, 1)
    tensor.shape = dims
    managed.deleter = _delete_callback
    address = ctypes.addressof(managed)
    _exported[address] = (managed, (array, dims))
    return _new(address, _CAPSULE_NAME, _destroy_callback)


class _Owner:
    """Calls the producer's deleter when the last view of the imported memory is gone."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.managed = _DLManagedTensor.from_address(address)

    def __del__(self) -> None:
        if self.managed.deleter:
            self.managed.deleter(self.address)


def device_of(capsule: Any) -> tuple[int, int]:
    """(DLDeviceType, id) of an unused capsule."""
    managed = _DLManagedTensor.from_address(_get_pointer(id(capsule), _CAPSULE_NAME))
    return managed.dl_tensor.device.device_type, managed.dl_tensor.device.device_id


def consume(capsule: Any) -> tuple[np.ndarray[Any, Any], str]:
    """The host tensor in `capsule` as (uint8 array of its bytes reshaped by item, datatype).

    Returns:
        A flat uint8 array over the producer's memory and the wire datatype; the shape is
        `array.shape` once viewed: see `Tensor.from_dlpack`.

    Raises:
        DLPackError: not in host memory, not C-contiguous, or of a type without a counterpart.
    """
    address = _get_pointer(id(capsule), _CAPSULE_NAME)
    tensor = _DLManagedTensor.from_address(address).dl_tensor
    if tensor.device.device_type not in (CPU, CUDA_HOST):
        raise DLPackError(
            f"DLDevice type {tensor.device.device_type} is not support by Python backend."
        )
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if not _is_contiguous(tensor, shape):
        raise DLPackError(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in "
            "C-Order are supported."
        )
    datatype = _DATATYPE_OF.get((tensor.dtype.code, tensor.dtype.bits))
    if datatype is None or tensor.dtype.lanes != 1:
        raise DLPackError("DLDataType is not supported by Python backend.")
    item = np.dtype(f"u{tensor.dtype.bits // 8}")
    size = item.itemsize
    for dim in shape:
        size *= dim
    owner = _Owner(address)
    _set_name(id(capsule), _USED_NAME)
    if not size:
        return np.empty(shape, item), datatype
    memory = (ctypes.c_uint8 * size).from_address(tensor.data + tensor.byte_offset)
    memory.owner = owner  # type: ignore[attr-defined]  # lives as long as any view of it
    return np.frombuffer(memoryview(memory).cast("B"), item).reshape(shape), datatype


def _is_contiguous(tensor: Any, shape: tuple[int, ...]) -> bool:
    """C order, with the strides of axes of size 0 and 1 left free, as they are never used."""
    if not tensor.strides or 0 in shape:
        return True
    expected = 1
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] != 1 and tensor.strides[axis] != expected:
            return False
        expected *= shape[axis]
    return True
