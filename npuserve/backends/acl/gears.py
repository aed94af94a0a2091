"""Which compiled shape serves a request, and how its outputs are cut back. Pure.

A model file is compiled for one shape (static), for a list of shapes (gears: of the batch axis,
of height and width, or of any axes), or for ranges of shapes. The first two are one case here:
a list of gears, each with the complete dims of every data input. The runtime pads nothing, so
inputs are padded to the nearest gear that holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Gear:
    """One shape the model was compiled for.

    Attributes:
        key: what the runtime is told: () for a static model, (batch,), (height, width), or the
            concatenated dims of all data inputs.
        inputs: dims of each data input.
    """

    key: Dims
    inputs: tuple[Dims, ...]


# For each input the axes that may be padded.
Paddable = tuple[frozenset[int], ...]


def paddable_axes(gears: Sequence[Gear], batching: bool) -> Paddable:
    """Axes whose length changes with the gear; with batching also the rows.

    An axis that is the same in all gears is part of the model: a shorter input is a mistake.
    """
    paddable: list[frozenset[int]] = []
    for lengths in zip(*(gear.inputs for gear in gears), strict=True):
        rank = len(lengths[0])
        axes = {axis for axis in range(rank) if len({dims[axis] for dims in lengths}) > 1}
        paddable.append(frozenset(axes | {0} if batching else axes))
    return tuple(paddable)


def fits(gear: Gear, shapes: Sequence[Sequence[int]], paddable: Paddable) -> bool:
    """Whether inputs of these shapes can be padded to the gear."""
    return all(
        len(dims) == len(shape)
        and all(
            have == want or (have > want and axis in axes)
            for axis, (have, want) in enumerate(zip(dims, shape, strict=True))
        )
        for dims, shape, axes in zip(gear.inputs, shapes, paddable, strict=True)
    )


def nearest(
    gears: Sequence[Gear], shapes: Sequence[Sequence[int]], paddable: Paddable
) -> Gear | None:
    """The gear that holds the shapes with the fewest padded elements, None if there is none."""
    best: Gear | None = None
    best_size = 0
    for gear in gears:
        if fits(gear, shapes, paddable):
            size = sum(prod(dims) for dims in gear.inputs)
            if best is None or size < best_size:
                best, best_size = gear, size
    return best


def largest_batch(
    gears: Sequence[Gear], shapes: Sequence[Sequence[int]], paddable: Paddable
) -> int:
    """Rows (axis 0) that the largest gear holds for inputs of these shapes; 0 if none does.

    Args:
        shapes: complete shapes; their axis 0 is ignored.
    """
    rows = 0
    one_row = [(1, *shape[1:]) for shape in shapes]
    for gear in gears:
        if fits(gear, one_row, paddable):
            rows = max(rows, min(dims[0] for dims in gear.inputs))
    return rows


@dataclass(frozen=True)
class AxisRule:
    """How long an output axis really is: `ceil(input axis * ratio)`."""

    input_index: int
    axis: int
    ratio: Fraction

    def length(self, shapes: Sequence[Sequence[int]]) -> int:
        """Length of the output axis for inputs of these shapes."""
        return ceil(shapes[self.input_index][self.axis] * self.ratio)


def output_rules(gears: Sequence[Gear], outputs: Sequence[Dims]) -> dict[int, AxisRule | None]:
    """For every axis of one output that changes with the gear, the input axis it follows.

    Args:
        outputs: dims of the output for each gear.
    """
    rules: dict[int, AxisRule | None] = {}
    rank = len(outputs[0])
    for axis in range(rank):
        lengths = [dims[axis] for dims in outputs]
        if len(set(lengths)) > 1:
            rules[axis] = _explain(gears, lengths, axis)
    return rules


def _explain(gears: Sequence[Gear], lengths: Sequence[int], output_axis: int) -> AxisRule | None:
    """The input axis in a constant ratio to the output axis; the same position is preferred."""
    candidates: list[AxisRule] = []
    for index, dims in enumerate(gears[0].inputs):
        for axis in range(len(dims)):
            ratios = {
                Fraction(length, gear.inputs[index][axis])
                for length, gear in zip(lengths, gears, strict=True)
            }
            if len(ratios) == 1:
                candidates.append(AxisRule(index, axis, ratios.pop()))
    if not candidates:
        return None
    return min(candidates, key=lambda rule: abs(rule.axis - output_axis))


def cut_dims(
    compiled: Dims,
    rules: dict[int, AxisRule | None],
    gear: Gear,
    shapes: Sequence[Sequence[int]],
) -> Dims | None:
    """Real dims of an output that was computed with a gear.

    Args:
        compiled: dims of the output for the gear.
        shapes: real shapes of the inputs.

    Returns:
        None when the inputs were padded and an axis cannot be cut back.
    """
    padded = any(tuple(shape) != dims for shape, dims in zip(shapes, gear.inputs, strict=True))
    if not padded:
        return compiled
    cut = list(compiled)
    for axis, rule in rules.items():
        if rule is None:
            return None
        cut[axis] = min(compiled[axis], rule.length(shapes))
    return tuple(cut)
