"""Requests of a batch as rows for a fixed-shape device: grouping, staging, cutting apart.

Shared by the backends that run compiled NPU models. Knows requests and arrays, no runtime.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.backends.batch_input import BatchTensors, join_ragged
from npuserve.buffer_pool import LARGE_TENSOR_BYTES
from npuserve.errors import InvalidArgumentError, NpuserveError
from npuserve.response import InferenceResponse
from npuserve.tensor import ITEM_SIZE, Buffer, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from npuserve.buffer_pool import BufferPool
    from npuserve.request import InferenceRequest

Shape = tuple[int, ...]
# Shape and bytes of (a part of) an output.
Piece = tuple[Shape, Buffer]


@dataclass
class Group:
    """Requests that run together: their inputs differ in the number of rows only.

    Attributes:
        requests: in order; a single one for a model without a batch dimension.
        shapes: for each input the whole shape, rows of all requests together on axis 0.
        rows: rows of all requests; 0 without a batch dimension.
        made: tensors of all requests together: ragged inputs as one flat row, and batch inputs.
        error: why it failed.
        pieces: for each request and output what came back, in order of the rows.
    """

    requests: list[InferenceRequest]
    shapes: list[Shape]
    rows: int
    made: dict[str, NDArray[Any]] = field(default_factory=dict)
    error: NpuserveError | None = None
    pieces: list[dict[str, list[Piece]]] = field(default_factory=list)

    def fail(self, error: NpuserveError) -> None:
        """Remember the first failure."""
        if self.error is None:
            self.error = error

    def ranges(self, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
        """Requests that have rows in [start, stop).

        Yields:
            (index of the request, its rows in the request, the same rows counted from `start`).
        """
        first = 0
        for index, request in enumerate(self.requests):
            last = first + request.batch_size
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield index, slice(low - first, high - first), slice(low - start, high - start)
            first = last


def group_requests(
    requests: Sequence[InferenceRequest], names: Sequence[str], batching: bool,
    batch_tensors: BatchTensors,
) -> tuple[list[Group], list[tuple[InferenceRequest, NpuserveError]]]:  # fmt: skip
    """Neighbours with equal shapes (rows aside) together, and requests that lack an input.

    Args:
        names: the model's inputs.
        batch_tensors: ragged inputs, whose shapes do not keep requests apart, and batch inputs.
    """
    groups: list[Group] = []
    refused: list[tuple[InferenceRequest, NpuserveError]] = []
    made = batch_tensors.ragged | batch_tensors.input_names
    equal = [name for name in names if name not in made]
    needed = [name for name in names if name not in batch_tensors.input_names]
    for request in requests:
        missing = [name for name in needed if name not in request.inputs]
        if missing:
            text = f"input '{missing[0]}' is missing; a compiled model needs all its inputs"
            refused.append((request, InvalidArgumentError(text)))
            continue
        shapes = [tuple(request.inputs[name].shape) for name in equal]
        rows = request.batch_size if batching else 0
        last = groups[-1] if groups else None
        if batching and last is not None and _tails(last.shapes) == _tails(shapes):
            last.requests.append(request)
            last.rows += rows
            last.shapes = [(last.rows, *shape[1:]) for shape in shapes]
        else:
            groups.append(Group([request], shapes, rows))
    for group in groups:
        group.pieces = [{} for _ in group.requests]
        if made:
            _make(group, names, equal, batch_tensors)
    return groups, refused


def _make(
    group: Group, names: Sequence[str], equal: Sequence[str], batch_tensors: BatchTensors
) -> None:
    group.made = batch_tensors.inputs(group.requests)
    for name in batch_tensors.ragged:
        group.made[name] = join_ragged([request.inputs[name] for request in group.requests])
    own = dict(zip(equal, group.shapes, strict=True))
    group.shapes = [own[name] if name in own else group.made[name].shape for name in names]


def _tails(shapes: Sequence[Shape]) -> list[Shape]:
    return [shape[1:] for shape in shapes]


def stage_input(
    group: Group, name: str, start: int, stop: int, target: NDArray[np.uint8], dims: Shape
) -> None:
    """Write rows [start, stop) of one input into device staging memory.

    Args:
        start, stop: rows of the group; both 0 without a batch dimension.
        target: bytes of a tensor of `dims`, at least as large as the rows on every axis; the
            rest is zeroed.
        dims: of the staged tensor.
    """
    if name in group.made:
        target[...] = np.ascontiguousarray(group.made[name]).reshape(-1).view(np.uint8)
        return
    tensor = group.requests[0].inputs[name]
    item = ITEM_SIZE[tensor.datatype]
    array = target.reshape(*dims, item)
    if not group.rows:
        shape = tuple(tensor.shape)
        if shape != dims:
            array[...] = 0
        array[_corner(shape)] = _elements(tensor, item)
        return
    tail = tuple(tensor.shape)[1:]
    if (stop - start, *tail) != dims:
        array[...] = 0
    for index, rows, place in group.ranges(start, stop):
        elements = _elements(group.requests[index].inputs[name], item)
        array[(place, *_corner(tail))] = elements[rows]


def _corner(shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(length) for length in shape)


def _elements(tensor: Tensor, item: int) -> NDArray[np.uint8]:
    """The tensor as bytes of shape `[*shape, item size]`.

    Raises:
        InvalidArgumentError: the buffer does not hold what the shape promises.
    """
    try:
        return np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape, item)
    except ValueError as error:
        raise InvalidArgumentError(
            f"tensor '{tensor.name}' of {len(tensor.data)} bytes is not a {tensor.datatype} "
            f"tensor of shape {list(tensor.shape)}"
        ) from error


def sizes_of(text: str) -> list[int]:
    """Numbers above 0 from a list such as "1,2,4", each once, ascending.

    Raises:
        ValueError: something else is written.
    """
    sizes = sorted({int(part) for part in text.split(",")})
    if sizes[0] < 1:
        raise ValueError(f"{sizes[0]} is no size")
    return sizes


class OutputWriter:
    """Turns what came back from the device into responses with memory of their own.

    Args:
        datatypes: wire datatype of every output that is served, by name.
        always: outputs to return even if a request does not ask for them (states).
        pool: where large outputs get their memory; None: from the system.
        batch_tensors: outputs that are one flat row of all requests' elements.
        exact: whether outputs have no more rows than the batch, so that others are nobody's.
    """

    def __init__(
        self, datatypes: dict[str, str], always: set[str], pool: BufferPool | None,
        batch_tensors: BatchTensors, exact: bool = False,
    ) -> None:  # fmt: skip
        self.datatypes = datatypes
        self._always = always
        self._pool = pool
        self._batch_tensors = batch_tensors
        self._exact = exact

    def take(self, group: Group, start: int, stop: int, name: str, array: NDArray[Any]) -> None:
        """Keep an output of rows [start, stop), copied out of the device's staging memory.

        Args:
            array: uint8 of shape `[*dims, item size]`; only the leading rows count.

        Raises:
            InvalidArgumentError: it has fewer rows than the batch, or others.
            InternalError: it is a flat row and has not the elements of the batch.
        """
        if name in self._batch_tensors.scattered:
            self._scatter(group, name, array)
            return
        if not group.rows:
            if self._is_wanted(group.requests[0], name):
                group.pieces[0][name] = [self._own(array)]
            return
        rows = 0 if array.ndim < 2 else array.shape[0]
        if rows < stop - start or (self._exact and rows > stop - start):
            raise InvalidArgumentError(
                f"output '{name}' of shape {list(array.shape[:-1])} has not one row for each of "
                f"the {stop - start} batch elements; use max_batch_size: 0 for this model"
            )
        for index, _, place in group.ranges(start, stop):
            if self._is_wanted(group.requests[index], name):
                pieces = group.pieces[index].setdefault(name, [])
                pieces.append(self._own(array[place]))

    def _scatter(self, group: Group, name: str, array: NDArray[Any]) -> None:
        item = array.shape[-1]
        elements = array.reshape(-1).view(np.dtype((np.void, item)))
        parts = self._batch_tensors.scatter(name, elements, group.requests) or []
        for request, pieces, part in zip(group.requests, group.pieces, parts, strict=True):
            if self._is_wanted(request, name):
                pieces[name] = [self._own(part.view(np.uint8).reshape(*part.shape, item))]

    def _is_wanted(self, request: InferenceRequest, name: str) -> bool:
        wanted = request.requested_outputs
        return not wanted or name in wanted or name in self._always

    def _own(self, array: NDArray[Any]) -> Piece:
        shape = array.shape[:-1]
        if self._pool is None or array.nbytes < LARGE_TENSOR_BYTES:
            return shape, array.tobytes()
        memory = self._pool.lease(array.nbytes)
        np.frombuffer(memory, np.uint8).reshape(array.shape)[...] = array
        return shape, memory

    def response(self, group: Group, index: int) -> InferenceResponse:
        """The answer to one request of a group all of whose rows came back."""
        if group.error is not None:
            return InferenceResponse.from_error(group.error)
        outputs: list[Tensor] = []
        for name, pieces in group.pieces[index].items():
            shape, data = pieces[0]
            if len(pieces) > 1:
                shape = (sum(part[0] for part, _ in pieces), *shape[1:])
                data = b"".join(content for _, content in pieces)
            outputs.append(Tensor(name, self.datatypes[name], shape, data))
        return InferenceResponse(outputs)
