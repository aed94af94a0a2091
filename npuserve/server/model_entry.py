"""What the server knows of one model name: its versions, their states, why something failed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from npuserve.model_config import ModelConfig
    from npuserve.server.model import Model


class ModelState(StrEnum):
    """States of the repository index."""

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


@dataclass
class VersionStatus:
    """One version as the index shows it; `model` is set from READY until it was freed."""

    state: ModelState
    reason: str = ""
    model: Model | None = None


@dataclass
class ModelEntry:
    """Everything known of one model name.

    Attributes:
        failure: why no version could even be tried (configuration, version folders); "" if fine.
        explicit: loaded by name, not only as a member of an ensemble.
        fingerprint: of the directory when it was last loaded, to see that nothing changed.
        override: configuration given with the load call, "" for the file's.
        file_override: temporary model directory made of the files given with the load call.
    """

    name: str
    namespace: str = ""
    versions: dict[int, VersionStatus] = field(default_factory=dict)
    failure: str = ""
    explicit: bool = False
    config: ModelConfig | None = None
    fingerprint: object = None
    override: str = ""
    file_override: Path | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def ready_models(self) -> dict[int, Model]:
        """READY versions, ascending."""
        return {
            version: status.model
            for version, status in sorted(self.versions.items())
            if status.state is ModelState.READY and status.model is not None
        }

    @property
    def loaded(self) -> bool:
        """Whether any version is READY."""
        return any(status.state is ModelState.READY for status in self.versions.values())

    @property
    def in_use(self) -> bool:
        """Whether any version has a model, be it one that still answers its last requests."""
        return any(status.model is not None for status in self.versions.values())
