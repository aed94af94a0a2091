"""The classification extension: the best k elements of an output as texts. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.errors import InvalidArgumentError
from npuserve.tensor import Tensor, pack_strings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# Triton's own limit: every element becomes a text.
MAX_ELEMENTS = 1_000_000

_FLOATS = frozenset({"FP32", "FP64"})
_INTEGERS = frozenset(
    {"INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"}
)  # fmt: skip


def classify(tensor: Tensor, k: int, labels: Sequence[str], *, batched: bool) -> Tensor:
    """A BYTES tensor `[batch, min(k, n)]` of `value:index` or `value:index:label`, best first.

    Args:
        tensor: any shape.
        k: wanted number of classes, at least 1.
        labels: by index; a missing or empty one is left out of the text.
        batched: the first dimension of the tensor counts batch elements.

    Raises:
        InvalidArgumentError: a datatype without an order, or too many elements.
    """
    if tensor.datatype not in _FLOATS and tensor.datatype not in _INTEGERS:
        raise InvalidArgumentError(
            f"class result not available for output due to unsupported type '{tensor.datatype}'"
        )
    values = tensor.as_numpy()
    if values.size > MAX_ELEMENTS:
        raise InvalidArgumentError("classification output tensor too large")
    rows = values.reshape(len(values) if batched and values.ndim else 1, -1)
    count = min(k, rows.shape[1])
    spell = _spell_float if tensor.datatype in _FLOATS else str
    texts = [
        _entry(spell(row[index]), int(index), labels) for row in rows for index in _best(row, count)
    ]
    shape = [len(rows), count] if batched else [count]
    return Tensor(tensor.name, "BYTES", shape, pack_strings(texts))


def _best(row: NDArray[Any], count: int) -> NDArray[np.intp]:
    """Indices of the `count` greatest elements, descending; the lower index first among equals."""
    reverse = np.argsort(row[::-1], kind="stable")
    return (len(row) - 1 - reverse)[::-1][:count]


def _spell_float(value: Any) -> str:
    return f"{value:f}"


def _entry(value: str, index: int, labels: Sequence[str]) -> bytes:
    label = labels[index] if index < len(labels) else ""
    text = f"{value}:{index}:{label}" if label else f"{value}:{index}"
    return text.encode(errors="surrogateescape")  # a label file of any encoding, as it is
