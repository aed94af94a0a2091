"""Folders for temporary files; containers with a read-only file system may have none."""

from __future__ import annotations

import tempfile
from pathlib import Path

from npuserve.errors import InternalError


def make_folder(prefix: str, parent: str | Path | None = None) -> Path:
    """A new folder; the caller removes it.

    Args:
        prefix: how its name begins.
        parent: where it is made; None for `root`.

    Raises:
        InternalError: it cannot be made; the text says how to name another place.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent or root()))
    except OSError as error:
        raise InternalError(f"no folder for temporary files can be made: {error}") from error


def root() -> Path:
    """The folder of all temporary files, as TMPDIR says.

    Raises:
        InternalError: there is none.
    """
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise InternalError(
            f"there is no folder for temporary files, TMPDIR may name one: {error.strerror}"
        ) from error
