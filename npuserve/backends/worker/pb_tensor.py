"""`Tensor` of triton_python_backend_utils, and the conversions between its datatypes and NumPy's.

Behaviour and texts: Triton python_backend, src/pb_tensor.cc and src/resources/
triton_python_backend_utils.py.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.backends.worker import dlpack
from npuserve.backends.worker.wire import CODE_OF, DATATYPES, text

if TYPE_CHECKING:  # Python 3.8 has no such types
    Array = np.ndarray[Any, np.dtype[Any]]


class TritonModelException(Exception):  # noqa: N818 - the name models catch
    """What the helpers raise, and what a model may raise to fail a batch."""

    __module__ = "c_python_backend_utils"  # error texts show it


# NumPy's dtype by wire datatype code. BF16 (14) has none of its own: its bits are uint16.
NUMPY_BY_CODE: tuple[np.dtype[Any], ...] = (
    np.dtype(np.object_), np.dtype(np.bool_), np.dtype(np.uint8), np.dtype(np.uint16),
    np.dtype(np.uint32), np.dtype(np.uint64), np.dtype(np.int8), np.dtype(np.int16),
    np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float16), np.dtype(np.float32),
    np.dtype(np.float64), np.dtype(np.object_), np.dtype(np.uint16),
)  # fmt: skip
_STRING = CODE_OF["BYTES"]
_BF16 = CODE_OF["BF16"]
_CODE_BY_NUMPY = {dtype: code for code, dtype in enumerate(NUMPY_BY_CODE) if code and code != _BF16}

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_BOOL": bool, "TYPE_UINT8": np.uint8, "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32, "TYPE_UINT64": np.uint64, "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16, "TYPE_INT32": np.int32, "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16, "TYPE_FP32": np.float32, "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}  # fmt: skip

_TRITON_TO_NUMPY: dict[int, Any] = {
    1: np.bool_, 2: np.uint8, 3: np.uint16, 4: np.uint32, 5: np.uint64, 6: np.int8, 7: np.int16,
    8: np.int32, 9: np.int64, 10: np.float16, 11: np.float32, 12: np.float64, 13: np.object_,
}  # fmt: skip
_NUMPY_TO_TRITON: dict[Any, int] = {value: key for key, value in _TRITON_TO_NUMPY.items()}
_NUMPY_TO_TRITON[np.bytes_] = _STRING

_LENGTH = struct.Struct("<I")
_OBJECT = np.dtype(np.object_)


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """NumPy's type for "TYPE_FP32" and the like; unknown names are a KeyError."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """NumPy's type for a number of the DataType enum, or None."""
    return _TRITON_TO_NUMPY.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The number in the DataType enum of a NumPy type or dtype, or None."""
    kind = data_type.type if isinstance(data_type, np.dtype) else data_type
    return _NUMPY_TO_TRITON.get(kind)


