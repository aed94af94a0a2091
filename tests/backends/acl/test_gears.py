"""Choosing gears and cutting outputs back: pure rules."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from npuserve.backends.acl.gears import (
    AxisRule,
    Gear,
    cut_dims,
    fits,
    largest_batch,
    nearest,
    output_rules,
    paddable_axes,
)

IMAGES = tuple(Gear((h, w), ((1, 3, h, w),)) for h, w in ((8, 8), (16, 8), (16, 16)))
ROWS = tuple(Gear((n,), ((n, 4), (n, 2))) for n in (1, 2, 8))


@pytest.mark.parametrize(
    ("shape", "key"),
    [((8, 8), (8, 8)), ((9, 8), (16, 8)), ((1, 1), (8, 8)), ((8, 9), (16, 16)), ((17, 1), None)],
)
def test_the_nearest_gear_has_the_fewest_padded_elements(
    shape: tuple[int, int], key: tuple[int, int] | None
) -> None:
    """Both axes must hold; None beyond the largest."""
    gear = nearest(IMAGES, [(1, 3, *shape)], paddable_axes(IMAGES, batching=False))
    assert (gear.key if gear else None) == key


def test_axes_that_are_the_same_in_all_gears_are_not_padded() -> None:
    """Two channels for three are a mistake; so is another rank."""
    paddable = paddable_axes(IMAGES, batching=False)
    assert nearest(IMAGES, [(1, 2, 8, 8)], paddable) is None
    assert nearest(IMAGES, [(3, 8, 8)], paddable) is None


def test_rows_of_a_static_model_are_padded_when_it_batches() -> None:
    """And only then."""
    static = (Gear((), ((4, 3),)),)
    assert nearest(static, [(2, 3)], paddable_axes(static, batching=True)) is static[0]
    assert nearest(static, [(2, 3)], paddable_axes(static, batching=False)) is None


def test_the_largest_batch_depends_on_the_other_axes() -> None:
    """Few rows of long sequences, many of short ones."""
    gears = (Gear((1, 8), ((1, 8),)), Gear((4, 2), ((4, 2),)))
    paddable = paddable_axes(gears, batching=True)
    assert largest_batch(gears, [(9, 2)], paddable) == 4
    assert largest_batch(gears, [(9, 5)], paddable) == 1
    assert largest_batch(gears, [(9, 9)], paddable) == 0


def test_output_axes_follow_input_axes_in_a_ratio() -> None:
    """The same position is preferred; a product of two axes follows none."""
    rules = output_rules(IMAGES, [(1, h // 4, w // 4) for h, w in ((8, 8), (16, 8), (16, 16))])
    assert rules == {1: AxisRule(0, 2, Fraction(1, 4)), 2: AxisRule(0, 3, Fraction(1, 4))}
    assert output_rules(IMAGES, [(1, h * w) for h, w in ((8, 8), (16, 8), (16, 16))]) == {1: None}
    assert output_rules(IMAGES, [(1, 10)] * 3) == {}


def test_cutting_back_rounds_up() -> None:
    """Nine rows at a quarter are three."""
    rules: dict[int, AxisRule | None] = {1: AxisRule(0, 2, Fraction(1, 4))}
    assert cut_dims((1, 4), rules, IMAGES[1], [(1, 3, 9, 8)]) == (1, 3)
    assert cut_dims((1, 4), rules, IMAGES[1], [(1, 3, 16, 8)]) == (1, 4)


def test_an_axis_that_follows_nothing_cannot_be_cut() -> None:
    """None when padded, the compiled dims when not."""
    assert cut_dims((1, 64), {1: None}, IMAGES[0], [(1, 3, 7, 8)]) is None
    assert cut_dims((1, 64), {1: None}, IMAGES[0], [(1, 3, 8, 8)]) == (1, 64)


@given(
    gears=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6, unique=True
    ),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_the_nearest_gear_holds_the_shape(
    gears: list[tuple[int, int]], shape: tuple[int, int]
) -> None:
    """And no other gear that holds it is smaller."""
    made = tuple(Gear(key, (key,)) for key in gears)
    paddable = paddable_axes(made, batching=True)
    gear = nearest(made, [shape], paddable)
    holding = [g for g in made if fits(g, [shape], paddable)]
    assert (gear is None) == (not holding)
    assume(gear is not None)
    assert gear in holding
    assert gear is not None
    assert gear.key[0] * gear.key[1] == min(g.key[0] * g.key[1] for g in holding)


@given(rows=st.integers(1, 40))
def test_rows_are_never_more_than_the_largest_gear(rows: int) -> None:
    """Cutting a batch by the largest gear, every part has a gear."""
    paddable = paddable_axes(ROWS, batching=True)
    limit = largest_batch(ROWS, [(rows, 4), (rows, 2)], paddable)
    assert limit == 8
    for start in range(0, rows, limit):
        part = min(limit, rows - start)
        assert nearest(ROWS, [(part, 4), (part, 2)], paddable) is not None
