"""The status codes and the one exception hierarchy of npuserve.

Nothing here knows HTTP or gRPC: `protocol/status.py` maps the codes to both wires.

    NpuserveError
    ├─ UnknownError
    ├─ InternalError
    │   └─ WorkerDiedError        a worker process ended with a request in hand
    ├─ NotFoundError
    ├─ InvalidArgumentError
    │   └─ InvalidConfigError     a model's configuration breaks a rule
    ├─ UnavailableError           not ready, queue full, queue timeout
    ├─ UnsupportedError
    ├─ AlreadyExistsError
    └─ RequestCancelledError

Source of the codes: TRITONSERVER_Error_Code of Triton's C API.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


class StatusCode(Enum):
    """Triton's error codes; the value is the text Triton puts before a reason."""

    UNKNOWN = "Unknown"
    INTERNAL = "Internal"
    NOT_FOUND = "Not found"
    INVALID_ARGUMENT = "Invalid argument"
    UNAVAILABLE = "Unavailable"
    UNSUPPORTED = "Unsupported"
    ALREADY_EXISTS = "Already exists"
    CANCELLED = "Cancelled"


class NpuserveError(Exception):
    """Base of every error that may reach a client; `str(error)` is the wire text."""

    code: ClassVar[StatusCode] = StatusCode.UNKNOWN

    @property
    def reason(self) -> str:
        """`<Code>: <text>`, as load failures and the repository index show it."""
        return f"{self.code.value}: {self}"


class UnknownError(NpuserveError):
    """An error without a better code."""

    code = StatusCode.UNKNOWN


class InternalError(NpuserveError):
    """The server or a model failed; the client did nothing wrong."""

    code = StatusCode.INTERNAL


class WorkerDiedError(InternalError):
    """A worker process ended while it held the request."""


class NotFoundError(NpuserveError):
    """A model, version, region or path that does not exist."""

    code = StatusCode.NOT_FOUND


class InvalidArgumentError(NpuserveError):
    """The client (or a configuration) asked for something that cannot be."""

    code = StatusCode.INVALID_ARGUMENT


class InvalidConfigError(InvalidArgumentError):
    """A model's configuration breaks a rule, found while it is loaded.

    Attributes:
        field: path of the field it is about, such as `input[1].dims` or
            `parameters["key"]`. The server adds the file and the line where that is.
    """

    def __init__(self, text: str, field: str) -> None:
        super().__init__(text)
        self.field = field

    @classmethod
    def of_parameter(cls, key: str, text: str) -> InvalidConfigError:
        """The rule is about the value of this `parameters` entry.

        Or of the backend's option of that name on the command line, where it is given there only.
        """
        return cls(text, f'parameters["{key}"]')


class UnavailableError(NpuserveError):
    """Not now: not ready, stopping, queue full or timed out in the queue."""

    code = StatusCode.UNAVAILABLE


class UnsupportedError(NpuserveError):
    """A valid request for something this server or endpoint does not do."""

    code = StatusCode.UNSUPPORTED


class AlreadyExistsError(NpuserveError):
    """The thing to create is already there."""

    code = StatusCode.ALREADY_EXISTS


class RequestCancelledError(NpuserveError):
    """The client went away or cancelled before the request was executed."""

    code = StatusCode.CANCELLED


ERROR_BY_CODE: dict[StatusCode, type[NpuserveError]] = {
    StatusCode.UNKNOWN: UnknownError,
    StatusCode.INTERNAL: InternalError,
    StatusCode.NOT_FOUND: NotFoundError,
    StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    StatusCode.UNAVAILABLE: UnavailableError,
    StatusCode.UNSUPPORTED: UnsupportedError,
    StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    StatusCode.CANCELLED: RequestCancelledError,
}


def error_from_code(code: StatusCode, message: str) -> NpuserveError:
    """The exception of the class that stands for `code`."""
    return ERROR_BY_CODE[code](message)


def as_npuserve_error(error: BaseException) -> NpuserveError:
    """The error as clients may see it: whatever is no NpuserveError becomes internal."""
    if isinstance(error, NpuserveError):
        return error
    return InternalError(f"{type(error).__name__}: {error}")
