"""Which versions of a model to serve. Pure."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npuserve.model_config import ModelConfig

log = logging.getLogger(__name__)


def choose_versions(config: ModelConfig, present: Iterable[int]) -> list[int]:
    """The versions the policy of `config` serves, ascending; [] if none is left.

    Args:
        config: only `name` and `version_policy` are read; without a policy the newest is served.
        present: version numbers the model folder has.

    Source: Triton core src/model_repository_manager.cc, VersionsToLoad.
    """
    versions = sorted(present)
    policy = config.version_policy
    kind = policy.WhichOneof("policy_choice")
    if kind == "specific":
        versions = _specific(config.name, list(policy.specific.versions), versions)
    elif kind != "all":
        versions = versions[-max(policy.latest.num_versions, 1) :]
    return versions


def _specific(name: str, wanted: list[int], present: list[int]) -> list[int]:
    for version in wanted:
        if version not in present:
            log.error(
                "version %d is specified for model '%s', but the version directory is not present",
                version,
                name,
            )
    return [version for version in present if version in wanted]
