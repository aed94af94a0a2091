"""Rules of `batch_input` and `batch_output`. Pure.

Source: Triton core src/model_config_utils.cc (ValidateBatchIO).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npuserve._proto import model_config_pb2 as pb
from npuserve.model_config import enum_name
from npuserve.model_repository.problems import Problem, under

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from npuserve.model_config import ModelConfig


def check_batch_io(config: ModelConfig) -> Iterator[Problem]:
    """Problems of the tensors the server computes from a batch and cuts by it."""
    suffix = f" for {config.name}"
    inputs = {tensor.name for tensor in config.input}
    for index, item in enumerate(config.batch_input):
        texts = [text + suffix for text in _check_batch_input(item, inputs)]
        yield from under(f"batch_input[{index}]", texts)
    outputs = {tensor.name for tensor in config.output}
    targets: set[str] = set()
    for index, output in enumerate(config.batch_output):
        field = f"batch_output[{index}]"
        texts = [text + suffix for text in _check_batch_output(output, inputs)]
        yield from under(field, texts)
        for target in output.target_name:
            if target not in outputs:
                yield Problem(field, f"unknown target output name '{target}'{suffix}")
            if target in targets:
                text = f"target output name '{target}' can only be specified once{suffix}"
                yield Problem(field, text)
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
