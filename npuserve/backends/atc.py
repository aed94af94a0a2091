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
import signal
import subprocess
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from npuserve.errors import InternalError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)

_SUCCESS = "ATC run success"
_MESSAGE_LENGTH = 2000
_TIMEOUT_S = 4 * 3600
_PAUSE_S = 0.5


class Compilers:
    """The compilers at work for a server, so that it can end without them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End them, and begin none any more."""
        with self._lock:
            self._stopped.set()
            for process in self._running:
                # Whoever waits for it may see its end at this moment.
                with suppress(ProcessLookupError):
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)

    def run(self, command: Sequence[str], directory: Path) -> tuple[int, str]:
        """(exit status, what it printed) of a program that runs in `directory`.

        Raises:
            OSError, subprocess.TimeoutExpired: it cannot be started, or does not end.
            UnavailableError: see `check`.
        """
        with self._lock:
            self.check()
            # A group of its own, as it has children that do the work.
            process = subprocess.Popen(
                command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        finally:
            with self._lock:
                self._running.remove(process)
        self.check()
        return process.returncode, output

    def pause(self) -> None:
        """Wait a moment for others.

        Raises:
            UnavailableError: see `check`.
        """
        self._stopped.wait(_PAUSE_S)
        self.check()

    def check(self) -> None:
        """Raise if the server stops.

        Raises:
            UnavailableError: it does.
        """
        if self._stopped.is_set():
            raise UnavailableError("the server stops, nothing is compiled any more")


def default_cache_dir() -> Path:
    """Where compiled models are kept unless something else is said."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        home = os.path.expanduser("~")  # stays "~" for a user id without an account (containers)
        base = str(Path("/" if home == "~" else home, ".cache"))
    return Path(base) / "npuserve" / "ge"


def compile_onnx(
    onnx: Path, flags: Mapping[str, str], cache_dir: Path, compilers: Compilers
) -> Path:
    """The `.om` file for an ONNX file; compiles unless that was done before.

    A folder that cannot be written to (part of a container's image) is read all the same.

    Args:
        onnx: the model; files beside it (external weights) count as part of it.
        flags: of atc, without the dashes; framework, model and output are added.
        compilers: those of the server.

    Raises:
        UnavailableError: atc is not there, or the server stops.
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
        return _compile_into(entry, program, onnx, flags, compilers)
    except OSError as error:
        raise InternalError(
            f"the compiled '{onnx.name}' cannot be kept in {cache_dir}: {error.strerror}; name a "
            "folder that can be written to with the parameter cache_dir or with XDG_CACHE_HOME"
        ) from error


def _compile_into(
    entry: Path, program: Path, onnx: Path, flags: Mapping[str, str], compilers: Compilers
) -> Path:
    with _locked(entry.with_suffix(".lock"), compilers):
        compiled = _compiled_file(entry)
        if compiled is not None:  # by another process meanwhile
            return compiled
        with tempfile.TemporaryDirectory(dir=entry.parent) as work_dir:
            # Compiled in the directory's future neighbour, so that the move is one step.
            result_dir = Path(work_dir, "result")
            result_dir.mkdir()
            _run(program, onnx, flags, result_dir, compilers)
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
def _locked(path: Path, compilers: Compilers) -> Iterator[None]:
    """One process or thread at a time; ends with the process, whatever happens to it."""
    with path.open("w") as file:
        while not _try_to_lock(file):  # for hours, perhaps, in which the server may be stopped
            compilers.pause()
        yield


def _try_to_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compiled_file(entry: Path) -> Path | None:
    # atc may append the host to the name it was given: model_linux_x86_64.om.
    return next(iter(sorted(entry.glob("*.om"))), None)


def _run(
    program: Path, onnx: Path, flags: Mapping[str, str], directory: Path, compilers: Compilers
) -> None:
    command = [
        str(program), "--framework=5", f"--model={onnx.resolve()}",
        f"--output={directory / 'model'}",
        *(f"--{name}={value}" for name, value in flags.items()),
    ]  # fmt: skip
    logger.info("compiling: %s", " ".join(command))
    try:
        # The working directory takes what atc leaves behind (kernel_meta, fusion_result.json).
        status, output = compilers.run(command, directory.parent)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InternalError(f"atc did not end well for '{onnx.name}': {error}") from error
    # Its exit status alone is not to be relied on (the upper bits of its code get lost).
    if status or _SUCCESS not in output or _compiled_file(directory) is None:
        said = "\n".join(line for line in output.splitlines() if not line.startswith("ATC start"))
        raise InternalError(
            f"atc could not compile '{onnx.name}' (exit status {status}): "
            f"{said.strip()[-_MESSAGE_LENGTH:]}"
        )