def serialize_byte_tensor(input_tensor: Array) -> Any:
    """The wire form of a text tensor: a uint32 length before each element, in C order.

    Returns:
        bytes; `()` for an empty tensor and None for one that is not text, as in Triton.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return join_elements(input_tensor)


def join_elements(array: Array) -> bytes:
    """`serialize_byte_tensor` of a text array of any size."""
    pack = _LENGTH.pack
    parts: list[bytes] = []
    for element in array.reshape(-1).tolist():
        if type(element) is bytes:
            item = element
        elif isinstance(element, (bytes, bytearray, memoryview)):
            item = bytes(element)
        else:
            item = str(element).encode("utf-8")
        parts.append(pack(len(item)))
        parts.append(item)
    return b"".join(parts)


def split_elements(data: Any) -> list[bytes]:
    """The elements of a text tensor in wire form."""
    unpack = _LENGTH.unpack_from
    elements: list[bytes] = []
    offset, end = 0, len(data)
    while offset < end:
        start = offset + 4
        offset = start + unpack(data, offset)[0]
        elements.append(bytes(data[start:offset]))
    if offset > end:
        raise struct.error(f"text tensor is cut off: {offset} bytes expected, {end} found")
    return elements


def deserialize_bytes_tensor(encoded_tensor: Any) -> Array:
    """A one-dimensional object array of the elements of a text tensor in wire form."""
    return _object_array(split_elements(encoded_tensor), None)


def _object_array(elements: list[bytes], shape: Any) -> Array:
    array = np.array(elements, _OBJECT)  # NumPy takes bytes for scalars, whatever their length
    return array if shape is None else array.reshape(shape)


class Tensor:
    """A named tensor: of a NumPy array the model made, or of what came with a request."""

    __module__ = "c_python_backend_utils"  # error texts show it

    __slots__ = ("_array", "_code", "_data", "_device_tensor", "_name", "_shape")

    def __init__(self, name: str, numpy_array: Array) -> None:
        if type(name) is not str:
            name = text(name, "name")
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(
                "__init__(): incompatible constructor arguments: Tensor(name: str, "
                f"numpy_array: numpy.ndarray), got {type(numpy_array).__name__}"
            )
        if name == "":
            raise TritonModelException("Tensor name cannot be an empty string.")
        code = _CODE_BY_NUMPY.get(numpy_array.dtype)
        if code is None:
            code, numpy_array = _adapted(numpy_array)
        if not numpy_array.flags.c_contiguous:
            numpy_array = np.ascontiguousarray(numpy_array)
        self._name = name
        self._code = code
        self._array: Array | None = numpy_array
        self._shape: Any = numpy_array.shape
        self._data: Any = None
        self._device_tensor: Any = None

    @classmethod
    def _from_wire(cls, name: str, code: int, shape: Any, data: Any) -> Tensor:
        """A tensor over bytes that came from the server; arrays are made when asked for."""
        tensor: Tensor = cls.__new__(cls)
        tensor._name = name
        tensor._code = code
        tensor._shape = shape
        tensor._data = data
        tensor._array = None
        tensor._device_tensor = None
        return tensor

    def _to_wire(self) -> Any:
        """The tensor's bytes as a C-contiguous buffer."""
        if self._device_tensor is not None:
            return Tensor.from_dlpack(self._name, self._device_tensor.cpu())._to_wire()
        if self._array is None:
            return self._data
        if self._code == _STRING:
            return join_elements(self._array)
        return self._array

    def name(self) -> str:
        """The tensor's name."""
        return self._name

    def shape(self) -> list[int]:
        """Its dimensions, the batch dimension included."""
        return list(self._shape)

    dims = shape

    def triton_dtype(self) -> int:
        """Its datatype as the number that `triton_to_numpy_type` understands."""
        # Differs from Triton: there the call raises TypeError, as its enum is not exported.
        return self._code

    def is_cpu(self) -> bool:
        """Whether the data is in host memory."""
        return self._device_tensor is None

    def as_numpy(self) -> Array:
        """The tensor as an array without a copy; text is an object array of bytes."""
        array = self._array
        if self._code == _BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and "
                "from_dlpack() instead."
            )
        if array is None:
            if self._device_tensor is not None:
                raise TritonModelException(
                    "Tensor is stored in GPU and cannot be converted to NumPy."
                )
            array = self._array = self._make_array()
        return array

    def _make_array(self) -> Array:
        if self._code == _STRING:
            return _object_array(split_elements(self._data), self._shape)
        data = self._data
        # Models may write to their inputs. Bytes out of a message are nobody else's after a copy.
        if type(data) is bytes or (type(data) is memoryview and data.readonly):
            data = bytearray(data)
        return np.ndarray(self._shape, NUMPY_BY_CODE[self._code], data)

    def _bits(self) -> Array:
        """Like as_numpy, and the bits of BF16 as uint16."""
        if self._array is None:
            self._array = self._make_array()
        return self._array

    def to_dlpack(self) -> Any:
        """A DLPack capsule of the tensor, without a copy."""
        if self._device_tensor is not None:
            return self._device_tensor.__dlpack__()
        if self._code == _STRING:
            raise TritonModelException("DLPack does not have support for string tensors.")
        return dlpack.export(self._bits(), DATATYPES[self._code])

    def __dlpack__(self, stream: Any = None, **_options: Any) -> Any:
        """The protocol behind `torch.from_dlpack(tensor)` and `numpy.from_dlpack(tensor)`."""
        if self._device_tensor is not None:
            return self._device_tensor.__dlpack__(stream=stream)
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        """(DLDeviceType, device id)."""
        if self._device_tensor is not None:
            kind, number = self._device_tensor.__dlpack_device__()
            return int(kind), int(number)
        return dlpack.CPU, 0

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor of a DLPack capsule or of an object that has the DLPack protocol.

        Host memory is taken without a copy. A tensor on a card (CUDA, or an NPU through
        torch_npu) is kept as it is and copied when it leaves the model.
        """
        name = text(name, "name")
        if name == "":
            raise TritonModelException("Tensor name cannot be an empty string.")
        if dlpack.is_capsule(tensor):
            return _from_capsule(name, tensor)
        if not hasattr(tensor, "__dlpack__") or not hasattr(tensor, "__dlpack_device__"):
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule or have "
                "`__dlpack__` and `__dlpack_device__` attributes"
            )
        device = int(tensor.__dlpack_device__()[0])
        if device in (dlpack.CPU, dlpack.CUDA_HOST):
            if isinstance(tensor, np.ndarray):
                return _from_array(name, tensor)
            return _from_capsule(name, tensor.__dlpack__())
        if not hasattr(tensor, "cpu"):
            raise TritonModelException(f"DLDevice type {device} is not support by Python backend.")
        return _on_device(name, tensor)


def _adapted(array: Array) -> tuple[int, Array]:
    """An array of a type without a code of its own: fixed-size bytes and foreign byte order."""
    if array.dtype.kind == "S":
        return _STRING, array.astype(np.object_)
    if array.dtype.byteorder in "<>":
        native = array.dtype.newbyteorder("=")
        code = _CODE_BY_NUMPY.get(native)
        if code is not None:
            return code, array.astype(native)
    raise TritonModelException("NumPy dtype is not supported.")


def _from_array(name: str, array: Array) -> Tensor:
    """NumPy's own export refuses read-only arrays and some strides, so do without it."""
    if not array.flags.c_contiguous:
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in "
            "C-Order are supported."
        )
    if array.dtype.kind in "OSU":
        raise TritonModelException("DLPack does not have support for string tensors.")
    return Tensor(name, array)


