"""Model repositories: what lies there, what the configurations say, what changed.

Knows no scheduler and no wire format. `repository.py` is the door; the rest is behind it.
"""

from npuserve.model_repository.defaults import normalize
from npuserve.model_repository.layout import Fingerprint, ModelDirectory, Scan, fetch, release
from npuserve.model_repository.pbtxt import parse_config
from npuserve.model_repository.repository import (
    LoadedConfig,
    fingerprint,
    load_config,
    scan,
    select_versions,
    validate_config,
)

__all__ = [
    "Fingerprint",
    "LoadedConfig",
    "ModelDirectory",
    "Scan",
    "fetch",
    "fingerprint",
    "load_config",
    "normalize",
    "parse_config",
    "release",
    "scan",
    "select_versions",
    "validate_config",
]
