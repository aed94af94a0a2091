"""What users can set about the execution of Python models."""

from __future__ import annotations

import pytest

from npuserve.backends.worker.settings import WorkerSettings
from npuserve.errors import InvalidArgumentError


def test_model_comes_before_server_before_default() -> None:
    """A parameter of the model wins over --backend-config, in either spelling."""
    settings = WorkerSettings.of(
        {"execution": "thread"},
        {"execution": "process", "stub-timeout-seconds": "7", "execute_timeout_seconds": "0.5"},
    )
    assert (settings.execution, settings.start_timeout_s, settings.execute_timeout_s) == (
        "thread", 7.0, 0.5,
    )  # fmt: skip
    assert settings.finalize_timeout_s == WorkerSettings.finalize_timeout_s


@pytest.mark.parametrize(
    ("key", "value"),
    [("execution", "fiber"), ("execute_timeout_seconds", "soon"), ("stub-timeout-seconds", "-1")],
)
def test_wrong_values_name_the_setting(key: str, value: str) -> None:
    """The error says which setting, and what came."""
    with pytest.raises(InvalidArgumentError, match=f"'{value}'"):
        WorkerSettings.of({}, {key: value})
