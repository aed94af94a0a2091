"""The conformance kit finds backends that break a rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from npuserve.backends.base import Backend, BackendModelContext, ExecutionBatch, ModelInstance
from npuserve.response import InferenceResponse
from npuserve.tensor import Tensor
from npuserve.testing.check_backend import check_backend
from tests.backends.onnx_models import config

CONFIG = """
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: 2 }
output { name: "OUT" data_type: TYPE_FP32 dims: 2 }
"""


def make_inputs(seed: int) -> dict[str, NDArray[Any]]:
    return {"IN": np.full((1, 2), seed + 1, np.float32)}


class Doubler(ModelInstance):
    """Answers twice its input; subclasses break one rule each."""

    def execute(self, batch: ExecutionBatch) -> None:
        for request in batch.requests:
            batch.send(request, InferenceResponse([self.output(request.inputs["IN"].as_numpy())]))

    def output(self, array: NDArray[Any]) -> Tensor:
        return Tensor.from_numpy("OUT", array * 2)


class WrongType(Doubler):
    def output(self, array: NDArray[Any]) -> Tensor:
        return Tensor.from_numpy("OUT", (array * 2).astype(np.float64))


class WrongShape(Doubler):
    def output(self, array: NDArray[Any]) -> Tensor:
        return Tensor.from_numpy("OUT", array.reshape(-1))


class WritesInputs(Doubler):
    def output(self, array: NDArray[Any]) -> Tensor:
        array.setflags(write=True)
        array *= 2
        return Tensor.from_numpy("OUT", array)


class ReusesOutputs(Doubler):
    def initialize(self) -> None:
        self.memory = np.zeros((8, 2), np.float32)

    def output(self, array: NDArray[Any]) -> Tensor:
        np.multiply(array, 2, out=self.memory[: len(array)])
        return Tensor.from_numpy("OUT", self.memory[: len(array)])


class MixesRequests(Doubler):
    def execute(self, batch: ExecutionBatch) -> None:
        array = batch.requests[0].inputs["IN"].as_numpy()
        for request in batch.requests:
            batch.send(request, InferenceResponse([self.output(array)]))


class ForgetsRequests(Doubler):
    def execute(self, batch: ExecutionBatch) -> None:
        if len(batch.requests) == 1:
            super().execute(batch)


class DoublerBackend(Backend):
    def __init__(self, instance: type[ModelInstance], missing: int = 0) -> None:
        self.instance = instance
        self.missing = missing

    def load(self, context: BackendModelContext) -> Sequence[ModelInstance]:
        return [self.instance() for _ in context.placements[self.missing :]]


async def test_a_good_backend_passes(tmp_path: Path) -> None:
    """Nothing is found where nothing is wrong."""
    await check_backend(DoublerBackend(Doubler), config(CONFIG), tmp_path, make_inputs)


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        (WrongType, "wrong type"),
        (WrongShape, "does not fit the configured shape"),
        (ReusesOutputs, "later execution wrote into the outputs"),
        (MixesRequests, "answered differently than alone"),
        (ForgetsRequests, "a valid request failed"),
    ],
)
async def test_a_broken_rule_is_named(
    tmp_path: Path, instance: type[ModelInstance], message: str
) -> None:
    """The sentence says which."""
    with pytest.raises(AssertionError, match=message):
        await check_backend(DoublerBackend(instance), config(CONFIG), tmp_path, make_inputs)


async def test_writing_into_inputs_is_found(tmp_path: Path) -> None:
    """A front end may hand out memory that others read too."""
    with pytest.raises(AssertionError, match="was written to|answered differently"):
        await check_backend(DoublerBackend(WritesInputs), config(CONFIG), tmp_path, make_inputs)


async def test_a_missing_instance_is_found(tmp_path: Path) -> None:
    """One for each placement."""
    with pytest.raises((AssertionError, ValueError)):
        await check_backend(DoublerBackend(Doubler, 1), config(CONFIG), tmp_path, make_inputs)
