"""What single operators compute. Pure: arrays in, arrays out.

The arithmetic is that of NumPy with the operator's datatypes; products of matrices accumulate in
FP32, or INT32 for integers, as the cube unit does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
Attributes = Mapping[str, Any]
Kernel = Callable[[Sequence[Array], Attributes, DTypeLike], Array]


def _elementwise(function: Callable[[Array, Array], Array]) -> Kernel:
    def kernel(inputs: Sequence[Array], attributes: Attributes, dtype: DTypeLike) -> Array:
        left, right = inputs
        result: Array = function(left, right)
        return result

    return kernel


def _cast(inputs: Sequence[Array], attributes: Attributes, dtype: DTypeLike) -> Array:
    (array,) = inputs
    return array.astype(dtype)


def _product(left: Array, right: Array) -> Array:
    wide = np.int32 if np.issubdtype(left.dtype, np.integer) else np.float32
    product: Array = np.matmul(left.astype(wide), right.astype(wide))
    return product


def _turned(array: Array, turn: object) -> Array:
    return np.swapaxes(array, -1, -2) if turn else array


def _matrices(first: str, second: str) -> Kernel:
    """Matrix product whose attributes of these names transpose a side; a third input is a bias."""

    def kernel(inputs: Sequence[Array], attributes: Attributes, dtype: DTypeLike) -> Array:
        left = _turned(inputs[0], attributes.get(first))
        right = _turned(inputs[1], attributes.get(second))
        product = _product(left, right)
        return np.add(product, inputs[2]) if len(inputs) > 2 else product

    return kernel


def _gemm(inputs: Sequence[Array], attributes: Attributes, dtype: DTypeLike) -> Array:
    """Alpha * A B + beta * C."""
    left, right, addend, alpha, beta = inputs
    product = _product(
        _turned(left, attributes.get("transpose_a")), _turned(right, attributes.get("transpose_b"))
    )
    scaled: Array = alpha.reshape(()) * product + beta.reshape(()) * addend.astype(product.dtype)
    return scaled


def _arg_max(inputs: Sequence[Array], attributes: Attributes, dtype: DTypeLike) -> Array:
    array, dimension = inputs
    indices: Array = np.argmax(array, axis=int(dimension.reshape(-1)[0]))
    return indices


def _slice(inputs: Sequence[Array], attributes: Attributes, dtype: DTypeLike) -> Array:
    """A part given by offsets and sizes; size -1 reaches to the end."""
    array, offsets, sizes = inputs
    ranges = [
        slice(start, None if size < 0 else start + size)
        for start, size in zip(offsets.tolist(), sizes.tolist(), strict=True)
    ]
    return array[tuple(ranges)]


KERNELS: dict[str, Kernel] = {
    "Add": _elementwise(np.add),
    "Sub": _elementwise(np.subtract),
    "Mul": _elementwise(np.multiply),
    "Maximum": _elementwise(np.maximum),
    "Minimum": _elementwise(np.minimum),
    "Cast": _cast,
    "MatMul": _matrices("transpose_x1", "transpose_x2"),
    "MatMulV2": _matrices("transpose_x1", "transpose_x2"),
    "BatchMatMul": _matrices("adj_x1", "adj_x2"),
    "GEMM": _gemm,
    "ArgMaxV2": _arg_max,
    "Slice": _slice,
}


def compute(
    op_type: str, inputs: Sequence[Array], attributes: Attributes, dtype: DTypeLike,
    shape: Sequence[int],
) -> Array:  # fmt: skip
    """The operator's output of that datatype and shape.

    Raises:
        ValueError: the inputs do not fit the operator, or its result the output.
    """
    result = np.asarray(KERNELS[op_type](inputs, attributes, dtype)).astype(dtype)
    if result.size != np.prod(shape, dtype=np.int64):
        raise ValueError(f"{op_type} makes {list(result.shape)}, the output is {list(shape)}")
    return np.ascontiguousarray(result).reshape(tuple(shape))
