"""Fixtures of the backends' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from npuserve.testing.simulator import simulate
from npuserve.testing.simulator.runtime import Runtime


@pytest.fixture
def machine() -> Iterator[Runtime]:
    """Two cards with modelled time; whatever the test leaks fails it."""
    with simulate(cards=2, time="modelled") as runtime:
        yield runtime
    assert not runtime.leaks() + runtime.violations
