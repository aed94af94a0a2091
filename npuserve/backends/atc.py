"""Compiling ONNX models with `atc`, each combination of file, options and compiler once.

Results are kept in a directory by the hash of everything that went into them. Compiling takes
seconds to many minutes: never on the event loop.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from npuserve.errors import InternalError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

logger = logging.getLogger(__name__)

_SUCCESS = "ATC run success"
_MESSAGE_LENGTH = 2000
_TIMEOUT_S = 4 * 3600


def default_cache_dir() -> Path:
    """Where compiled models are kept unless something else is said."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        home = os.path.expanduser("~")  # stays "~" for a user id without an account (containers)
        base = str(Path("/" if home == "~" else home, ".cache"))
    return Path(base) / "npuserve" / "ge"


def compile_onnx(onnx: Path, flags: Mapping[str, str], cache_dir: Path) -> Path:
    """The `.om` file for an ONNX file; compiles unless that was done before.

    A folder that cannot be written to (part of a container's image) is read all the same.

    Args:
        onnx: the model; files beside it (external weights) count as part of it.
        flags: of atc, without the dashes; framework, model and output are added.

    Raises:
        UnavailableError: atc is not there.
        InternalError: it failed, the text is its own; or the result cannot be kept.
    """
    program = find_atc()
    entry = cache_dir / _key(onnx, flags, program)
    compiled = _compiled_file(entry)
    if compiled is not None:
        logger.info("'%s' was compiled before: %s", onnx, compiled)
        return compiled
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        return _compile_into(entry, program, onnx, flags)
    except OSError as error:
        raise InternalError(
            f"the compiled '{onnx.name}' cannot be kept in {cache_dir}: {error.strerror}; name a "
            "folder that can be written to with the parameter cache_dir or with XDG_CACHE_HOME"
        ) from error


def _compile_into(entry: Path, program: Path, onnx: Path, flags: Mapping[str, str]) -> Path:
    with _locked(entry.with_suffix(".lock")):
        compiled = _compiled_file(entry)
        if compiled is not None:  # by another process meanwhile
            return compiled
        with tempfile.TemporaryDirectory(dir=entry.parent) as work_dir:
            # Compiled in the directory's future neighbour, so that the move is one step.
            result_dir = Path(work_dir, "result")
            result_dir.mkdir()
            _run(program, onnx, flags, result_dir)
            shutil.rmtree(entry, ignore_errors=True)
            result_dir.rename(entry)
        compiled = _compiled_file(entry)
    if compiled is None:
        raise InternalError(f"atc reported success for '{onnx.name}' and wrote no .om file")
    return compiled


def find_atc() -> Path:
    """The program.

    Raises:
        UnavailableError: not on PATH.
    """
    program = shutil.which("atc")
    if program is None:
        raise UnavailableError(
            "program 'atc' is not on PATH: install the CANN toolkit (since 8.5 with the operator "
            "package of the chip) and source its set_env.sh before the server starts"
        )
    return Path(program).resolve()


def _key(onnx: Path, flags: Mapping[str, str], program: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in onnx.parent.iterdir() if path.is_file()):
        digest.update(f"{file.name if file != onnx else ''}\0".encode())
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
    for name, value in sorted(flags.items()):
        digest.update(f"\0{name}={value}".encode())
        if name == "insert_op_conf" and Path(value).is_file():
            digest.update(Path(value).read_bytes())
    status = program.stat()  # another CANN is another compiler
    digest.update(f"\0{program}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process or thread at a time; ends with the process, whatever happens to it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compiled_file(entry: Path) -> Path | None:
    # atc may append the host to the name it was given: model_linux_x86_64.om.
    return next(iter(sorted(entry.glob("*.om"))), None)


def _run(program: Path, onnx: Path, flags: Mapping[str, str], directory: Path) -> None:
    command = [
        str(program), "--framework=5", f"--model={onnx.resolve()}",
        f"--output={directory / 'model'}",
        *(f"--{name}={value}" for name, value in flags.items()),
    ]  # fmt: skip
    logger.info("compiling: %s", " ".join(command))
    try:
        # The working directory takes what atc leaves behind (kernel_meta, fusion_result.json).
        result = subprocess.run(
            command, cwd=directory.parent, capture_output=True, text=True, check=False,
            timeout=_TIMEOUT_S, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InternalError(f"atc did not end well for '{onnx.name}': {error}") from error
    output = result.stdout + result.stderr
    # Its exit status alone is not to be relied on (the upper bits of its code get lost).
    if result.returncode or _SUCCESS not in output or _compiled_file(directory) is None:
        said = "\n".join(line for line in output.splitlines() if not line.startswith("ATC start"))
        raise InternalError(
            f"atc could not compile '{onnx.name}' (exit status {result.returncode}): "
            f"{said.strip()[-_MESSAGE_LENGTH:]}"
        )
