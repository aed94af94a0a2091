"""What users can set about the execution of Python models.

Each setting is a `parameters` entry of config.pbtxt, or for all models
`--backend-config=python,<key>=<value>`; there the words may be joined by `-` as Triton's are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from npuserve.errors import InvalidConfigError


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of one model.

    Attributes:
        execution: "process" or "thread".
        start_timeout_s: for a worker's process to come up (Triton's stub-timeout-seconds).
        initialize_timeout_s: for importing model.py and `initialize`; 0 for no limit.
        execute_timeout_s: for one batch; 0 for no limit. The worker is ended and restarted.
        finalize_timeout_s: for `finalize`; the worker is ended after it.
        async_batches: batches that may overlap in one instance with `async def execute`.
    """

    execution: str = "process"
    start_timeout_s: float = 30.0
    initialize_timeout_s: float = 0.0
    execute_timeout_s: float = 0.0
    finalize_timeout_s: float = 10.0
    async_batches: int = 64

    @classmethod
    def of(
        cls, parameters: Mapping[str, str], backend_options: Mapping[str, str]
    ) -> WorkerSettings:
        """Read the settings; the model's own come before the server's.

        Raises:
            InvalidConfigError: a value is not what it should be.
        """
        lookup = _Lookup(parameters, backend_options)
        key, execution = lookup.text("execution", cls.execution)
        if execution not in ("process", "thread"):
            raise InvalidConfigError.of_parameter(
                key,
                f"execution of a Python model must be 'process' or 'thread', not '{execution}'",
            )
        return cls(
            execution,
            lookup.number("stub_timeout_seconds", cls.start_timeout_s),
            lookup.number("initialize_timeout_seconds", cls.initialize_timeout_s),
            lookup.number("execute_timeout_seconds", cls.execute_timeout_s),
            lookup.number("finalize_timeout_seconds", cls.finalize_timeout_s),
            max(1, int(lookup.number("async_batches", cls.async_batches))),
        )


class _Lookup:
    def __init__(self, parameters: Mapping[str, str], options: Mapping[str, str]) -> None:
        self._sources = (parameters, options)

    def text(self, key: str, default: str) -> tuple[str, str]:
        """(key as it is written there, value)."""
        for source in self._sources:
            for spelling in (key, key.replace("_", "-")):
                if spelling in source:
                    return spelling, source[spelling]
        return key, default

    def number(self, key: str, default: float) -> float:
        spelling, text = self.text(key, "")
        if not text:
            return default
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if value < 0:
            raise InvalidConfigError.of_parameter(
                spelling, f"{key} must be a number of at least 0, not '{text}'"
            )
        return value
