"""`batch_input`, `batch_output` and ragged inputs, for backends that run a whole batch at once.

Requests whose inputs have different shapes can share a batch if the model takes such an input
(`allow_ragged_batch`) as one flat row of elements. `batch_input` tensors tell the model where in
that row each request lies, and `batch_output` cuts a flat output apart again. Pure; knows tensors
and requests, no runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.errors import InternalError
from npuserve.model_config import datatype_name, enum_name
from npuserve.tensor import NUMPY_DTYPE, Tensor, element_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npuserve.model_config import ModelConfig
    from npuserve.request import InferenceRequest

Shapes = Sequence[Sequence[int]]


def _element_counts(shapes: Shapes) -> NDArray[np.int64]:
    return np.array([element_count(shape) for shape in shapes], np.int64)


def _accumulated(shapes: Shapes) -> NDArray[np.int64]:
    return np.cumsum(_element_counts(shapes))


def _accumulated_with_zero(shapes: Shapes) -> NDArray[np.int64]:
    return np.concatenate((np.zeros(1, np.int64), _accumulated(shapes)))


def _max_count_as_shape(shapes: Shapes) -> NDArray[np.int64]:
    """Only its shape means something: as long as the longest request."""
    return np.zeros(_element_counts(shapes).max(), np.int64)


def _item_shapes(shapes: Shapes) -> NDArray[np.int64]:
    """One row for each batch element: its shape without the batch dimension."""
    return np.array([shape[1:] for shape in shapes for _ in range(shape[0])], np.int64)


def _item_shapes_flat(shapes: Shapes) -> NDArray[np.int64]:
    return _item_shapes(shapes).reshape(-1)


# What a batch input holds, given the shapes of its source input in all requests, `[batch, *dims]`.
_KINDS: dict[str, Callable[[Shapes], NDArray[np.int64]]] = {
    "BATCH_ELEMENT_COUNT": _element_counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _accumulated,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": _accumulated_with_zero,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": _max_count_as_shape,
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": _item_shapes_flat,
}


class BatchTensors:
    """What a configuration says about the tensors of a whole batch; valid settings assumed.

    Attributes:
        ragged: inputs that requests of different shapes may share a batch with.
        input_names: inputs that the batch itself makes.
        scattered: outputs that are one flat row of all requests' elements.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.ragged = frozenset(entry.name for entry in config.input if entry.allow_ragged_batch)
        self.input_names = frozenset(
            name for entry in config.batch_input for name in entry.target_name
        )
        self._inputs = [
            (
                tuple(entry.target_name),
                entry.source_input[0],
                _KINDS[enum_name(entry, "kind")],
                NUMPY_DTYPE[datatype_name(entry.data_type)],
            )
            for entry in config.batch_input
        ]
        self._output_sources = {
            name: entry.source_input[0]
            for entry in config.batch_output
            for name in entry.target_name
        }
        self.scattered = frozenset(self._output_sources)

    def inputs(self, requests: Sequence[InferenceRequest]) -> dict[str, NDArray[Any]]:
        """The batch inputs of a batch of these requests, by name."""
        arrays: dict[str, NDArray[Any]] = {}
        for names, source, make, dtype in self._inputs:
            shapes = [request.inputs[source].shape for request in requests]
            arrays |= dict.fromkeys(names, make(shapes).astype(dtype))
        return arrays

    def scatter(
        self, name: str, array: NDArray[Any], requests: Sequence[InferenceRequest]
    ) -> list[NDArray[Any]] | None:
        """An output cut into one view per request, each of its source input's shape.

        Returns:
            None for an output that is not scattered this way.

        Raises:
            InternalError: the model made more or fewer elements than the requests have.
        """
        source = self._output_sources.get(name)
        if source is None:
            return None
        shapes = [tuple(request.inputs[source].shape) for request in requests]
        ends = _accumulated(shapes)
        if array.size != ends[-1]:
            raise InternalError(
                f"output '{name}' has {array.size} elements, but input '{source}', whose shape it "
                f"is scattered with, has {ends[-1]} in this batch"
            )
        parts = np.split(array.reshape(-1), ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def join_ragged(tensors: Sequence[Tensor]) -> NDArray[Any]:
    """All elements of a ragged input in one row, request after request."""
    if len(tensors) == 1:
        return tensors[0].as_numpy().reshape(-1)
    return np.concatenate([tensor.as_numpy().reshape(-1) for tensor in tensors])
