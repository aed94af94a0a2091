"""Custom batching: Python hooks that decide which requests may join a batch.

A model brings a file `batchstrategy.py` (in its version folder or its model folder, or named by the
parameter TRITON_BATCH_STRATEGY_PATH) with any of these functions, which are the hooks of Triton's
custom batching library:

    def model_batcher_initialize(model_config): ...      # once; returns the `batcher`
    def model_batcher_finalize(batcher): ...             # once, when the model is unloaded
    def batch_initialize(batcher): ...                   # for every batch; returns its `state`
    def batch_include_request(request, state): ...       # may this request join? bool
    def batch_finalize(state): ...                       # for every batch

# Differs from Triton: hooks are Python, not a shared library. A batch is planned anew whenever
# something changes, so `state` belongs to one look at the queue. All but the first hook run on the
# event loop and must be quick.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.errors import InvalidArgumentError, InvalidConfigError
from npuserve.model_config import config_to_dict

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from npuserve.model_config import ModelConfig

logger = logging.getLogger(__name__)

_PARAMETER = "TRITON_BATCH_STRATEGY_PATH"
_FILE_NAME = "batchstrategy.py"


class BatchStrategy:
    """The hooks of one model version.

    A hook that raises is logged, as a bug of the model's author must not stop the queue.
    """

    def __init__(self, module: ModuleType, config: ModelConfig) -> None:
        self._batch_initialize = getattr(module, "batch_initialize", None)
        self._include = getattr(module, "batch_include_request", None)
        self._batch_finalize = getattr(module, "batch_finalize", None)
        self._finalize = getattr(module, "model_batcher_finalize", None)
        initialize = getattr(module, "model_batcher_initialize", None)
        self._batcher: Any = initialize(config_to_dict(config)) if initialize else None

    def begin(self) -> Any:
        """State of a batch that is about to be planned."""
        return _run(self._batch_initialize, self._batcher)

    def includes(self, request: Any, state: Any) -> bool:
        """Whether the request may join; one that raises ends the batch."""
        return self._include is None or bool(_run(self._include, request, state))

    def end(self, state: Any) -> None:
        """The batch is planned."""
        _run(self._batch_finalize, state)

    def close(self) -> None:
        """The model is unloaded."""
        _run(self._finalize, self._batcher)


def _run(hook: Callable[..., Any] | None, *arguments: Any) -> Any:
    """What the hook returns; None without one, or if it raises."""
    if hook is None:
        return None
    try:
        return hook(*arguments)
    except Exception:
        logger.exception("the batching hook %s failed", getattr(hook, "__name__", hook))
        return None


def find_strategy(config: ModelConfig, model_dir: Path, version: int) -> Path | None:
    """The file with the model's hooks, None without one.

    Raises:
        InvalidConfigError: the parameter names a file that is not there, lies outside of the
            model repository, or is no Python file.
    """
    if _PARAMETER not in config.parameters:
        candidates = (model_dir / str(version) / _FILE_NAME, model_dir / _FILE_NAME)
        return next((path for path in candidates if path.is_file()), None)
    path = Path(model_dir, config.parameters[_PARAMETER].string_value)
    if not path.resolve().is_relative_to(model_dir.parent.resolve()):
        text = "Batching library path escapes model repository."
        raise InvalidConfigError.of_parameter(_PARAMETER, text)
    if not path.is_file():
        text = f"Batching library path not found: {path}"
        raise InvalidConfigError.of_parameter(_PARAMETER, text)
    if path.suffix != ".py":
        raise InvalidConfigError.of_parameter(
            _PARAMETER,
            f"{path.name} is a compiled batching library; write its hooks in Python, in a file "
            f"{_FILE_NAME}",
        )
    return path


def load_strategy(config: ModelConfig, model_dir: Path, version: int) -> BatchStrategy | None:
    """The hooks of a model version, None without any.

    Raises:
        InvalidArgumentError: see `find_strategy`; or the file or its initialisation failed.
    """
    path = find_strategy(config, model_dir, version)
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location(f"batchstrategy_{config.name}_{version}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return BatchStrategy(module, config)
    except Exception as error:
        raise InvalidArgumentError(f"the batching hooks in {path} failed: {error!r}") from error
