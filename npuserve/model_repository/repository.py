"""What the server asks of its model repositories: scan, configuration, versions, changes.

The one door to this package. Everything blocks on files: call it in a helper thread.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from npuserve.errors import InvalidArgumentError
from npuserve.model_config import ModelConfig, config_from_json
from npuserve.model_repository import config_check, defaults, layout
from npuserve.model_repository.pbtxt import decode_config, parse_config
from npuserve.model_repository.problems import FieldLines
from npuserve.model_repository.version_policy import choose_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from npuserve.model_repository.layout import Fingerprint, ModelDirectory, Scan
    from npuserve.options import ServerOptions


class LoadedConfig(NamedTuple):
    """A configuration and where it is written.

    Attributes:
        where: what to add to a problem to say where in a file its field is; "" without a file.
    """

    config: ModelConfig
    where: Callable[[str], str]


def scan(repositories: Sequence[str], options: ServerOptions) -> Scan:
    """List the models of all repositories.

    Raises:
        InternalError: a repository does not exist.
        InvalidArgumentError: a repository is no folder.
    """
    return layout.scan_repositories(repositories, namespaces=options.model_namespacing)


def load_config(
    directory: ModelDirectory, options: ServerOptions, override_json: str | None = None
) -> LoadedConfig:
    """Read the configuration of a model, fill in what the server can know, and check it.

    Args:
        directory: from `scan`.
        options: `model_config_name` and `disable_auto_complete_config` matter.
        override_json: `config` parameter of a load request; replaces the file completely.

    Raises:
        InvalidArgumentError: unreadable, for another model, or invalid already.
    """
    layout.fetch(directory)
    if override_json is None:
        config, where = _read_config(directory, options)
    else:
        config, where = _parse_override(override_json), _nowhere
    if config.name and config.name != directory.name:
        raise InvalidArgumentError(
            f"unexpected directory name '{directory.name}' for model '{config.name}', directory "
            "name must equal model name"
        )
    config.name = directory.name
    _resolve_members(config, directory)
    defaults.complete(config, _first_version_files(directory))
    completed = options.disable_auto_complete_config or _is_complete(config)
    config_check.validate(config, directory.path, completed=completed, where=where)
    return LoadedConfig(config, where)


def validate_config(
    config: ModelConfig, directory: ModelDirectory, where: Callable[[str], str]
) -> None:
    """Refuse an invalid configuration, all problems at once.

    Args:
        config: completed by the backend.
        directory: its model.
        where: from `load_config`.

    Raises:
        InvalidArgumentError: the configuration breaks at least one rule.
    """
    config_check.validate(config, directory.path, completed=True, where=where)


def select_versions(config: ModelConfig, directory: ModelDirectory) -> list[int]:
    """Version numbers to serve, ascending; [] if the version policy leaves none."""
    return choose_versions(config, directory.versions)


def fingerprint(directory: ModelDirectory) -> Fingerprint:
    """State of the files of a model, to be compared with a later one."""
    return layout.fingerprint(directory)


def _is_complete(config: ModelConfig) -> bool:
    """Whether no backend will add anything, so that all rules can be checked at once."""
    return (
        config.max_batch_size > 0
        and bool(config.input)
        and bool(config.output)
        and all(tensor.data_type and tensor.dims for tensor in config.input)
        and all(tensor.data_type and tensor.dims for tensor in config.output)
    )


def _nowhere(_field: str) -> str:
    """Of a configuration without a file."""
    return ""


def _read_config(directory: ModelDirectory, options: ServerOptions) -> LoadedConfig:
    path = _config_path(directory, options.model_config_name)
    if not path.exists():
        if options.disable_auto_complete_config:
            raise InvalidArgumentError(
                f"configuration file {path} is missing, and --disable-auto-complete-config "
                "requires one"
            )
        return LoadedConfig(ModelConfig(), _nowhere)
    try:
        text = decode_config(path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"failed to read text proto from {path}: {error}") from error

    def where(field: str) -> str:
        line = FieldLines(text).find(field)
        return f" ({path}:{line}: {field})" if line else f" ({path}: {field})"

    return LoadedConfig(parse_config(text, os.fspath(path)), where)


def _config_path(directory: ModelDirectory, config_name: str) -> Path:
    if config_name:
        named = directory.path / "configs" / f"{config_name}.pbtxt"
        if named.exists():
            return named
    return directory.config_path


def _parse_override(text: str) -> ModelConfig:
    try:
        return config_from_json(text)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"Invalid config override: {error}") from error


def _resolve_members(config: ModelConfig, directory: ModelDirectory) -> None:
    """An ensemble means the members of its own repository where a name is ambiguous."""
    for step in config.ensemble_scheduling.step:
        if step.model_name in directory.siblings:
            step.model_name = directory.siblings[step.model_name]
            step.model_namespace = directory.repository


def _first_version_files(directory: ModelDirectory) -> list[str]:
    """Names in the first version folder (in string order, as Triton has it)."""
    folders = sorted(str(version) for version in directory.versions)
    if not folders:
        return []
    path = directory.path / folders[0]
    return sorted(entry.name for entry in path.iterdir())
