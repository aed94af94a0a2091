"""The interpreter and the environment variables of a model's workers."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from npuserve import temporary
from npuserve.backends.worker.process import Interpreter
from npuserve.errors import InvalidConfigError

if TYPE_CHECKING:
    from npuserve.backends.base import BackendModelContext, Placement

_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_PATH = "EXECUTION_ENV_PATH"
_VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"


def interpreter_of(context: BackendModelContext, archive: Path | None = None) -> Interpreter:
    """The interpreter that EXECUTION_ENV_PATH asks for, else the server's own.

    May unpack an archive.

    Args:
        archive: environment that comes with a backend written in Python, where there is one.

    Raises:
        InvalidConfigError: there is no environment at that path.
    """
    text = context.parameters.get(_PATH, "")
    if text:
        path = _resolve(text, context.model_dir)
    elif archive is not None and archive.is_file():
        path = archive
    else:
        return Interpreter()
    if path.is_file():
        path = _unpack(path)
    python = path / "bin" / "python"
    if not python.exists():
        raise InvalidConfigError.of_parameter(
            _PATH,
            f"{_PATH} of model '{context.name}' must be a conda-pack archive or the directory of "
            f"an environment with bin/python, which '{path}' is not",
        )
    activate = path / "bin" / "activate"
    is_venv = (path / "pyvenv.cfg").exists()  # needs no activation, only its own python
    return Interpreter(str(python), str(activate) if activate.exists() and not is_venv else "")


def _resolve(text: str, model_dir: Path) -> Path:
    if not text.startswith(_MODEL_DIRECTORY):
        return Path(text)
    path = (model_dir / text[len(_MODEL_DIRECTORY) :].lstrip("/")).resolve()
    if not path.is_relative_to(model_dir.resolve()):
        raise InvalidConfigError.of_parameter(
            _PATH, f"{_PATH} '{text}' leaves the model's directory"
        )
    return path


def _unpack(archive: Path) -> Path:
    """Unpack an archive once per content; later models and servers find the directory."""
    status = archive.stat()
    identity = f"{archive.resolve()}:{status.st_size}:{status.st_mtime_ns}".encode()
    root = temporary.root() / f"npuserve-environments-{os.getuid()}"
    target = root / hashlib.sha256(identity).hexdigest()[:16]
    if target.is_dir():
        return target
    root.mkdir(mode=0o700, exist_ok=True)
    unpacked = Path(tempfile.mkdtemp(dir=root))
    try:
        with tarfile.open(archive) as tar:
            # Python before 3.11.4 (Debian 12) has no filters, and no parameter for one.
            tar.extraction_filter = getattr(tarfile, "tar_filter", None)
            tar.extractall(unpacked)
        unpacked.rename(target)  # all or nothing, whoever else does the same
    except OSError:
        shutil.rmtree(unpacked, ignore_errors=True)
        if not target.is_dir():
            raise
    except tarfile.TarError as error:
        shutil.rmtree(unpacked, ignore_errors=True)
        raise InvalidConfigError.of_parameter(
            _PATH, f"{_PATH} '{archive}' is no tar archive: {error}"
        ) from error
    return target


def worker_environment(context: BackendModelContext, placement: Placement) -> dict[str, str]:
    """Variables added to a worker's environment.

    Any parameter `env.<NAME>` of the model is one. An instance placed on a card sees just that
    card if `restrict_visible_devices` is "true"; it is number 0 for it then (`device_number`).
    """
    parameters = context.parameters
    environment = {
        key.removeprefix("env."): value
        for key, value in parameters.items()
        if key.startswith("env.")
    }
    restrict = parameters.get("restrict_visible_devices", "false").lower() == "true"
    if restrict and placement.kind == "GPU":
        environment[_VISIBLE_DEVICES] = _physical_id(placement.device_id)
    return environment


def _physical_id(device_id: int) -> str:
    """The card's number on the machine, as the variable wants it even below a restricted server."""
    visible = os.environ.get(_VISIBLE_DEVICES, "")
    ids = [part.strip() for part in visible.split(",") if part.strip()]
    return ids[device_id] if device_id < len(ids) else str(device_id)


def device_number(placement: Placement, environment: dict[str, str]) -> int:
    """The number under which an instance with this environment sees its card."""
    return 0 if _VISIBLE_DEVICES in environment else placement.device_id
