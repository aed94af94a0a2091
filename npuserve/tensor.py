"""Datatypes and the Tensor value: a name, a datatype, a shape and a buffer somebody else may own.

A leaf: knows NumPy and nothing of the server. BYTES tensors stay in their wire form (a
little-endian uint32 length before every element) until somebody asks for Python objects.
"""

from __future__ import annotations

import math
import struct
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview


class DataType(StrEnum):
    """Wire names of the KServe v2 protocol. `TYPE_STRING` of a configuration is BYTES here."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"
    BF16 = "BF16"


# Bytes per element; BYTES has no fixed size and is absent.
ITEM_SIZE: dict[str, int] = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2,
    "INT32": 4, "INT64": 8, "FP16": 2, "FP32": 4, "FP64": 8, "BF16": 2,
}  # fmt: skip

# BF16 has no NumPy type of its own: its bits are handed out as uint16.
NUMPY_DTYPE: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_), "UINT8": np.dtype("<u1"), "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"), "UINT64": np.dtype("<u8"), "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"), "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(np.object_), "BF16": np.dtype("<u2"),
}  # fmt: skip

_DATATYPE_BY_NUMPY: dict[np.dtype[Any], str] = {
    dtype: name for name, dtype in NUMPY_DTYPE.items() if name != "BF16"
}
_LENGTH = struct.Struct("<I")
# More strings than an event loop should walk through: five take about a microsecond.
MANY_STRINGS = 16 * 1024


def element_count(shape: Iterable[int]) -> int:
    """Number of elements of a tensor of this shape; 1 for a scalar."""
    return math.prod(shape)


def datatype_of(dtype: np.dtype[Any]) -> str:
    """The wire datatype of a NumPy dtype; object, bytes and str arrays are BYTES.

    Raises:
        InvalidArgumentError: NumPy's type has no counterpart (complex, datetime, …).
    """
    name = _DATATYPE_BY_NUMPY.get(dtype.newbyteorder("<"))
    if name is not None:
        return name
    if dtype.kind in "OSU":
        return "BYTES"
    raise InvalidArgumentError(f"NumPy dtype {dtype} has no Triton datatype")


class Tensor:
    """A named tensor whose bytes are a view of whatever brought them in.

    Attributes:
        name: tensor name.
        datatype: wire datatype such as "FP32" (a `DataType` or the plain text).
        shape: `[batch, *dims]` for a model that batches, else `[*dims]`.
        data: one-dimensional, C-contiguous bytes, `len(data)` is the size in bytes. A view;
            never written to by the server. Little-endian, row-major; BYTES length-prefixed.
    """

    __slots__ = ("_scan", "data", "datatype", "name", "shape")

    def __init__(self, name: str, datatype: str, shape: Sequence[int], data: Buffer) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.data = data
        self._scan: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.datatype}, {list(self.shape)}, {len(self.data)} bytes)"

    @classmethod
    def from_numpy(cls, name: str, array: NDArray[Any], datatype: str | None = None) -> Tensor:
        """A tensor over `array`'s own memory (copied only if it is not C-contiguous or is text).

        Args:
            datatype: given when NumPy cannot tell, i.e. "BF16" for an array of its uint16 bits.
        """
        datatype = datatype or datatype_of(array.dtype)
        if datatype == "BYTES":
            return cls(name, datatype, array.shape, serialize_bytes(array))
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        array = np.ascontiguousarray(array).reshape(array.shape)
        data: Buffer = array.reshape(-1).view(np.uint8).data if array.size else b""
        return cls(name, datatype, array.shape, data)

    @classmethod
    def from_strings(
        cls, name: str, shape: Sequence[int], elements: Iterable[bytes], count: int
    ) -> Tensor:
        """A BYTES tensor of `count` elements, which need not be as many as the shape says."""
        tensor = cls(name, "BYTES", shape, pack_strings(elements))
        expected = element_count(shape)
        if count <= expected:
            tensor._scan = count, 0
        return tensor

    @property
    def long_to_scan(self) -> bool:
        """Whether `scan_strings` would hold up an event loop."""
        return (
            self.datatype == "BYTES"
            and self._scan is None
            and len(self.data) > MANY_STRINGS * _LENGTH.size
            and element_count(self.shape) > MANY_STRINGS
        )

    def scan_strings(self) -> tuple[int, int]:
        """Walk through BYTES data, as far as the shape says and only the first time.

        Returns:
            The number of whole elements, and how many bytes follow the last of them.
        """
        if self._scan is None:
            expected, end = element_count(self.shape), len(self.data)
            count = offset = 0
            unpack, data = _LENGTH.unpack_from, self.data
            while count < expected and offset + 4 <= end:
                after: int = offset + 4 + unpack(data, offset)[0]
                if after > end:
                    break
                offset = after
                count += 1
            self._scan = count, end - offset
        return self._scan

    def as_numpy(self) -> NDArray[Any]:
        """An array of `shape`: a read-only-by-convention view, or objects (bytes) for BYTES.

        Raises:
            InvalidArgumentError: the buffer does not hold what datatype and shape promise.
        """
        if self.datatype == "BYTES":
            elements = deserialize_bytes(self.data, element_count(self.shape))
            array = np.empty(len(elements), dtype=np.object_)
            array[:] = elements
            return array.reshape(tuple(self.shape))
        dtype = NUMPY_DTYPE[self.datatype]
        try:
            return np.frombuffer(self.data, dtype).reshape(tuple(self.shape))
        except ValueError as error:
            raise InvalidArgumentError(
                f"tensor '{self.name}' of {len(self.data)} bytes is not a {self.datatype} "
                f"tensor of shape {list(self.shape)}"
            ) from error


def pack_strings(elements: Iterable[bytes]) -> bytearray:
    """The wire form of these elements, without ever having all of them in a list."""
    data = bytearray()
    pack = _LENGTH.pack
    for element in elements:
        data += pack(len(element))
        data += element
    return data


def serialize_bytes(array: NDArray[Any]) -> bytes:
    """The wire form of a text array, in C order; str elements are encoded as UTF-8."""
    parts: list[bytes] = []
    for element in array.reshape(-1):
        if isinstance(element, bytes):
            item = element
        elif isinstance(element, (bytearray, memoryview)):
            item = bytes(element)
        else:
            item = str(element).encode()
        parts.append(_LENGTH.pack(len(item)))
        parts.append(item)
    return b"".join(parts)


def deserialize_bytes(data: Buffer, count: int | None = None) -> list[bytes]:
    """The elements of a length-prefixed BYTES buffer.

    Args:
        count: number of elements there must be; None takes what is there.

    Raises:
        InvalidArgumentError: a length reaches past the end, or the count differs.
    """
    elements: list[bytes] = []
    offset, end = 0, len(data)
    while offset < end:
        if offset + 4 > end:
            raise InvalidArgumentError(
                f"incomplete string length indicator: 4 bytes expected at offset {offset}, "
                f"{end - offset} left"
            )
        (length,) = _LENGTH.unpack_from(data, offset)
        offset += 4
        if offset + length > end:
            raise InvalidArgumentError(
                f"incomplete string: {length} bytes expected at offset {offset}, "
                f"{end - offset} left"
            )
        elements.append(bytes(data[offset : offset + length]))
        offset += length
    if count is not None and len(elements) != count:
        raise InvalidArgumentError(f"expected {count} string elements, got {len(elements)}")
    return elements
