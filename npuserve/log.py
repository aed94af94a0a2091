"""The log: Triton's two line formats, levels that change at run time, the start-up tables.

`configure` sets the process up once; everything else logs through `logging` as usual. Triton's
levels are switches of their own (info may be off while warnings are on), so a filter applies
them. Sources: server and core src/logging, protocol extension "logging".
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import IO, TYPE_CHECKING, Any

from npuserve.errors import InvalidArgumentError, UnsupportedError
from npuserve.text_table import render_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npuserve.options import ServerOptions
    from npuserve.server.core import InferenceServer

logger = logging.getLogger(__name__)

FORMATS = ("default", "ISO8601")

_NO_FILE_UPDATE = "log file location can not be updated through network protocol"
_EXPECTED: dict[str, tuple[type, str]] = {
    "log_info": (bool, "boolean"),
    "log_warning": (bool, "boolean"),
    "log_error": (bool, "boolean"),
    "log_verbose_level": (int, "int32"),
    "log_format": (str, "string"),
}


class LogSettings:
    """What is logged and how: read and changed by clients through HTTP and gRPC.

    One object serves the whole process once `configure` has installed it; a server that is
    embedded into another program keeps one without any effect on that program's log.
    """

    def __init__(
        self,
        *,
        log_file: str = "",
        log_info: bool = True,
        log_warning: bool = True,
        log_error: bool = True,
        log_verbose_level: int = 0,
        log_format: str = "default",
    ) -> None:
        self._values: dict[str, Any] = {
            "log_file": log_file,
            "log_info": log_info,
            "log_warning": log_warning,
            "log_error": log_error,
            "log_verbose_level": log_verbose_level,
            "log_format": log_format,
        }

    @classmethod
    def from_options(cls, options: ServerOptions) -> LogSettings:
        """The installed settings if `configure` ran in this process, else new ones."""
        handler = _installed_handler()
        return handler.settings if handler is not None else cls._made_from(options)

    @classmethod
    def _made_from(cls, options: ServerOptions) -> LogSettings:
        return cls(
            log_file=options.log_file,
            log_info=options.log_info,
            log_warning=options.log_warning,
            log_error=options.log_error,
            log_verbose_level=options.log_verbose,
            log_format=options.log_format,
        )

    def get(self) -> dict[str, bool | int | str]:
        """All settings by their name in the protocol, in its order."""
        return dict(self._values)

    def update(self, changes: Mapping[str, Any]) -> None:
        """Change settings, all or none.

        Args:
            changes: by protocol name; None values and unknown names are ignored, as Triton does.

        Raises:
            UnsupportedError: the log file is to change.
            InvalidArgumentError: a value of the wrong type, or an unknown format.
        """
        accepted: dict[str, Any] = {}
        for name, value in changes.items():
            if value is None:
                continue
            if name == "log_file":
                raise UnsupportedError(_NO_FILE_UPDATE)
            if name in _EXPECTED:
                _check_value(name, value)
                accepted[name] = value
        self._values.update(accepted)
        self._apply_verbosity()

    @property
    def log_format(self) -> str:
        """One of FORMATS."""
        return str(self._values["log_format"])

    @property
    def verbose_level(self) -> int:
        """0 means no verbose messages."""
        return int(self._values["log_verbose_level"])

    def allows(self, level: int) -> bool:
        """Whether a record of this `logging` level is to be written."""
        if level < logging.INFO:
            return self.verbose_level > 0
        if level < logging.WARNING:
            return bool(self._values["log_info"])
        if level < logging.ERROR:
            return bool(self._values["log_warning"])
        return bool(self._values["log_error"])

    def _apply_verbosity(self) -> None:
        """Let verbose records be made at all, where this object governs the log."""
        handler = _installed_handler()
        if handler is not None and handler.settings is self:
            # Only npuserve's own: what libraries call debug is of no use to operators.
            logging.getLogger("npuserve").setLevel(
                logging.DEBUG if self.verbose_level > 0 else logging.INFO
            )


class TritonFormatter(logging.Formatter):
    """`LMMDD hh:mm:ss.ssssss <pid> <file>:<line>] "message"`, or the ISO8601 form; both UTC.

    The message is one JSON string, so that a line is always one record, unless the environment
    says TRITON_SERVER_ESCAPE_LOG_MESSAGES=0, as Triton has it. Records with
    `extra={"table": ...}` have that text below an empty heading; tracebacks follow their line.
    """

    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._settings = settings
        self._pid = os.getpid()
        self._escapes = os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES") != "0"

    def format(self, record: logging.LogRecord) -> str:
        """The line, or lines, without the newline at the end."""
        heading = f"{self._stamp(record)} {self._pid} {record.filename}:{record.lineno}] "
        table = getattr(record, "table", None)
        if table is not None:
            return f"{heading}\n{table}"
        message = record.getMessage()
        text = heading + (json.dumps(message, ensure_ascii=False) if self._escapes else message)
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return text

    def _stamp(self, record: logging.LogRecord) -> str:
        utc = time.gmtime(record.created)
        letter = _level_letter(record.levelno)
        if self._settings.log_format == "ISO8601":
            return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', utc)} {letter}"
        micros = int(record.created % 1 * 1e6)
        return f"{letter}{time.strftime('%m%d %H:%M:%S', utc)}.{micros:06d}"


class _Handler(logging.StreamHandler[IO[str]]):
    """The one handler of the process; its class is how it is found again."""

    def __init__(self, settings: LogSettings, stream: IO[str]) -> None:
        super().__init__(stream)
        self.settings = settings
        self.setFormatter(TritonFormatter(settings))

    def filter(self, record: logging.LogRecord) -> bool:
        """Apply Triton's switches."""
        return self.settings.allows(record.levelno) and bool(super().filter(record))


