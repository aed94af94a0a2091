"""Rules of `batch_input` and `batch_output`. Pure.

Source: Triton core src/model_config_utils.cc (ValidateBatchIO).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npuserve._proto import model_config_pb2 as pb
from npuserve.model_config import enum_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from npuserve.model_config import ModelConfig


def check_batch_io(config: ModelConfig) -> Iterator[str]:
    """Problems of the tensors the server computes from a batch and cuts by it."""
    suffix = f" for {config.name}"
    inputs = {tensor.name for tensor in config.input}
    for item in config.batch_input:
        yield from (problem + suffix for problem in _check_batch_input(item, inputs))
    outputs = {tensor.name for tensor in config.output}
    targets: set[str] = set()
    for output in config.batch_output:
        yield from (problem + suffix for problem in _check_batch_output(output, inputs))
        for target in output.target_name:
            if target not in outputs:
                yield f"unknown target output name '{target}'{suffix}"
            if target in targets:
                yield f"target output name '{target}' can only be specified once{suffix}"
            targets.add(target)


def _check_batch_input(item: pb.BatchInput, inputs: set[str]) -> Iterator[str]:
    kind = enum_name(item, "kind")
    if item.kind not in pb.BatchInput.Kind.values():
        yield f"unknown batch input kind '{kind}'"
    elif len(item.source_input) != 1:
        yield f"batch input kind '{kind}' expects 1 source input, got {len(item.source_input)}"
    if item.data_type not in (pb.TYPE_INT32, pb.TYPE_FP32):
        yield "batch input data type must be TYPE_INT32 or TYPE_FP32"
    yield from _unknown_sources(item.source_input, inputs)


def _check_batch_output(item: pb.BatchOutput, inputs: set[str]) -> Iterator[str]:
    kind = enum_name(item, "kind")
    if item.kind not in pb.BatchOutput.Kind.values():
        yield f"unknown batch output kind '{kind}'"
    elif len(item.source_input) != 1:
        yield f"batch output kind '{kind}' expects 1 source input, got {len(item.source_input)}"
    yield from _unknown_sources(item.source_input, inputs)


def _unknown_sources(sources: Iterable[str], inputs: set[str]) -> Iterator[str]:
    for source in sources:
        if source not in inputs:
            yield f"unknown source input name '{source}'"
