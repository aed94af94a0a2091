"""What a model prints and logs: by a worker's one pipe for both streams, and to the server's log.

Runs in every interpreter a worker may have: standard library only.
"""

from __future__ import annotations

import builtins
import errno
import io
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from npuserve.backends.worker.port import Port


class PortLogHandler(logging.Handler):
    """Log records of user code that no handler of its own takes."""

    def __init__(self, port: Port) -> None:
        super().__init__()
        self._port = port

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record to the server's log."""
        level = "INFO"
        if record.levelno >= logging.ERROR:
            level = "ERROR"
        elif record.levelno >= logging.WARNING:
            level = "WARNING"
        self._port.log(level, self.format(record), record.pathname, record.lineno)


def flush() -> None:
    """Push out what the model printed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed or replaced by the model


class _Output(io.FileIO):
    """Descriptor 1 or 2. A model that closed it prints into nothing, it does not fail."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            return memoryview(data).nbytes


class Printer:
    """`print` for a model in the server's own process: lines for the log, as a worker's become.

    Args:
        write: gets each line without its end.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._rest = ""
        self._lock = threading.RLock()  # the garbage collector may have something to print

    def __call__(self, *values: Any, sep: Any = " ", end: Any = "\n", file: Any = None,
                 flush: Any = False) -> None:  # fmt: skip
        """See the built-in function; other files than the standard streams are its business."""
        if file is not None and file is not sys.stdout and file is not sys.stderr:
            builtins.print(*values, sep=sep, end=end, file=file, flush=flush)
            return
        text = io.StringIO()
        builtins.print(*values, sep=sep, end=end, file=text)
        printed = text.getvalue().encode("utf-8", "backslashreplace").decode()
        with self._lock:
            *lines, self._rest = (self._rest + printed).split("\n")
            for line in lines:
                self._write(line)

    def finish(self) -> None:
        """Write an unfinished line."""
        rest, self._rest = self._rest, ""
        if rest:
            self._write(rest)


def take_output(fd: int) -> None:
    """Make `fd` stdout and stderr, as UTF-8 whatever the locale, line by line.

    One pipe for both, so that lines keep their order.
    """
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = io.TextIOWrapper(
            io.BufferedWriter(_Output(number, "w", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
