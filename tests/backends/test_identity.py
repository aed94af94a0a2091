"""The identity backend: the template must keep every rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from numpy.typing import NDArray

from npuserve.backends.identity import IdentityBackend
from npuserve.errors import InvalidArgumentError
from npuserve.model_config import ModelConfig
from npuserve.testing.backend_driver import BackendDriver
from npuserve.testing.check_backend import check_backend

CONFIG = """
name: "m" max_batch_size: 8
input { name: "A" data_type: TYPE_FP32 dims: 2 }
input { name: "B" data_type: TYPE_STRING dims: 1 }
output { name: "C" data_type: TYPE_FP32 dims: 2 }
output { name: "D" data_type: TYPE_STRING dims: 1 }
"""


def _config(text: str) -> ModelConfig:
    config: ModelConfig = text_format.Parse(text, ModelConfig())
    return config


def _inputs(seed: int) -> dict[str, NDArray[Any]]:
    return {
        "A": np.full((1, 2), seed, np.float32),
        "B": np.array([[f"row {seed}".encode()]], np.object_),
    }


async def test_keeps_the_rules_of_a_backend(tmp_path: Path) -> None:
    """The conformance kit finds nothing."""
    await check_backend(IdentityBackend(), _config(CONFIG), tmp_path, _inputs)


async def test_refuses_unequal_numbers_of_tensors(tmp_path: Path) -> None:
    """Two inputs cannot go to one output."""
    config = _config(CONFIG)
    del config.output[1]
    driver = BackendDriver(IdentityBackend(), config, tmp_path)
    with pytest.raises(InvalidArgumentError, match="2 inputs and 1 outputs"):
        await driver.__aenter__()


async def test_refuses_a_delay_that_is_no_number(tmp_path: Path) -> None:
    """A wrong parameter fails the load and names itself."""
    config = _config(CONFIG)
    config.parameters["execute_delay_ms"].string_value = "soon"
    driver = BackendDriver(IdentityBackend(), config, tmp_path)
    with pytest.raises(InvalidArgumentError, match="execute_delay_ms .* 'soon'"):
        await driver.__aenter__()


async def test_a_delay_makes_a_batch_last(tmp_path: Path) -> None:
    """compute_infer of the statistics holds the delay."""
    config = _config(CONFIG)
    config.parameters["execute_delay_ms"].string_value = "5"
    async with BackendDriver(IdentityBackend(), config, tmp_path) as driver:
        await driver.infer(_inputs(0))
        assert driver.pool.statistics.compute_infer.ns >= 5_000_000
