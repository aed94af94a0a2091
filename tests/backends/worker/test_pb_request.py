"""`InferenceRequest` as a model makes it: what its constructor takes, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from npuserve.backends.worker.pb_request import (
    TRITONSERVER_MEMORY_CPU,
    InferenceRequest,
    InferenceTrace,
    PreferredMemory,
)
from npuserve.backends.worker.pb_tensor import Tensor, TritonModelException

IN = Tensor("IN", np.zeros(1, np.float32))


def _make(**fields: Any) -> InferenceRequest:
    arguments: dict[str, Any] = {
        "model_name": "m",
        "requested_output_names": ["OUT"],
        "inputs": [IN],
        **fields,
    }
    return InferenceRequest(**arguments)


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": 5},
        {"model_name": 5},
        {"requested_output_names": [5]},
        {"requested_output_names": "OUT"},
        {"inputs": [5]},
        {"correlation_id": -1},
        {"correlation_id": 1 << 64},
        {"flags": "x"},
        {"flags": -1},
        {"flags": 1 << 32},
        {"timeout": -1},
        {"timeout": 1.5},
        {"timeout": 1 << 64},
        {"model_version": "1"},
        {"model_version": 1.0},
        {"model_version": 1 << 63},
        {"priority": -1},
        {"preferred_memory": 5},
        {"trace": 5},
        {"requested_output_names": [None]},
        {"correlation_id": None},
    ],
    ids=str,
)
def test_refuses_other_types_and_values_out_of_range(fields: dict[str, Any]) -> None:
    """What Triton's constructor refuses is a TypeError, before anything is sent."""
    with pytest.raises(TypeError, match="incompatible|must hold"):
        _make(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"inputs": [None]}, "Input tensor for request with id '' and model name 'm'"),
        ({"correlation_id": 1.5}, "Correlation ID must be integer or string"),
        ({"parameters": [1]}, "Expect dict"),
        ({"parameters": {1: 2}}, "Expect parameters keys to have type str"),
        ({"parameters": {"a": None}}, "Expect parameters values to have type"),
        ({"parameters": {"a": 1 << 63}}, "to fit 64 bits"),
    ],
    ids=str,
)
def test_refuses_with_the_text_of_triton(fields: dict[str, Any], text: str) -> None:
    """The errors that the C++ code makes itself are TritonModelException."""
    with pytest.raises(TritonModelException, match=text):
        _make(**fields)


def test_keeps_the_limits() -> None:
    """The greatest values, and everything optional, are kept as they are."""
    request = _make(
        correlation_id=(1 << 64) - 1,
        flags=(1 << 32) - 1,
        timeout=(1 << 64) - 1,
        model_version=-1,
        preferred_memory=PreferredMemory(TRITONSERVER_MEMORY_CPU),
        trace=InferenceTrace(),
    )
    assert request.correlation_id() == request.timeout() == (1 << 64) - 1
    assert request.flags() == (1 << 32) - 1
    request.set_flags(np.int32(3))  # type: ignore[arg-type]
    assert type(request.flags()) is int
    with pytest.raises(TypeError):
        request.set_flags("x")  # type: ignore[arg-type]


def test_preferred_memory_wants_a_kind() -> None:
    """A number is no kind of memory."""
    with pytest.raises(TypeError):
        PreferredMemory(0)  # type: ignore[arg-type]
