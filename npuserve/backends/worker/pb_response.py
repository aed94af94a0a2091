"""Responses, errors and response senders of triton_python_backend_utils.

Behaviour and texts: Triton python_backend, src/infer_response.cc, src/response_sender.cc.
"""

from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING, Any

from npuserve.backends.worker.pb_tensor import Tensor, TritonModelException
from npuserve.backends.worker.wire import STATUS_NAMES

if TYPE_CHECKING:
    from npuserve.backends.worker.port import Port

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class ErrorCode(enum.IntEnum):
    """Codes of TritonError; the value is the index in `wire.STATUS_NAMES`."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    __str__ = enum.Enum.__str__  # the name, with every Python


class TritonError:
    """An error for one request."""

    __module__ = "c_python_backend_utils"  # error texts show it

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    __slots__ = ("_code", "_message")

    def __init__(self, message: Any, code: Any = ErrorCode.INTERNAL) -> None:
        if not (isinstance(message, str) and isinstance(code, ErrorCode)):
            raise TypeError(
                "__init__(): incompatible constructor arguments: TritonError(message: str, "
                f"code: TritonError.<CODE>), got {message!r}, {code!r}"
            )
        self._message: str = message
        self._code: ErrorCode = code

    def message(self) -> str:
        """The text for the client."""
        return self._message

    def code(self) -> ErrorCode:
        """One of the class's codes."""
        return self._code

    def __str__(self) -> str:
        return self._message

    def _to_wire(self) -> tuple[int, str]:
        text = self._message.encode("utf-8", "backslashreplace")  # lone surrogates cannot travel
        return int(self._code), text.decode()

    @classmethod
    def _from_wire(cls, error: tuple[int, str]) -> TritonError:
        return cls(error[1], ErrorCode(error[0]))


assert len(ErrorCode) == len(STATUS_NAMES)


class InferenceResponse:
    """Outputs or an error, answering one request."""

    __module__ = "c_python_backend_utils"  # error texts show it

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: list[Tensor] | tuple[Tensor, ...] = (),
        error: TritonError | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        if type(output_tensors) is not list:
            output_tensors = list(output_tensors)
        for tensor in output_tensors:
            if type(tensor) is not Tensor:
                _refuse_output(tensor)
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(
                "__init__(): incompatible constructor arguments: error must be a TritonError, "
                f"got {type(error).__name__}"
            )
        self._outputs = output_tensors
        self._error = error
        self._parameters = None if parameters is None else parameters_json(parameters)

    @classmethod
    def _from_wire(
        cls, outputs: list[Tensor], parameters: str | None, error: tuple[int, str] | None
    ) -> InferenceResponse:
        response: InferenceResponse = cls.__new__(cls)
        response._outputs = outputs
        response._parameters = parameters
        response._error = None if error is None else TritonError._from_wire(error)
        return response

    def output_tensors(self) -> list[Tensor]:
        """The outputs; empty for an error."""
        return self._outputs

    def has_error(self) -> bool:
        """Whether it carries an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, or None."""
        return self._error

    def parameters(self) -> str:
        """Response parameters as JSON text."""
        return self._parameters or "{}"


def _refuse_output(tensor: Any) -> None:
    if tensor is None:
        raise TritonModelException("Output tensor for inference response should not be empty.")
    if not isinstance(tensor, Tensor):
        raise TypeError(
            "__init__(): incompatible constructor arguments: output_tensors must hold Tensor "
            f"objects, got {type(tensor).__name__}"
        )


def parameters_json(parameters: Any) -> str | None:
    """Parameters of a request or response as JSON text, once checked."""
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict as parameters, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}"
            )
        if not isinstance(value, (bool, int, str, float)):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise TritonModelException(f"Expect parameters values to fit 64 bits, found {value}")
    return json.dumps(parameters)


class InferenceResponseSender:
    """The way responses of one request go back; may be used in any thread.

    When it is dropped before the request is complete, the request ends with an error.
    """

    __slots__ = ("_closed", "_decoupled", "_key", "_names", "_port", "_sent")

    def __init__(self, port: Port, key: Any, names: Any, decoupled: bool) -> None:
        self._port = port
        self._key = key
        self._names = names
        self._decoupled = decoupled
        self._sent = False
        self._closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send one response, or with TRITONSERVER_RESPONSE_COMPLETE_FINAL the last (or none)."""
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None:
            if flags == 0:
                raise TritonModelException(
                    "Inference Response object must be provided when the response flags is set "
                    "to zero."
                )
        elif not isinstance(response, InferenceResponse):
            raise TypeError(
                "send(): incompatible function arguments: response must be an InferenceResponse, "
                f"got {type(response).__name__}"
            )
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if self._decoupled:
            self._closed = final
            self._port.respond(self._key, response, self._names, final)
        else:
            self._send_only(response, final)

    def _send_only(self, response: InferenceResponse | None, final: bool) -> None:
        """The one response of a model that is not decoupled; it is always the last one."""
        if response is None:
            if not self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final "
                    "before sending a response."
                )
        elif self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        self._closed = final
        if response is not None:
            self._sent = True
            self._port.respond(self._key, response, self._names, True)

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""
        return self._port.is_cancelled(self._key)

    def _close(self) -> None:
        """The request was answered another way."""
        self._closed = True

    def __del__(self) -> None:
        if self._closed or (self._sent and not self._decoupled) or self._port.forked:
            return
        # Differs from Triton: there such a request stays open for ever.
        error = TritonError(
            "the model dropped the response sender of the request without sending a final response"
        )
        self._port.respond(self._key, InferenceResponse(error=error), self._names, True)
