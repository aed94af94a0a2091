"""Many requests in one batch: inputs side by side, outputs cut apart again.

For backends that run a whole batch at once. Knows tensors and requests, no runtime.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.errors import InternalError
from npuserve.tensor import NUMPY_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from npuserve.request import InferenceRequest
    from npuserve.tensor import Tensor

# Buffers of gathered inputs begin at a multiple of this, as vector instructions like it.
_ALIGNMENT = 64


class InputGatherer:
    """Lays the inputs of a batch side by side in memory that is reused for the next batch.

    Not thread-safe: one per instance. What `gather` returns is valid until the next call for the
    same input.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def gather(self, tensors: Sequence[Tensor]) -> NDArray[Any]:
        """The tensors joined along the first dimension; a lone tensor is a view, not a copy.

        Raises:
            InvalidArgumentError: a tensor's bytes do not fit its shape.
            ValueError: shapes that do not join (the scheduler never makes such a batch).
        """
        first = tensors[0]
        if len(tensors) == 1:
            return first.as_numpy()
        arrays = [tensor.as_numpy() for tensor in tensors]
        if first.datatype == "BYTES":
            return np.concatenate(arrays)
        rows = sum(array.shape[0] for array in arrays)
        shape = (rows, *arrays[0].shape[1:])
        target = self._buffer(first.name, NUMPY_DTYPE[first.datatype], shape)
        return np.concatenate(arrays, out=target)

    def _buffer(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < size:
            memory = np.empty(size + _ALIGNMENT, np.uint8)
            buffer = memory[-memory.ctypes.data % _ALIGNMENT :]
            self._buffers[name] = buffer
        return buffer[:size].view(dtype).reshape(shape)


def cut_rows(
    name: str, array: NDArray[Any], requests: Sequence[InferenceRequest]
) -> list[NDArray[Any]]:
    """For every request the rows of an output that are its own, as views.

    Raises:
        InternalError: there are more or fewer rows than batch elements.
    """
    ends = list(accumulate(request.batch_size for request in requests))
    if array.shape[0] != ends[-1]:
        raise InternalError(f"output '{name}' has {array.shape[0]} rows for a batch of {ends[-1]}")
    # Slices: `np.split` costs four times as much for a batch of 32.
    return [array[start:end] for start, end in pairwise([0, *ends])]


def split_by_inputs(
    requests: Sequence[InferenceRequest], batching: bool
) -> Iterator[Sequence[InferenceRequest]]:
    """Parts of a batch that can run as one: neighbours with the same inputs.

    Optional inputs make requests of one batch differ. A model without a batch dimension runs
    its requests one by one.
    """
    if not batching:
        yield from ((request,) for request in requests)
        return
    start = 0
    for index in range(1, len(requests) + 1):
        if index == len(requests) or requests[index].inputs.keys() != requests[start].inputs.keys():
            yield requests[start:index]
            start = index
