"""Rules of an ensemble that need nobody else's configuration. Pure.

What depends on the composing models is checked when they are known.
Source: Triton core src/model_config_utils.cc (ValidateEnsembleSchedulingConfig).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npuserve.model_repository.defaults import ENSEMBLE
from npuserve.model_repository.problems import Problem, under

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npuserve._proto import model_config_pb2 as pb
    from npuserve.model_config import ModelConfig


def check_ensemble(config: ModelConfig) -> Iterator[Problem]:
    """Problems of the ensemble, and of any other model that has something of one."""
    name = config.name
    scheduled = config.HasField("ensemble_scheduling")
    if config.platform != ENSEMBLE:
        if scheduled:
            yield Problem(
                "ensemble_scheduling",
                f"ensemble scheduling cannot be set for model '{name}' whose platform is not "
                "ensemble",
            )
        return
    if not scheduled:
        text = f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble"
        yield Problem("platform", text)
    if config.instance_group:
        text = f"instance group should not be specified for ensemble '{name}'"
        yield Problem("instance_group", text)
    if config.HasField("optimization"):
        text = f"optimization should not be specified for ensemble '{name}'"
        yield Problem("optimization", text)
    if config.model_warmup:
        yield Problem("model_warmup", f"model_warmup can not be specified for ensemble '{name}'")
    if not scheduled:
        return
    if not config.ensemble_scheduling.step:
        yield Problem("ensemble_scheduling", f"must specify 'step' for ensemble '{name}'")
        return
    problems = list(_check_steps(config))
    yield from problems
    if not problems:
        yield from under("ensemble_scheduling", _check_connections(config))


def _check_steps(config: ModelConfig) -> Iterator[Problem]:
    written: set[str] = set()
    for index, step in enumerate(config.ensemble_scheduling.step):
        field = f"ensemble_scheduling.step[{index}]"
        for required in ("model_name", "input_map", "output_map"):
            if not getattr(step, required):
                text = f"must specify '{required}' in step {index} of ensemble '{config.name}'"
                yield Problem(field, text)
        for tensor in step.output_map.values():
            if tensor in written:
                yield Problem(
                    f"{field}.output_map",
                    f"ensemble tensor '{tensor}' can appear in an output map only once for "
                    f"ensemble '{config.name}' step {index}",
                )
            written.add(tensor)


def _check_connections(config: ModelConfig) -> Iterator[str]:
    """Every tensor is used, every output can be computed from the inputs."""
    name = config.name
    steps = config.ensemble_scheduling.step
    inputs = [tensor.name for tensor in config.input]
    outputs = [tensor.name for tensor in config.output]
    read = {tensor for step in steps for tensor in step.input_map.values()}
    written = {tensor for step in steps for tensor in step.output_map.values()}
    for tensor in inputs:
        if tensor not in read:
            yield f"ensemble input '{tensor}' for ensemble {name}' is not used"
    for tensor in outputs:
        if tensor not in read and tensor not in written:
            yield f"ensemble output '{tensor}' for ensemble {name}' is not used"
    yield from _check_written(config, set(inputs))
    for tensor in sorted(written - read - set(outputs)):
        yield f"ensemble tensor '{tensor}' is unused in ensemble '{name}'"


def _check_written(config: ModelConfig, available: set[str]) -> Iterator[str]:
    """Walk the steps as data would and name the outputs nothing reaches."""
    pending = list(config.ensemble_scheduling.step)
    while True:
        runnable = [step for step in pending if available.issuperset(step.input_map.values())]
        if not runnable:
            break
        for step in runnable:
            available.update(step.output_map.values())
            pending.remove(step)
    for output in config.output:
        if output.name not in available:
            yield (
                f"output '{output.name}' for ensemble '{config.name}' is not written"
                f"{_missing_dependency(output.name, pending, available)}"
            )


def _missing_dependency(
    output: str, stuck: list[pb.ModelEnsembling.Step], available: set[str]
) -> str:
    for step in stuck:
        if output in step.output_map.values():
            missing = sorted(set(step.input_map.values()) - available)
            return f": at least one of its depending tensors, '{missing[0]}', is not connected"
    return ""
