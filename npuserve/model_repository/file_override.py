"""Model directories made of the files that came with a load call. Blocks on the file system."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from npuserve.errors import InternalError, InvalidArgumentError
from npuserve.temporary import make_folder

if TYPE_CHECKING:
    from collections.abc import Mapping


_made: set[Path] = set()  # model directories that are there


def write_files(name: str, files: Mapping[str, bytes]) -> Path:
    """A temporary model directory with these files; `remove_files` takes it away.

    Raises:
        InternalError: the name is no folder's name, or a path leaves the directory, or there is no
            folder for temporary files.
        InvalidArgumentError: a path that no file can have.
    """
    if name in ("", ".", "..") or Path(name).name != name:
        raise InternalError(f"failed to load '{name}', the name of a model is that of a folder")
    root = make_folder("npuserve-load-")
    model_dir = root / name
    try:
        _make(model_dir)
        for relative, content in files.items():
            _write(model_dir, relative, content)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    _made.add(model_dir)
    return model_dir


def _make(model_dir: Path) -> None:
    try:
        model_dir.mkdir()
    except (OSError, ValueError) as error:  # too long, with a NUL
        raise InvalidArgumentError(f"invalid model name '{model_dir.name}': {error}") from error


def _write(model_dir: Path, relative: str, content: bytes) -> None:
    try:
        target = (model_dir / relative.lstrip("/")).resolve()
        if not target.is_relative_to(model_dir.resolve()):
            raise InternalError(
                f"Invalid file parameter 'file:{relative}' with normalized path '{target}' "
                "must stay within model directory."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    except (OSError, ValueError) as error:  # too long, a folder, with a NUL
        raise InvalidArgumentError(f"Invalid file parameter 'file:{relative}': {error}") from error


def remove_files(model_dir: Path) -> None:
    """Remove what `write_files` made, and never anything else."""
    if model_dir in _made:
        _made.discard(model_dir)
        shutil.rmtree(model_dir.parent, ignore_errors=True)
