"""`ModelConfig`: what auto_complete_config gets and gives back.

Rules and texts: Triton python_backend, src/resources/triton_python_backend_utils.py.
"""

from __future__ import annotations

import json
from typing import Any

_INPUT_KEYS = {"name", "data_type", "dims", "optional"}
_OUTPUT_KEYS = {"name", "data_type", "dims"}


class ModelConfig:
    """A model configuration to be completed; wraps the dict form of Triton's /config JSON."""

    def __init__(self, model_config: str | dict[str, Any]) -> None:
        config = json.loads(model_config) if isinstance(model_config, str) else model_config
        self._model_config: dict[str, Any] = config

    def as_dict(self) -> dict[str, Any]:
        """The configuration as a dict; changes to it count."""
        return self._model_config

    @property
    def _function(self) -> str:
        name = self._model_config.get("name", "")
        return f"auto-complete-config function for model '{name}'"

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raise max_batch_size; a larger configured value is an error."""
        configured = self._model_config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in {self._function} "
                f"specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Turn the dynamic batcher on, unless it is; another scheduler is an error."""
        for choice in ("sequence_batching", "ensemble_scheduling"):
            if choice in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{choice}', but "
                    f"{self._function} tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:
        """Add an input, or check it against the configured one of the same name."""
        self._check_keys("input", input, _INPUT_KEYS, "'name', 'data_type', 'dims' and 'optional'")
        existing = self._find("input", input["name"])
        if existing is None:
            self._model_config.setdefault("input", []).append(dict(input))
            return
        self._check_same("input", existing, input)
        if existing.get("optional", False) != input.get("optional", False):
            raise ValueError(
                f"model '{self._name}', tensor '{input['name']}': the model expects optional "
                f"{input.get('optional', False)} but the model configuration specifies optional "
                f"{existing.get('optional', False)}"
            )

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output, or check it against the configured one of the same name."""
        self._check_keys("output", output, _OUTPUT_KEYS, "'name', 'data_type' and 'dims'")
        existing = self._find("output", output["name"])
        if existing is None:
            self._model_config.setdefault("output", []).append(dict(output))
        else:
            self._check_same("output", existing, output)

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Set whether the model is decoupled; changing a configured value is an error."""
        for key in transaction_policy_dict:
            if key != "decoupled":
                raise ValueError(
                    f"model transaction property in {self._function} contains property other "
                    "than 'decoupled'."
                )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        wanted = transaction_policy_dict["decoupled"]
        if "decoupled" in policy and policy["decoupled"] != wanted:
            raise ValueError(
                "trying to change decoupled property in auto-complete-config for model "
                f"'{self._name}', which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = wanted

    @property
    def _name(self) -> str:
        name: str = self._model_config.get("name", "")
        return name

    def _find(self, field: str, name: str) -> dict[str, Any] | None:
        for entry in self._model_config.get(field, ()):
            if entry["name"] == name:
                found: dict[str, Any] = entry
                return found
        return None

    def _check_keys(self, what: str, entry: dict[str, Any], allowed: set[str], listed: str) -> None:
        name = entry.get("name")
        for key in entry:
            if key not in allowed:
                raise ValueError(
                    f"{what} '{name}' in {self._function} contains property other than {listed}."
                )
        if name is None:
            raise ValueError(f"{what} in {self._function} is missing 'name' property.")
        for key in ("data_type", "dims"):
            if key not in entry:
                raise ValueError(
                    f"{what} '{name}' in {self._function} is missing '{key}' property."
                )

    def _check_same(self, what: str, existing: dict[str, Any], entry: dict[str, Any]) -> None:
        configured = existing.get("data_type", "TYPE_INVALID")
        if configured in ("", "TYPE_INVALID"):
            existing["data_type"] = entry["data_type"]
        elif configured != entry["data_type"]:
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype "
                f"{configured} for {what} '{entry['name']}', model provides {entry['data_type']}"
            )
        dims = [int(dim) for dim in existing.get("dims", ())]
        if not dims:
            existing["dims"] = list(entry["dims"])
        elif dims != [int(dim) for dim in entry["dims"]]:
            raise ValueError(
                f"model '{self._name}', tensor '{entry['name']}': the model expects dims "
                f"{list(entry['dims'])} but the model configuration specifies dims {dims}"
            )
