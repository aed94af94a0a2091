"""What a worker prints and logs: one pipe for both standard streams, and the server's log.

Runs in every interpreter a worker may have: standard library only.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def take_output(fd: int) -> None:
    """Make `fd` stdout and stderr, as UTF-8 whatever the locale, line by line.

    One pipe for both, so that lines keep their order.
    """
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(  # noqa: SIM115 - lives as long as the process
            number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
