"""The codec of the worker's channel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.backends.worker import wire
from npuserve.tensor import DataType

_sizes = st.integers(0, 2**40)
_references = st.tuples(_sizes, _sizes, _sizes, _sizes)
_shapes = st.lists(_sizes, max_size=4).map(tuple)
_tensors = st.tuples(st.text(), st.integers(0, 14), _shapes, st.one_of(st.binary(), _references))
_errors = st.one_of(st.none(), st.tuples(st.integers(0, 7), st.text()))
_responses = st.tuples(st.lists(_tensors), st.one_of(st.none(), st.text()), _errors)
_outcomes = st.one_of(st.none(), st.just(wire.RESCHEDULE), _responses)
_payloads = st.one_of(
    st.none(),
    st.tuples(_sizes, _sizes, _sizes, st.lists(_outcomes), _errors),
    st.dictionaries(st.text(), st.one_of(st.text(), st.booleans())),
)
_memory = st.one_of(
    st.none(), st.tuples(_shapes, st.lists(st.tuples(_sizes, _sizes)).map(tuple), _shapes)
)


@given(kind=st.sampled_from(sorted(wire.KINDS)), memory=_memory, payload=_payloads)
def test_message_comes_back(kind: int, memory: Any, payload: Any) -> None:
    """unpack(pack(message)) is the message."""
    assert wire.unpack(wire.pack(kind, memory, payload)) == (kind, memory, payload)


@given(st.binary())
def test_other_bytes_are_refused(data: bytes) -> None:
    """Bytes that are no message raise WireError and nothing else."""
    with pytest.raises(wire.WireError):
        wire.unpack(data)


def test_bytes_that_promise_a_huge_message_cost_nothing() -> None:
    """Their length is not believed."""
    with pytest.raises(wire.WireError):
        wire.unpack(b"(" + (2**31 - 1).to_bytes(4, "little"))


@given(payload=_payloads, cut=st.integers(1, 20))
def test_cut_message_is_refused(payload: Any, cut: int) -> None:
    """A message without its end is no message."""
    with pytest.raises(wire.WireError):
        wire.unpack(wire.pack(wire.EXECUTE, None, payload)[:-cut])


@pytest.mark.parametrize(
    "array", [np.arange(3, dtype=np.float16), np.zeros((0, 2)), np.array(True)]
)
def test_arrays_travel_as_their_bytes(array: np.ndarray[Any, Any]) -> None:
    """A contiguous array needs no conversion."""
    assert wire.unpack(wire.pack(wire.RESULT, None, array))[2] == array.tobytes()


def test_codes_are_those_of_the_configuration() -> None:
    """Every datatype has a code."""
    assert set(DataType) == set(wire.DATATYPES[1:])
