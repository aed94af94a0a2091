"""Tensor data between its wire forms: JSON values or typed numbers on one side, bytes on the other.

Pure. The raw form is what `Tensor.data` holds: little-endian, row-major, BYTES elements behind a
uint32 length. Errors name the tensor and are always the client's (`InvalidArgumentError`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npuserve.errors import InvalidArgumentError
from npuserve.tensor import NUMPY_DTYPE, Tensor, deserialize_bytes, element_count

_INTEGERS = frozenset(
    {"INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"}
)  # fmt: skip
_LIMITS = {datatype: np.iinfo(NUMPY_DTYPE[datatype]) for datatype in _INTEGERS}
# Clients send 32-bit hashes and ids in the other signedness: as with Triton, any number of 64 bits
# is taken and its low half counts. So 4294967295 is -1 as INT32; -1 as UINT32 is refused.
_CUT_TO_32_BITS = {"INT32": "INT64", "UINT32": "UINT64"}
_FLOATS = frozenset({"FP32", "FP64"})
# JSON has no number of 16 bits: these travel in binary form only, as with Triton.
_BINARY_ONLY = frozenset({"FP16", "BF16"})

# Python values, or numbers that are in an array already (int64, uint64 or float64).
Values = Sequence[Any] | NDArray[Any]


# ---------------------------------------------------------------- JSON → bytes


def tensor_from_json(name: str, datatype: str, shape: Sequence[int], data: Any) -> Tensor:
    """A tensor from the `data` array of a JSON request, nested in any way, row-major.

    As in Triton, `data` may be anything where the shape has no elements.

    Raises:
        InvalidArgumentError: no array, wrong kind or number of elements, a value that the
            datatype cannot hold, or a datatype that JSON cannot carry.
    """
    if not element_count(shape):
        return Tensor(name, datatype, shape, b"")
    if datatype in _BINARY_ONLY:
        raise InvalidArgumentError(
            f"receiving {datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {name}"
        )
    if datatype not in NUMPY_DTYPE:
        raise InvalidArgumentError(f"invalid datatype for input {name}")
    if isinstance(data, np.ndarray):  # numbers of a large document, see http/large_json.py
        values: Values = data
    elif type(data) is list:
        values = flatten(data)
    else:
        raise InvalidArgumentError(
            f"Unable to parse 'data': attempt to access JSON non-array as array for '{name}'"
        )
    if datatype == "BYTES":
        return _tensor_of_texts(name, shape, values)
    if len(values) != element_count(shape):
        # Differs from Triton: 400 instead of 500, for this and every malformed value below.
        raise InvalidArgumentError(
            "Unable to parse 'data': Shape does not match true shape of 'data' field "
            f"of input '{name}': {len(values)} elements for shape {list(shape)}"
        )
    return Tensor(name, datatype, shape, numbers_to_bytes(name, datatype, values))


def flatten(data: list[Any]) -> list[Any]:
    """The leaves of nested lists in order. No recursion: depth is the client's choice."""
    level = data
    while (kinds := set(map(type, level))) == {list}:
        level = list(chain.from_iterable(level))
    return level if list not in kinds else list(_leaves(level))


def _leaves(data: list[Any]) -> Iterable[Any]:
    stack = [iter(data)]
    while stack:
        for item in stack[-1]:
            if type(item) is list:
                stack.append(iter(item))
                break
            yield item
        else:
            stack.pop()


def numbers_to_bytes(name: str, datatype: str, values: Values) -> memoryview | bytes:
    """Python numbers (or booleans for BOOL) as raw tensor data.

    Raises:
        InvalidArgumentError: an element is of the wrong kind or out of the datatype's range.
    """
    if len(values) == 0:
        return b""
    if isinstance(values, np.ndarray):
        array = _checked_array(name, datatype, values)
    else:
        _check_kinds(name, datatype, set(map(type, values)))
        holder = datatype
        if datatype in _INTEGERS:
            holder = _check_range(name, datatype, min(values), max(values))
        try:
            # A finite double beyond FP32 becomes infinity, as everywhere in IEEE arithmetic.
            with np.errstate(over="ignore"):
                array = np.array(values, NUMPY_DTYPE[holder])
            if holder is not datatype:
                array = array.astype(NUMPY_DTYPE[datatype])
        except OverflowError as error:
            raise InvalidArgumentError(
                f"Unable to parse 'data': a value of '{name}' is out of range for {datatype}"
            ) from error
    return memoryview(array.view(np.uint8).data)


