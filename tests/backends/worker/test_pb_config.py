"""The helper of auto_complete_config: what completes, and what contradicts the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npuserve.backends.worker.pb_config import ModelConfig
from tests.backends.worker.models import served_model

X = {"name": "X", "data_type": "TYPE_FP32", "dims": [4]}


def test_fills_what_is_missing() -> None:
    """Inputs, outputs, batching and policy are added once."""
    config = ModelConfig({"name": "m", "max_batch_size": 2})
    config.set_max_batch_size(4)
    config.set_dynamic_batching()
    config.set_dynamic_batching()
    for _ in range(2):
        config.add_input(X)
        config.add_output(X)
        config.set_model_transaction_policy({"decoupled": True})
    assert config.as_dict() == {
        "name": "m", "max_batch_size": 4, "dynamic_batching": {}, "input": [X], "output": [X],
        "model_transaction_policy": {"decoupled": True},
    }  # fmt: skip


CASES: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"max_batch_size": 6}, "set_max_batch_size", 4, "specified max_batch_size 6, but in"),
    ({"sequence_batching": {}}, "set_dynamic_batching", None, "as 'sequence_batching', but"),
    ({}, "add_input", {**X, "foo": 1}, "property other than 'name', 'data_type', 'dims' and"),
    ({}, "add_output", {**X, "optional": True}, "other than 'name', 'data_type' and 'dims'"),
    ({}, "add_input", {"dims": [1]}, "is missing 'name' property"),
    ({}, "add_input", {"name": "X", "dims": [1]}, "is missing 'data_type' property"),
    ({}, "add_output", {"name": "X", "data_type": "TYPE_FP32"}, "is missing 'dims' property"),
    (
        {"input": [X]}, "add_input", {**X, "data_type": "TYPE_INT8"},
        "expects datatype TYPE_FP32 for input 'X', model provides TYPE_INT8",
    ),
    (
        {"output": [X]}, "add_output", {**X, "dims": [16]},
        r"the model expects dims \[16\] but the model configuration specifies dims \[4\]",
    ),
    ({"input": [X]}, "add_input", {**X, "optional": True}, "the model expects optional True"),
    ({}, "set_model_transaction_policy", {"foo": 1}, "property other than 'decoupled'"),
    (
        {"model_transaction_policy": {"decoupled": False}}, "set_model_transaction_policy",
        {"decoupled": True}, "already set to 'False'",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("configured", "method", "argument", "text"), CASES)
def test_contradictions(
    configured: dict[str, Any], method: str, argument: object, text: str
) -> None:
    """Every rule has Triton's text."""
    config = ModelConfig({"name": "m", **configured})
    with pytest.raises(ValueError, match=text):
        getattr(config, method)(*(() if argument is None else (argument,)))


COMPLETE = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        {body}
        return {value}

    def execute(self, requests):
        return [response(tensor(r).as_numpy()) for r in requests]
"""


@pytest.mark.parametrize("execution", ["process", "thread"])
async def test_model_completes_its_configuration(tmp_path: Path, execution: str) -> None:
    """A model without inputs in config.pbtxt declares them, in either execution."""
    tensor = "{'name': '%s', 'data_type': 'TYPE_FP32', 'dims': [-1]}"
    body = (
        f"config.add_input({tensor % 'IN'}); config.add_output({tensor % 'OUT'}); "
        "config.set_max_batch_size(4); config.set_dynamic_batching()"
    )
    code = COMPLETE.format(body=body, value="config")
    async with served_model(tmp_path, code, 'backend: "python"', execution) as models:
        config = models.server.model("m").config
    assert (config.max_batch_size, config.input[0].name, config.HasField("dynamic_batching")) == (
        4, "IN", True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "value", "reason"),
    [
        ("pass", "None", "auto_complete_config function in model 'm' must return a valid"),
        ("raise ValueError('boom')", "config", "ValueError: boom\n\nAt:\n"),
        ("os.abort()", "config", "Auto-complete failed for m"),
    ],
)
async def test_failed_completion_says_why(
    tmp_path: Path, body: str, value: str, reason: str
) -> None:
    """The reason of the failed load has Triton's text."""
    code = COMPLETE.format(body=body, value=value)
    async with served_model(tmp_path, code) as models:
        (entry,) = await models.server.repository_index()
    assert reason in entry.reason
