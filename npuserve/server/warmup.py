"""Warm-up: runs the samples of `model_warmup` on every instance before the model is READY.

The batches bypass the scheduler, so that each instance gets its share; they are counted in the
statistics like any other.

Source: Triton core src/backend_model.cc, WarmUpData.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.backends.base import settle
from npuserve.errors import InvalidArgumentError, InvalidConfigError, NpuserveError
from npuserve.model_config import datatype_name
from npuserve.request import InferenceRequest
from npuserve.tensor import (
    ITEM_SIZE,
    NUMPY_DTYPE,
    Buffer,
    Tensor,
    deserialize_bytes,
    element_count,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from npuserve.response import InferenceResponse
    from npuserve.server.instance import Instance
    from npuserve.server.model import Model
    from npuserve.server.statistics import ModelStatistics


async def run_warmup(model: Model) -> None:
    """Run all samples, one after the other, each on all instances side by side.

    Raises:
        InvalidConfigError: a sample's data cannot be made, or are no request for the model.
        InvalidArgumentError: the model failed on a sample; the code is Triton's.
    """
    for index, sample in enumerate(model.config.model_warmup):
        if not sample.batch_size:
            continue
        try:
            inputs = await _sample_request(model, sample)
        except InvalidArgumentError as error:
            raise InvalidConfigError(str(error), f"model_warmup[{index}]") from error
        for _ in range(sample.count or 1):
            runs = [
                _WarmupBatch(model, sample.batch_size, inputs).run(instance)
                for instance in model.pool.instances
            ]
            failures = [errors for errors in await asyncio.gather(*runs) if errors]
            if failures:
                raise _failure(sample, *failures[0])
            await model.pool.wait_idle()


async def _sample_request(model: Model, sample: Any) -> list[Tensor]:
    """The inputs as the model gets them, checked like those of any request.

    What is no input of the configuration goes to the model as it is, such as the controls of a
    sequence.
    """
    if sample.batch_size > max(model.max_batch_size, 1):
        raise _failure(
            sample,
            f"batch size {sample.batch_size} for '{model.name}', "
            f"max allowed is {model.max_batch_size}",
        )
    own = model.validator.inputs
    batched = frozenset(own if model.max_batch_size > 0 else ())
    inputs = await asyncio.to_thread(sample_inputs, sample, model.context.model_dir, batched)
    by_name = {tensor.name: tensor for tensor in inputs if tensor.name in own}
    request = InferenceRequest(model.name, by_name, _nobody_waits)
    model.validator.check(request)
    return [*request.inputs.values(), *(tensor for tensor in inputs if tensor.name not in own)]


def _nobody_waits(response: InferenceResponse | None, final: bool) -> None:
    """The request is only checked."""


def _failure(sample: Any, *errors: object) -> InvalidArgumentError:
    reasons = "".join(f"{error}; " for error in errors)
    return InvalidArgumentError(f"failed to run warmup sample '{sample.name}': {reasons}")


class _WarmupBatch:
    """One execution of a sample: `batch_size` requests of one batch element each."""

    def __init__(self, model: Model, batch_size: int, inputs: list[Tensor]) -> None:
        self._statistics: ModelStatistics = model.statistics
        self._ended = asyncio.get_running_loop().create_future()
        self._open = batch_size
        self._errors: list[NpuserveError] = []
        self._requests = [self._request(model, inputs) for _ in range(batch_size)]

    async def run(self, instance: Instance) -> list[NpuserveError]:
        """Execute on this instance; returns the errors that came."""
        now_ns = time.monotonic_ns()
        for request in self._requests:
            request.start_ns = request.queue_ns = now_ns
        self._statistics.pending += len(self._requests)
        instance.run(self._requests, len(self._requests))
        await self._ended
        return self._errors

    def _request(self, model: Model, inputs: list[Tensor]) -> InferenceRequest:
        request = InferenceRequest(
            model.name, {tensor.name: tensor for tensor in inputs}, self._answered
        )
        request.model = model
        request.batch_size = 1 if model.max_batch_size > 0 else 0
        return request

    def _answered(self, response: InferenceResponse | None, final: bool) -> None:
        if response is not None and response.error is not None:
            self._errors.append(response.error)
        if final:
            self._open -= 1
            if not self._open:
                settle(self._ended, None)


def sample_inputs(sample: Any, model_dir: Path, batched: Collection[str]) -> list[Tensor]:
    """The tensors of one ModelWarmup message; reads files, so it may block.

    Args:
        sample: the message.
        model_dir: where the files are.
        batched: inputs that get a batch dimension of 1 in front of the dims.

    Raises:
        InvalidArgumentError: the sample is incomplete or its file does not fit.
    """
    tensors = []
    for name in sorted(sample.inputs):
        settings = sample.inputs[name]
        datatype = datatype_name(settings.data_type)
        if settings.WhichOneof("input_data_type") is None or datatype not in NUMPY_DTYPE:
            raise InvalidArgumentError(
                f"warmup setting expects input '{name}' to have input_data_type set"
            )
        if any(dim < 0 for dim in settings.dims):
            raise InvalidArgumentError(
                "warmup setting expects all variable-size dimensions are specified for input "
                f"'{name}'"
            )
        shape = [1, *settings.dims] if name in batched else list(settings.dims)
        data = _data(settings, sample.name, datatype, element_count(shape), model_dir)
        tensors.append(Tensor(name, datatype, shape, data))
    return tensors


def _data(settings: Any, sample: str, datatype: str, count: int, model_dir: Path) -> Buffer:
    if settings.WhichOneof("input_data_type") == "input_data_file":
        return _file_data(settings.input_data_file, sample, datatype, count, model_dir)
    if settings.random_data and datatype != "BYTES":
        return _random_data(datatype, count)
    # Zeros; for text that is a length of 0 for every element.
    return bytes(count * ITEM_SIZE.get(datatype, 4))


def _random_data(datatype: str, count: int) -> bytes:
    generator = np.random.default_rng()
    if datatype == "BF16":  # the upper half of random FP32 values
        bits = generator.random(count, np.float32).view(np.uint32) >> np.uint32(16)
        return bits.astype("<u2").tobytes()
    dtype = NUMPY_DTYPE[datatype]
    if dtype.kind == "f":
        return generator.random(count).astype(dtype).tobytes()
    if dtype.kind == "b":
        return generator.integers(0, 2, count).astype(dtype).tobytes()
    limits = np.iinfo(dtype)
    return generator.integers(
        limits.min, limits.max, count, dtype=dtype.newbyteorder("="), endpoint=True
    ).tobytes()


def _file_data(file: str, sample: str, datatype: str, count: int, model_dir: Path) -> bytes:
    try:
        data = Path(model_dir, "warmup", file).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"failed to read the data of warmup sample '{sample}' from {file}: {error.strerror}"
        ) from error
    if datatype == "BYTES":
        try:
            deserialize_bytes(data, count)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"warmup sample '{sample}', {file}: {error}") from error
        return data
    size = count * ITEM_SIZE[datatype]
    if len(data) < size:
        raise InvalidArgumentError(
            f"warmup setting expects {size} bytes, but the data provided from {file}"
            f"only has {len(data)} bytes"
        )
    return data[:size]