def _check_kinds(name: str, datatype: str, kinds: set[type]) -> None:
    """Refuse what JSON keeps apart: booleans, integers, numbers with a fraction, text."""
    allowed: set[type]
    if datatype in _INTEGERS:
        allowed, kind = {int}, "integer"
    elif datatype in _FLOATS:
        allowed, kind = {int, float}, "number"
    else:
        allowed, kind = {bool}, "boolean"
    if not kinds <= allowed:
        raise InvalidArgumentError(
            f"Unable to parse 'data': attempt to access JSON non-{kind} as {kind} "
            f"for '{name}' of datatype {datatype}"
        )


def _check_range(name: str, datatype: str, lowest: int, highest: int) -> str:
    """The datatype that holds the values: the tensor's own, or one to be cut to 32 bits."""
    limits = _LIMITS[datatype]
    if limits.min <= lowest and highest <= limits.max:
        return datatype
    holder = _CUT_TO_32_BITS.get(datatype, datatype)
    limits = _LIMITS[holder]
    if limits.min <= lowest and highest <= limits.max:
        return holder
    # Differs from Triton: it wraps integers of 8 and 16 bits, too; a wrong number is refused here.
    wrong = lowest if lowest < limits.min else highest
    raise InvalidArgumentError(
        f"Unable to parse 'data': value {wrong} of '{name}' is out of range for {datatype} "
        f"[{limits.min}, {limits.max}]"
    )


def _checked_array(name: str, datatype: str, values: NDArray[Any]) -> NDArray[Any]:
    """The same rules for numbers that are in an array already (int64, uint64 or float64)."""
    _check_kinds(name, datatype, {float if values.dtype.kind == "f" else int})
    if datatype in _INTEGERS:
        _check_range(name, datatype, int(values.min()), int(values.max()))
    with np.errstate(over="ignore"):
        return values.astype(NUMPY_DTYPE[datatype], copy=False)


def _tensor_of_texts(name: str, shape: Sequence[int], values: Values) -> Tensor:
    """Length-prefixed UTF-8; their number is checked with the request's shape by the core."""
    if isinstance(values, np.ndarray) or not set(map(type, values)) <= {str}:
        raise InvalidArgumentError(
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string "
            f"for '{name}'"
        )
    try:
        return Tensor.from_strings(name, shape, (text.encode() for text in values), len(values))
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"Unable to parse JSON bytes array: a text of '{name}' holds a lone surrogate, "
            "which has no UTF-8 form"
        ) from error


# ---------------------------------------------------------------- bytes → JSON


def json_values(tensor: Tensor) -> NDArray[Any] | list[str]:
    """The elements as JSON shows them, flat: texts, or an array of numbers or booleans.

    FP32 is widened to double, so that its digits are those that Triton prints. The array is a
    view of the tensor where that is possible.

    Raises:
        InvalidArgumentError: FP16 or BF16, or BYTES that are no UTF-8.
    """
    if tensor.datatype == "BYTES":
        return _texts(tensor)
    if tensor.datatype in _BINARY_ONLY:
        raise InvalidArgumentError(
            f"sending {tensor.datatype} data via JSON is not supported. "
            f"Please use the binary data format for output {tensor.name}"
        )
    array = tensor.as_numpy().reshape(-1)
    if tensor.datatype == "FP32":
        return array.astype(np.float64)
    return array if array.flags.aligned else array.copy()  # JSON writers read whole items


def _texts(tensor: Tensor) -> list[str]:
    try:
        return [item.decode() for item in deserialize_bytes(tensor.data)]
    except UnicodeDecodeError as error:
        # Differs from Triton: it sends the bytes as they are, a body that is no JSON.
        raise InvalidArgumentError(
            f"output '{tensor.name}' holds bytes that are no UTF-8 text and cannot be sent as "
            "JSON. Please use the binary data format for this output"
        ) from error


def is_finite(values: NDArray[Any] | list[str]) -> bool:
    """False if there is a NaN or infinity, which strict JSON cannot express."""
    if isinstance(values, list) or values.dtype.kind != "f":
        return True
    return bool(np.isfinite(values).all())
