"""Local copies of models that lie in a cloud (s3://, gs://, as://).

One listing of a repository tells models, versions and changes; a model is downloaded when its
configuration is first read. A copy is never changed: another state of the model gets another
folder, so that a version which still serves keeps its files; it goes when it is released.
Everything blocks.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import threading
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.errors import InternalError, InvalidArgumentError, UnavailableError
from npuserve.model_repository.cloud_location import (
    MOUNT_VARIABLES,
    filesystem_options,
    parse_location,
)
from npuserve.temporary import make_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_MODULES = {"s3": "s3fs", "gs": "gcsfs", "as": "adlfs"}
_CLASSES = {"s3": "S3FileSystem", "gs": "GCSFileSystem", "as": "AzureBlobFileSystem"}

# gcsfs warns at every call of a client without credentials, Azure's SDK tells of every request.
_LIBRARY_LOGS = {"gs": {"gcsfs": logging.ERROR}, "as": {"azure": logging.WARNING}}


class CloudRepository:
    """One repository URL with its local copies. Thread-safe."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._location = parse_location(url)
        self._lock = threading.Lock()  # of the listing
        # Held while a model is copied, which takes long: others are listed and copied meanwhile.
        self._copying: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._filesystem = _open_filesystem(url)
        mount = os.environ.get(MOUNT_VARIABLES[self._location.scheme]) or None
        self._root = make_folder("npuserve-cloud-", mount)
        self._listing: dict[str, dict[str, tuple[str, int]]] = {}

    def refresh(self) -> dict[str, dict[str, tuple[str, int]]]:
        """List the repository anew: model → {path in the model: (state, bytes)}.

        Raises:
            InternalError: it does not exist.
            InvalidArgumentError: it cannot be read with these credentials.
        """
        with self._lock:
            self._listing = self._list()
            return self._listing

    def files(self, name: str) -> dict[str, tuple[str, int]]:
        """The files of a model as of the last `refresh`."""
        return self._listing.get(name, {})

    def local_path(self, name: str) -> Path:
        """Folder where the present state of a model is, or will be, copied to."""
        text = repr(sorted(self.files(name).items()))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._root / name / digest / name

    def download(self, name: str, target: Path) -> None:
        """Copy a model to `target`, unless that is done already.

        Raises:
            InternalError: an object cannot be read.
        """
        with self._copying[name]:
            if target.exists():
                return
            log.info("copying model '%s' from %s", name, self._url)
            # Half a copy must not be taken for a whole one.
            partial = target.with_name(f"{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                partial.mkdir(parents=True)
                for path in self.files(name):
                    self._copy(f"{self._location.path}/{name}/{path}", partial / path)
                partial.rename(target)
            except Exception as error:  # the libraries have no class of errors in common
                raise InternalError(
                    f"failed to copy model '{name}' from {self._url}: {error}"
                ) from error

    def release(self, path: Path) -> None:
        """Remove a copy that nobody needs any more; the next load makes it anew."""
        if path.is_relative_to(self._root):
            with self._copying[path.name]:
                shutil.rmtree(path.parent, ignore_errors=True)

    def close(self) -> None:
        """Remove all copies."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _copy(self, remote: str, local: Path) -> None:
        if remote.endswith("/"):  # an object that stands for a folder
            local.mkdir(parents=True, exist_ok=True)
            return
        local.parent.mkdir(parents=True, exist_ok=True)
        self._filesystem.get_file(remote, str(local))

    def _list(self) -> dict[str, dict[str, tuple[str, int]]]:
        try:
            objects = self._find()
        except InvalidArgumentError:
            # Keys are rotated while servers run: read them once more before giving up.
            self._filesystem = _open_filesystem(self._url)
            objects = self._find()
        if not objects:
            raise InternalError(f"failed to stat file {self._url}")
        listing: dict[str, dict[str, tuple[str, int]]] = {}
        for model, path, info in self._split(objects):
            listing.setdefault(model, {})[path] = (_state(info), int(info.get("size") or 0))
        return listing

    def _find(self) -> dict[str, dict[str, Any]]:
        try:
            self._filesystem.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._filesystem.find(
                self._location.path, detail=True, withdirs=True
            )
            if self._location.scheme == "as":
                self._recognise_folders(found)
        except Exception as error:  # the libraries have no class of errors in common
            if isinstance(error, PermissionError) or getattr(error, "status_code", 0) in (401, 403):
                raise InvalidArgumentError(f"no access to {self._url}: {error}") from error
            raise InternalError(f"failed to read {self._url}: {error}") from error
        return found

    def _recognise_folders(self, objects: dict[str, dict[str, Any]]) -> None:
        """An object "folder/" stands for an empty folder; adlfs lists it as the file "folder"."""
        for key, info in objects.items():
            bare = not info.get("size") and "." not in key.rpartition("/")[2]
            if bare and self._filesystem.isdir(key):
                info["type"] = "directory"

    def _split(
        self, objects: dict[str, dict[str, Any]]
    ) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(model, path in it, properties) of every object below a model folder."""
        prefix = self._location.path + "/"
        for key, info in objects.items():
            model, slash, path = key.removeprefix(prefix).partition("/")
            folder = info.get("type") == "directory"
            if not key.startswith(prefix) or not model or not (slash or folder):
                continue
            if not _is_path(key.removeprefix(prefix).removesuffix("/")):
                log.warning("ignore object '%s': its name is no path", key)
                continue
            if folder:
                path = f"{path.rstrip('/')}/" if path.strip("/") else ""
                info = {}  # folders have no state of their own
            if path:
                yield model, path, info


def _is_path(name: str) -> bool:
    """Whether a local copy of the object can lie in a folder, and not elsewhere.

    What stands behind an empty part would be an absolute path.
    """
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


_repositories: dict[str, CloudRepository] = {}
_repositories_lock = threading.Lock()


def cloud_repository(url: str) -> CloudRepository:
    """The one object for a URL; the copies it made are shared by all who ask."""
    with _repositories_lock:
        if url not in _repositories:
            _repositories[url] = CloudRepository(url)
        return _repositories[url]


def release_copy(path: Path) -> None:
    """See `CloudRepository.release`; a model that lies on this machine is left alone."""
    for repository in list(_repositories.values()):
        repository.release(path)


@atexit.register
def close_cloud_repositories() -> None:
    """Remove the local copies of all repositories."""
    while _repositories:
        _repositories.popitem()[1].close()


def _open_filesystem(url: str) -> Any:
    location = parse_location(url)
    options = filesystem_options(url, location, os.environ)
    name = _MODULES[location.scheme]
    try:
        module = import_module(name)
    except ImportError as error:
        raise UnavailableError(
            f"{name} is needed for {url} and cannot be imported ({error}): "
            "pip install 'npuserve[cloud]'"
        ) from error
    for library, level in _LIBRARY_LOGS.get(location.scheme, {}).items():
        logging.getLogger(library).setLevel(level)
    if "auth_type" in options:
        options["credential"] = _azure_credential(
            options.pop("auth_type"), options.pop("client_id")
        )
    # fsspec shares instances between equal arguments; new credentials must not be ignored.
    filesystem = getattr(module, _CLASSES[location.scheme])(skip_instance_cache=True, **options)
    if "credential" in options and filesystem.connection_string is not None:
        # adlfs prefers AZURE_STORAGE_CONNECTION_STRING, which Triton does not read.
        filesystem.connection_string = None
        filesystem.do_connect()
    return filesystem


def _azure_credential(auth_type: str, client_id: str) -> Any:
    identity = import_module("azure.identity.aio")
    if auth_type == "managed_identity":
        arguments = {"client_id": client_id} if client_id else {}
        return identity.ManagedIdentityCredential(**arguments)
    return identity.DefaultAzureCredential()


def _state(info: dict[str, Any]) -> str:
    """What changes when an object does, by the names the three file systems have for it.

    The time alone would not do: S3 and Azure tell it in whole seconds.
    """
    names = ("LastModified", "updated", "mtime", "last_modified", "etag", "ETag")
    return " ".join(str(info[name]) for name in names if info.get(name))