def configure(options: ServerOptions) -> LogSettings:
    """Send the log of the whole process to the console or the file, in Triton's form.

    Text is UTF-8 whatever the locale says: models print any language.

    Raises:
        InvalidArgumentError: the log file cannot be opened.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    settings = LogSettings._made_from(options)
    root = logging.getLogger()
    previous = _installed_handler()
    if previous is not None:
        root.removeHandler(previous)
        _close(previous)
    root.addHandler(_Handler(settings, _open(options.log_file)))
    root.setLevel(logging.INFO)
    settings.update({})
    return settings


def _open(path: str) -> IO[str]:
    if not path:
        return sys.stderr
    try:
        return open(path, "a", encoding="utf-8", errors="backslashreplace", buffering=1)
    except OSError as error:
        raise InvalidArgumentError(f"cannot open log file '{path}': {error.strerror}") from error


def _close(handler: _Handler) -> None:
    handler.flush()
    if handler.stream is not sys.stderr:
        handler.stream.close()
    handler.close()


def _installed_handler() -> _Handler | None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            return handler
    return None


def _check_value(name: str, value: object) -> None:
    kind, described = _EXPECTED[name]
    # bool is an int to Python and none to a client.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidArgumentError(f"expect {described} for '{name}'")
    if kind is str and value not in FORMATS:
        raise InvalidArgumentError(f"invalid argument for log_format, got: {value}")
    # Differs from Triton: it takes a level from 2^31 on for 0.
    if isinstance(value, int) and not 0 <= value < 2**31:
        raise InvalidArgumentError(f"invalid argument for log_verbose_level, got: {value}")


def _level_letter(level: int) -> str:
    if level >= logging.ERROR:
        return "E"
    return "W" if level >= logging.WARNING else "I"


def print_startup_tables(server: InferenceServer) -> None:
    """Log backends, models and options as tritonserver does when its models are loaded."""
    _log_table(("Repository Agent", "Path"), [])
    _log_table(("Backend", "Path", "Config"), _backend_rows(server))
    _log_table(("Model", "Version", "Status"), _model_rows(server))
    _log_table(("Option", "Value"), _option_rows(server))


def _log_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    logger.info("%s", header[0], extra={"table": render_table(header, rows)})


def _backend_rows(server: InferenceServer) -> list[tuple[str, ...]]:
    options = server.options
    rows: list[tuple[str, ...]] = []
    for name, backend in sorted(server.lifecycle.backends.loaded().items()):
        config = {
            "auto-complete-config": str(not options.disable_auto_complete_config).lower(),
            "backend-directory": options.backend_directory,
            "default-max-batch-size": "4",
            **options.backend_options(name),
        }
        path = sys.modules[type(backend).__module__].__file__ or ""
        rows.append((name, path, json.dumps({"cmdline": config}, separators=(",", ":"))))
    return rows


def _model_rows(server: InferenceServer) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, entry in sorted(server.lifecycle.entries.items()):
        for version, status in sorted(entry.versions.items()):
            text = f"{status.state}: {status.reason}" if status.reason else str(status.state)
            rows.append((name, str(version), text))
        if entry.failure and not entry.versions:
            # Differs from Triton: a model that could not be polled is not in its table.
            rows.append((name, "-", f"UNAVAILABLE: {entry.failure}"))
    return rows


def _option_rows(server: InferenceServer) -> list[tuple[str, ...]]:
    options = server.options
    metadata = server.server_metadata()
    rows: list[tuple[str, ...]] = [
        ("server_id", metadata.name),
        ("server_version", metadata.version),
        ("server_extensions", " ".join(metadata.extensions)),
        *(
            (f"model_repository_path[{index}]", path)
            for index, path in enumerate(options.model_repository)
        ),
        ("model_control_mode", f"MODE_{options.model_control_mode.upper()}"),
        *((f"startup_models_{i}", name) for i, name in enumerate(options.load_model)),
        ("strict_model_config", str(int(options.disable_auto_complete_config))),
        ("model_config_name", options.model_config_name),
        ("rate_limit", options.rate_limit.upper()),
        ("pinned_memory_pool_byte_size", str(options.pinned_memory_pool_byte_size)),
        ("strict_readiness", str(int(options.strict_readiness))),
        ("exit_timeout", str(options.exit_timeout_secs)),
        ("cache_enabled", str(int(bool(options.cache_config)))),
    ]
    if options.npu_simulator:
        rows.append(("npu_simulator", str(options.npu_simulator)))
    return rows