def _from_capsule(name: str, capsule: Any) -> Tensor:
    if not dlpack.is_capsule(capsule):
        raise TritonModelException("Provided DLPack capsule was already consumed.")
    device = dlpack.device_of(capsule)[0]
    if device == dlpack.EXT_DEV:
        return _on_device(name, _framework_tensor(capsule))
    try:
        array, datatype = dlpack.consume(capsule)
    except dlpack.DLPackError as error:
        raise TritonModelException(str(error)) from None
    code = CODE_OF[datatype]
    result = Tensor._from_wire(name, code, array.shape, None)
    result._array = array.view(NUMPY_BY_CODE[code])
    return result


def _framework_tensor(capsule: Any) -> Any:
    """A tensor object over a capsule in a card's memory; only its framework can copy it."""
    try:
        from torch.utils.dlpack import from_dlpack
    except ImportError:
        raise TritonModelException(
            f"DLDevice type {dlpack.EXT_DEV} is not support by Python backend without torch and "
            "torch_npu."
        ) from None
    return from_dlpack(capsule)


def _on_device(name: str, tensor: Any) -> Tensor:
    result = Tensor._from_wire(name, 0, tuple(int(dim) for dim in tensor.shape), None)
    result._device_tensor = tensor
    result._code = _code_of_framework(str(tensor.dtype))
    return result


_FRAMEWORK_TYPES = {
    "bool": 1, "uint8": 2, "uint16": 3, "uint32": 4, "uint64": 5, "int8": 6, "int16": 7,
    "int32": 8, "int64": 9, "float16": 10, "float32": 11, "float64": 12, "bfloat16": _BF16,
}  # fmt: skip


def _code_of_framework(dtype: str) -> int:
    code = _FRAMEWORK_TYPES.get(dtype.rpartition(".")[2])
    if code is None:
        raise TritonModelException("DLDataType is not supported by Python backend.")
    return code
