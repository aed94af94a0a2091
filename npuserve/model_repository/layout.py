"""What lies in a model repository: models, their versions, their files. Nothing is parsed.

    <repository>/<model>/config.pbtxt
    <repository>/<model>/<version>/<model file>

A repository in a cloud is listed the same way; its models have local copies (cloud.py).
Links are followed everywhere, so that Kubernetes volumes (`config.pbtxt -> ..data/config.pbtxt`)
and linked model folders work. All functions block on the file system.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from npuserve.errors import InternalError, InvalidArgumentError
from npuserve.model_repository.cloud import cloud_repository, release_copy
from npuserve.model_repository.cloud_location import scheme_of
from npuserve.model_repository.file_override import remove_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

log = logging.getLogger(__name__)

CONFIG_FILE = "config.pbtxt"
DUPLICATE = "model appears in two or more repositories"

# Folders of a model that have a meaning of their own and are no versions.
_RESERVED_FOLDERS = frozenset({"warmup", "initial_state", "configs"})
# Written while models run; a change there is no change of the model.
_GENERATED = frozenset({"__pycache__"})


@dataclass(frozen=True)
class ModelDirectory:
    """One model as the file system has it.

    Attributes:
        name: folder name, which is the name of the model.
        path: the folder; for a model in a cloud, of the local copy that `fetch` makes.
        versions: version numbers present, ascending.
        repository: the repository as the command line names it.
        siblings: with namespaces, identifiers of the models of the same repository whose bare
            names are ambiguous, by bare name.
    """

    name: str
    path: Path
    versions: tuple[int, ...]
    repository: str
    siblings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_path(cls, name: str, path: Path, repository: str = "") -> ModelDirectory:
        """Look at one model folder; outside of a repository the last is ""."""
        return cls(name, path, tuple(sorted(_versions_in(path))), repository)

    @property
    def config_path(self) -> Path:
        """Where the configuration is unless `--model-config-name` says otherwise."""
        return self.path / CONFIG_FILE

    def version_path(self, version: int) -> Path:
        """Folder of one version."""
        return self.path / str(version)


@dataclass(frozen=True)
class Scan:
    """Result of one look at all repositories.

    Attributes:
        models: by identifier, which is the name, or `<repository>::<name>` if namespaces are on
            and the name alone is ambiguous; servable as far as the file system can tell.
        problems: name to reason, for models that are there and cannot be served.
        ambiguous: name to identifiers, for names that several repositories have.
    """

    models: dict[str, ModelDirectory]
    problems: dict[str, str] = field(default_factory=dict)
    ambiguous: dict[str, tuple[str, ...]] = field(default_factory=dict)


# Modification time (ns, or what a cloud has for it) and size in bytes.
FileState = tuple[int | str, int]


@dataclass(frozen=True)
class Fingerprint:
    """State of the files of a model; equal fingerprints mean nothing changed.

    Attributes:
        config: state of the configuration files: (modification time, bytes).
        files: state of all other files, by path in the model folder.
    """

    config: Mapping[str, FileState]
    files: Mapping[str, FileState]


def scan_repositories(repositories: Sequence[str], namespaces: bool = False) -> Scan:
    """List the models of several repositories.

    Args:
        repositories: paths and cloud URLs; a repeated one counts once.
        namespaces: serve models of one name in several repositories (`--model-namespacing`).

    Raises:
        InternalError: a repository does not exist.
        InvalidArgumentError: a repository is no folder.
    """
    by_name: dict[str, list[ModelDirectory]] = {}
    for repository in dict.fromkeys(repositories):
        models_in = _models_in_cloud if scheme_of(repository) else _models_in
        for directory in models_in(repository):
            by_name.setdefault(directory.name, []).append(directory)
    unique = {name: found[0] for name, found in by_name.items() if len(found) == 1}
    several = {name: found for name, found in by_name.items() if len(found) > 1}
    if namespaces and several:
        return _with_namespaces(unique, several)
    for name in several:
        _warn_once(f"failed to poll model '{name}': not unique across all model repositories")
    return Scan(unique, dict.fromkeys(several, DUPLICATE))


def _with_namespaces(
    unique: dict[str, ModelDirectory], several: dict[str, list[ModelDirectory]]
) -> Scan:
    models = dict(unique)
    siblings: dict[str, dict[str, str]] = {}
    for name, found in several.items():
        for directory in found:
            # Differs from Triton: there a model whose name is ambiguous cannot be asked for at
            # all; here its identifier serves as the name.
            identifier = f"{directory.repository.rstrip('/')}::{name}"
            models[identifier] = directory
            siblings.setdefault(directory.repository, {})[name] = identifier
    return Scan(
        models={
            key: replace(directory, siblings=siblings.get(directory.repository, {}))
            for key, directory in models.items()
        },
        ambiguous={
            name: tuple(siblings[directory.repository][name] for directory in found)
            for name, found in several.items()
        },
    )


def fetch(directory: ModelDirectory) -> None:
    """Make sure that the files of a model are at `directory.path`.

    Raises:
        InternalError: a copy from a cloud failed.
    """
    if scheme_of(directory.repository):
        cloud_repository(directory.repository).download(directory.name, directory.path)


def release(path: Path) -> None:
    """Remove a model directory that was made for a load: by `fetch`, or of the call's files.

    Any other one is left alone.
    """
    release_copy(path)
    remove_files(path)


def fingerprint(directory: ModelDirectory) -> Fingerprint:
    """State of all files below a model folder; those that cannot be looked at are left out."""
    config: dict[str, FileState] = {}
    files: dict[str, FileState] = {}
    for relative, state in _file_states(directory):
        is_config = relative == CONFIG_FILE or relative.startswith("configs/")
        (config if is_config else files)[relative] = state
    # An empty version folder is content too: it is all an ensemble has.
    files.update({f"{version}/": (0, 0) for version in directory.versions})
    return Fingerprint(config, files)


def _models_in(repository: str) -> Iterator[ModelDirectory]:
    root = Path(repository)
    if not root.exists():
        raise InternalError(f"failed to stat file {repository}")
    if not root.is_dir():
        raise InvalidArgumentError("repository path is not a valid directory")
    if (root / CONFIG_FILE).is_file():
        _warn_once(
            f"repository '{repository}' has a {CONFIG_FILE} itself: if it is a model, "
            "--model-repository should name the folder above it"
        )
    for path in sorted(root.iterdir()):
        # Differs from Triton: hidden folders (.git, ..data of a volume) are no models.
        if path.name.startswith(".") or path.name in _GENERATED or not path.is_dir():
            continue
        try:
            directory = ModelDirectory.from_path(path.name, path, repository)
            is_model = _is_model(directory)
        except OSError as error:
            # Removed at this moment, or not for us to read: no reason to stop for the others.
            _warn_once(f"ignore folder '{path}': {error}")
            continue
        if is_model:
            yield directory


def _models_in_cloud(repository: str) -> Iterator[ModelDirectory]:
    cloud = cloud_repository(repository)
    for name, files in sorted(cloud.refresh().items()):
        folders = {path.partition("/")[0] for path in files if "/" in path}
        if name.startswith("."):
            continue
        versions = tuple(sorted(_version_numbers(folders)))
        if versions or CONFIG_FILE in files or "configs" in folders:
            yield ModelDirectory(name, cloud.local_path(name), versions, repository)


def _is_model(directory: ModelDirectory) -> bool:
    """Whether a folder has anything of a model.

    Differs from Triton: there a folder of documents fails the start of the server.
    """
    path = directory.path
    if directory.versions or (path / CONFIG_FILE).exists() or (path / "configs").is_dir():
        return True
    _warn_once(
        f"ignore folder '{path}': it has neither a {CONFIG_FILE} nor a version folder such as '1'"
    )
    return False


def _versions_in(path: Path) -> Iterator[int]:
    return _version_numbers(entry.name for entry in path.iterdir() if entry.is_dir())


def _version_numbers(folders: Iterable[str]) -> Iterator[int]:
    for name in folders:
        if name in _RESERVED_FOLDERS or name in _GENERATED or name.startswith("."):
            continue
        version = _version_number(name)
        if version is not None:
            yield version


def _version_number(name: str) -> int | None:
    """The version a folder stands for; None, with a warning, if it stands for none."""
    if not (name.isascii() and name.isdigit()):
        # Differs from Triton: `-1` is here too; there it becomes 18446744073709551615.
        _warn_once(f"ignore version directory '{name}' which fails to convert to integral number")
        return None
    if name.startswith("0"):
        _warn_once(
            f"ignore version directory '{name}' which contains leading zeros in its directory name"
        )
        return None
    number = int(name)
    if number >= 2**63:
        _warn_once(f"ignore version directory '{name}' which is out of range")
        return None
    return number


def _file_states(directory: ModelDirectory) -> Iterator[tuple[str, FileState]]:
    """(path in the model, state) of every file; links are followed."""
    if scheme_of(directory.repository):
        files = cloud_repository(directory.repository).files(directory.name)
        yield from (item for item in files.items() if not item[0].endswith("/"))
        return
    root = directory.path
    entered: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        if not _enter(folder, entered):
            folders.clear()
            continue
        folders[:] = [
            name for name in folders if not name.startswith(".") and name not in _GENERATED
        ]
        for name in names:
            if name.startswith(".") or name.endswith(".pyc"):
                continue
            path = os.path.join(folder, name)
            try:
                status = os.stat(path)
            except OSError:  # gone by now, a link to itself, or not for us to read
                continue
            yield os.path.relpath(path, root), (status.st_mtime_ns, status.st_size)


def _enter(folder: str, entered: set[tuple[int, int]]) -> bool:
    """Whether a folder was not entered before; links may lead back up."""
    try:
        status = os.stat(folder)
    except OSError:  # as above
        return False
    identity = (status.st_dev, status.st_ino)
    if identity in entered:
        return False
    entered.add(identity)
    return True


@lru_cache(maxsize=4096)
def _warn_once(message: str) -> None:
    """Log a warning the first time; in poll mode every scan meets the same folders."""
    log.warning("%s", message)
