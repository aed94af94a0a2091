"""A conformance kit: `await check_backend(...)` in one test proves that a backend keeps its word.

The rules are those written in `npuserve.backends.base`. Each check is a coroutine function of
its own, named after the rule; the first rule that is broken raises AssertionError with a sentence
that says which.

    async def test_doubler_keeps_the_rules_of_a_backend(tmp_path):
        await check_backend(DoublerBackend(), config, tmp_path, make_inputs)
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.backends.base import LoopInstance, ModelInstance
from npuserve.model_config import ModelConfig, datatype_name, is_decoupled
from npuserve.tensor import Tensor, element_count
from npuserve.testing.backend_driver import Answer, BackendDriver

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from npuserve.backends.base import Backend

    MakeInputs = Callable[[int], Mapping[str, NDArray[Any]]]


@dataclass(frozen=True)
class _Subject:
    """The backend under test and a model for it; see `check_backend`."""

    backend: Backend
    config: ModelConfig
    model_dir: Path
    make_inputs: MakeInputs

    def driver(self, instances: int = 1) -> BackendDriver:
        """A driver with its own copy of the configuration, since loading completes it."""
        config = ModelConfig()
        config.CopyFrom(self.config)
        return BackendDriver(self.backend, config, self.model_dir, instances=instances)


async def check_backend(
    backend: Backend, config: ModelConfig, model_dir: Path, make_inputs: MakeInputs
) -> None:
    """Run every check against one model of the backend.

    Args:
        config: of a model that answers every request with one response (not decoupled).
        model_dir: holds the version directory `1`.
        make_inputs: seed → valid inputs of one request, different for every seed,
            `[1, *dims]` if the model batches; the model must be deterministic.

    Raises:
        AssertionError: naming the rule that is broken.
    """
    assert not is_decoupled(config), "the kit needs a model that is not decoupled"
    subject = _Subject(backend, config, model_dir, make_inputs)
    threads = threading.active_count()
    for check in CHECKS:
        await check(subject)
    left = threading.active_count() - threads
    # asyncio's helper threads stay; they are not the backend's.
    helpers = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
    assert left <= helpers, f"{left - helpers} threads are left after unload"


async def _makes_one_instance_per_placement(subject: _Subject) -> None:
    async with subject.driver(instances=2) as driver:
        for wrapper in driver.pool.instances:
            instance = wrapper.backend_instance
            assert isinstance(instance, ModelInstance | LoopInstance), (
                f"{type(instance).__name__} is neither a ModelInstance nor a LoopInstance"
            )
        (first,) = await driver.infer(subject.make_inputs(0), instance=0)
        (second,) = await driver.infer(subject.make_inputs(0), instance=1)
        _assert_same(first, second, "two instances answer the same request differently")


async def _completes_the_configuration(subject: _Subject) -> None:
    async with subject.driver() as driver:
        config = driver.context.config
        tensors: list[Any] = [*config.input, *config.output]
        for tensor in tensors:
            assert tensor.dims, f"tensor '{tensor.name}' has no dims after auto_complete"
            assert tensor.data_type, f"tensor '{tensor.name}' has no type after auto_complete"


async def _answers_every_request_once(subject: _Subject) -> None:
    async with subject.driver() as driver:
        for answer in await _infer_batch(subject, driver, 3):
            assert len(answer.responses) == 1, f"{len(answer.responses)} responses to a request"
            assert answer.finals == 1, f"{answer.finals} final responses to a request"
            assert answer.error is None, f"a valid request failed: {answer.error}"


async def _outputs_are_as_configured(subject: _Subject) -> None:
    async with subject.driver() as driver:
        (answer,) = await driver.infer(subject.make_inputs(0))
        config = driver.context.config
        outputs = {tensor.name: tensor for tensor in answer.responses[0].outputs}
        assert set(outputs) == {output.name for output in config.output}
        for output in config.output:
            tensor = outputs[output.name]
            assert tensor.datatype == datatype_name(output.data_type), f"{tensor} has a wrong type"
            dims = [*([1] if config.max_batch_size else []), *(output.reshape.shape or output.dims)]
            fits = len(dims) == len(tensor.shape) and all(
                want in (-1, got) for want, got in zip(dims, tensor.shape, strict=True)
            )
            assert fits, f"{tensor} does not fit the configured shape {dims}"
            assert element_count(tensor.shape) == tensor.as_numpy().size


async def _honours_requested_outputs(subject: _Subject) -> None:
    async with subject.driver() as driver:
        for output in driver.context.config.output:
            (answer,) = await driver.infer(subject.make_inputs(0), outputs=[output.name])
            names = [tensor.name for tensor in answer.responses[0].outputs]
            assert output.name in names, f"requested '{output.name}', got {names}"


async def _batch_equals_single_requests(subject: _Subject) -> None:
    async with subject.driver() as driver:
        together = await _infer_batch(subject, driver, 3)
        for seed, answer in enumerate(together):
            (alone,) = await driver.infer(subject.make_inputs(seed))
            _assert_same(alone, answer, "a request in a batch is answered differently than alone")


async def _leaves_inputs_alone(subject: _Subject) -> None:
    async with subject.driver() as driver:
        tensors = {n: Tensor.from_numpy(n, a) for n, a in subject.make_inputs(0).items()}
        before = {name: bytes(tensor.data) for name, tensor in tensors.items()}
        await driver.infer(tensors)
        for name, tensor in tensors.items():
            assert bytes(tensor.data) == before[name], f"input '{name}' was written to"


async def _outputs_outlive_the_next_execution(subject: _Subject) -> None:
    async with subject.driver() as driver:
        (answer,) = await driver.infer(subject.make_inputs(0))
        before = [bytes(tensor.data) for tensor in answer.responses[0].outputs]
        await _infer_batch(subject, driver, 2)
        after = [bytes(tensor.data) for tensor in answer.responses[0].outputs]
        assert before == after, "a later execution wrote into the outputs of an earlier one"


async def _survives_a_bad_request(subject: _Subject) -> None:
    async with subject.driver() as driver:
        good = subject.make_inputs(0)
        # One byte short: nothing a front end lets through, but an instance must live on.
        bad = {
            name: Tensor(name, tensor.datatype, tensor.shape, bytes(tensor.data)[:-1])
            for name, tensor in ((n, Tensor.from_numpy(n, a)) for n, a in good.items())
        }
        (failed,) = await driver.infer(bad)
        assert failed.finals == 1, "a bad request must be answered once"
        (answer,) = await driver.infer(good)
        assert answer.error is None, f"after a bad request a good one fails: {answer.error}"


async def _loads_again_after_unload(subject: _Subject) -> None:
    async with subject.driver() as driver:
        (first,) = await driver.infer(subject.make_inputs(1))
    async with subject.driver() as driver:
        (second,) = await driver.infer(subject.make_inputs(1))
    _assert_same(first, second, "loaded again, the model answers differently")


CHECKS: tuple[Callable[[_Subject], Awaitable[None]], ...] = (
    _makes_one_instance_per_placement,
    _completes_the_configuration,
    _answers_every_request_once,
    _outputs_are_as_configured,
    _honours_requested_outputs,
    _batch_equals_single_requests,
    _leaves_inputs_alone,
    _outputs_outlive_the_next_execution,
    _survives_a_bad_request,
    _loads_again_after_unload,
)


async def _infer_batch(subject: _Subject, driver: BackendDriver, count: int) -> list[Answer]:
    """Answers to the requests of seeds 0..count-1, in one batch where the model allows it."""
    requests = [subject.make_inputs(seed) for seed in range(count)]
    if driver.context.config.max_batch_size >= count:
        return await driver.infer(*requests)
    return [answer for request in requests for answer in await driver.infer(request)]


def _assert_same(one: Answer, other: Answer, broken_rule: str) -> None:
    assert one.error is None, f"a valid request failed: {one.error}"
    assert other.error is None, f"a valid request failed: {other.error}"
    for tensor in one.responses[0].outputs:
        expected, got = tensor.as_numpy(), other.array(tensor.name)
        close = (
            np.allclose(expected, got, rtol=1e-4, atol=1e-5, equal_nan=True)
            if expected.dtype.kind == "f"
            else np.array_equal(expected, got)
        )
        assert close, f"{broken_rule} (output '{tensor.name}')"
