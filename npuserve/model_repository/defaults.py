"""Defaults the server fills into a configuration before the backend sees it. Pure.

Source: Triton core src/model_config_utils.cc, GetNormalizedModelConfig,
AutoCompleteBackendFields and NormalizeModelConfig.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npuserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Collection, MutableSequence

    from npuserve.model_config import ModelConfig

ENSEMBLE = "ensemble"
_DEFAULT_SEQUENCE_IDLE_US = 1_000_000


@dataclass(frozen=True)
class _Recognised:
    """What a file of a version folder says about backend and platform."""

    file: str
    backend: str
    platform: str = ""


# In order of precedence.
_RECOGNISED = (
    _Recognised("model.savedmodel", "tensorflow", "tensorflow_savedmodel"),
    _Recognised("model.graphdef", "tensorflow", "tensorflow_graphdef"),
    _Recognised("model.plan", "tensorrt", "tensorrt_plan"),
    _Recognised("model.onnx", "onnxruntime", "onnxruntime_onnx"),
    _Recognised("model.xml", "openvino"),
    _Recognised("model.pt", "pytorch", "pytorch_libtorch"),
    _Recognised("model.pt2", "pytorch", "pytorch_aoti"),
    _Recognised("model.py", "python"),
    # Differs from Triton: it knows no Ascend models.
    _Recognised("model.om", "om"),
)

PLATFORM_BACKENDS = {row.platform: row.backend for row in _RECOGNISED if row.platform}


def complete(config: ModelConfig, version_files: Collection[str]) -> None:
    """Fill in everything that does not depend on the contents of the model's file.

    Args:
        config: changed in place; its `name` is set already.
        version_files: names in the first version folder, empty without one.

    Raises:
        InvalidArgumentError: nothing tells which backend runs the model.
    """
    if config.platform != ENSEMBLE and not config.HasField("ensemble_scheduling"):
        _complete_backend(config, version_files)
    normalize(config)


def _complete_backend(config: ModelConfig, version_files: Collection[str]) -> None:
    known = _recognise(config, version_files)
    if known:
        config.backend = config.backend or known.backend
        if config.backend == known.backend:
            config.platform = config.platform or known.platform
            config.default_model_filename = config.default_model_filename or known.file
    elif not (config.backend or config.platform or config.default_model_filename):
        _complete_from_name(config)


def _recognise(config: ModelConfig, version_files: Collection[str]) -> _Recognised | None:
    """The first row that agrees with all that is given and is hinted at by something."""
    rows = [row for row in _RECOGNISED if config.backend in ("", row.backend)]
    if config.platform:
        return next((row for row in rows if row.platform == config.platform), None)
    hints = {config.default_model_filename} if config.default_model_filename else version_files
    hinted = next((row for row in rows if row.file in hints), None)
    if hinted or not config.backend:
        return hinted
    return rows[0] if len(rows) == 1 else _by_backend(rows)


def _by_backend(rows: list[_Recognised]) -> _Recognised | None:
    """A backend with several formats says nothing about the file; pytorch has a usual one."""
    return next((row for row in rows if row.backend == "pytorch"), None)


def _complete_from_name(config: ModelConfig) -> None:
    _, dot, backend = config.name.partition(".")
    if not dot:
        raise InvalidArgumentError(
            f"Invalid model name: Could not determine backend for model '{config.name}' with no "
            "backend in model configuration. Expected model name of the form "
            "'model.<backend_name>'."
        )
    config.backend = backend
    config.default_model_filename = f"model.{backend}"


def normalize(config: ModelConfig) -> None:
    """Fill in the defaults that follow from other fields; again after a backend changed those."""
    if not config.version_policy.WhichOneof("policy_choice"):
        config.version_policy.latest.num_versions = 1
    if config.HasField("dynamic_batching"):
        _complete_preferred(config, config.dynamic_batching.preferred_batch_size)
    if config.HasField("sequence_batching"):
        _complete_sequences(config)
    if config.platform == ENSEMBLE or config.HasField("ensemble_scheduling"):
        # An ensemble shows the policy; it is decoupled when a member is.
        config.model_transaction_policy.SetInParent()
        return
    optimization = config.optimization
    for buffer in ("input_pinned_memory", "output_pinned_memory"):
        if not optimization.HasField(buffer):
            getattr(optimization, buffer).enable = True


def _complete_sequences(config: ModelConfig) -> None:
    batching = config.sequence_batching
    if batching.max_sequence_idle_microseconds == 0:
        batching.max_sequence_idle_microseconds = _DEFAULT_SEQUENCE_IDLE_US
    if batching.HasField("oldest"):
        _complete_preferred(config, batching.oldest.preferred_batch_size)


def _complete_preferred(config: ModelConfig, preferred: MutableSequence[int]) -> None:
    if not preferred and config.max_batch_size > 0:
        preferred.append(config.max_batch_size)
