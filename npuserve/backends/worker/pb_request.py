"""Requests, responses and response senders of triton_python_backend_utils.

Behaviour and texts: Triton python_backend, src/infer_request.cc, src/infer_response.cc,
src/response_sender.cc.
"""

from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING, Any

from npuserve.backends.worker.pb_tensor import Tensor, TritonModelException
from npuserve.backends.worker.wire import STATUS_NAMES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from npuserve.backends.worker.port import Mailbox, Port

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class MemoryType(enum.Enum):
    """Where BLS outputs should be placed."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 1
    DEFAULT = 2


TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU


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


class TritonError:
    """An error for one request."""

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
        return int(self._code), self._message

    @classmethod
    def _from_wire(cls, error: tuple[int, str]) -> TritonError:
        return cls(error[1], ErrorCode(error[0]))


assert len(ErrorCode) == len(STATUS_NAMES)


class PreferredMemory:
    """Wish for the memory of BLS outputs; outputs are always in host memory here."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self._type = preferred_memory_type
        self._device_id = preferred_device_id


class InferenceTrace:
    """Reference to the trace of a request, to be handed on to the requests it makes."""

    def __init__(self, context: str | None = None, key: Any = None) -> None:
        self._context = context
        self._key = key  # of the request it belongs to

    def get_context(self) -> str | None:
        """The propagated OpenTelemetry context as JSON text, or None."""
        return self._context


class InferenceResponse:
    """Outputs or an error, answering one request."""

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
        self._parameters = None if parameters is None else _parameters_json(parameters)

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


def _parameters_json(parameters: Any) -> str | None:
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise TypeError(f"parameters must be a dict, got {type(parameters).__name__}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}"
            )
        if not isinstance(value, (bool, int, str, float)):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
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
        if self._closed or (self._sent and not self._decoupled):
            return
        # Differs from Triton: there such a request stays open for ever.
        error = TritonError(
            "the model dropped the response sender of the request without sending a final response"
        )
        self._port.respond(self._key, InferenceResponse(error=error), self._names, True)


class InferenceRequest:
    """A request: one that came with a batch, or one a model makes for another model (BLS)."""

    __slots__ = (
        "_correlation_id", "_flags", "_inputs", "_key", "_model_name", "_model_version",
        "_output_names", "_parameters", "_preferred_memory", "_priority", "_release_flags",
        "_request_id", "_sender", "_timeout", "_trace",
    )  # fmt: skip

    # Set by `pb_utils.bind` on the class that a model sees.
    _port: Any = None
    _host: Any = None

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: list[Tensor] | None = None,
        requested_output_names: list[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> None:
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError(
                "__init__(): incompatible constructor arguments: inputs, requested_output_names "
                "and model_name are required"
            )
        where = f"for request with id '{request_id}' and model name '{model_name}'"
        for tensor in inputs:
            if tensor is None:
                raise TritonModelException(f"Input tensor {where} should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"inputs must hold Tensor objects, got {type(tensor).__name__}")
        for name in requested_output_names:
            if name is None:
                raise TritonModelException(f"Requested output name {where} should not be empty.")
        if isinstance(correlation_id, bool) or not isinstance(correlation_id, (int, str)):
            raise TritonModelException("Correlation ID must be integer or string")
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        self._output_names: Any = list(requested_output_names)
        self._model_name = model_name
        self._model_version = model_version
        self._flags = flags
        self._timeout = timeout
        self._priority = priority
        self._preferred_memory = preferred_memory
        self._parameters = _parameters_json(parameters)
        self._trace = trace._key if trace is not None else None
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL
        self._key: Any = None
        self._sender: InferenceResponseSender | None = None

    @classmethod
    def _from_wire(cls, key: Any, inputs: list[Tensor], fields: Any) -> InferenceRequest:
        """A request that came with a batch; `fields` as in `wire`."""
        request: InferenceRequest = cls.__new__(cls)
        request._key = key
        request._inputs = inputs
        request._sender = None
        request._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL
        if fields is None:
            request._request_id = ""
            request._correlation_id = 0
            request._flags = request._timeout = request._priority = 0
            request._parameters = request._trace = None
            request._output_names = ()
        else:
            (
                request._request_id, request._correlation_id, request._flags, request._timeout,
                request._priority, request._parameters, request._output_names, request._trace,
            ) = fields  # fmt: skip
        return request

    def inputs(self) -> list[Tensor]:
        """Input tensors, in the order of the request."""
        return self._inputs

    def request_id(self) -> str:
        """The client's id, "" for none."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Sequence id; 0 for none."""
        return self._correlation_id

    def flags(self) -> int:
        """TRITONSERVER_REQUEST_FLAG_SEQUENCE_* bits."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Change the flags."""
        self._flags = flags

    def timeout(self) -> int:
        """Queue timeout in µs, 0 for none."""
        return self._timeout

    def priority(self) -> int:
        """Priority level, 0 for the default."""
        return self._priority

    def model_name(self) -> str:
        """Of a request made for another model: its name."""
        return self._model_name

    def model_version(self) -> int:
        """Of a request made for another model: its version, -1 for the latest."""
        return self._model_version

    def preferred_memory(self) -> PreferredMemory:
        """Where outputs are wanted."""
        asked = self._preferred_memory if self._key is None else None
        return asked or PreferredMemory(MemoryType.DEFAULT, 0)

    def requested_output_names(self) -> set[str]:
        """The outputs asked for; all of the model when the client named none."""
        return set(self._names())

    def _names(self) -> Any:
        return self._output_names or (self._host.output_names if self._key is not None else ())

    def parameters(self) -> str:
        """Custom parameters as JSON text."""
        return self._parameters or "{}"

    def trace(self) -> InferenceTrace:
        """The request's trace, to be passed to requests made on its behalf."""
        return InferenceTrace(self._trace, self._key)

    def get_response_sender(self) -> InferenceResponseSender:
        """The sender of this request's responses; every call gives the same."""
        if self._key is None:
            raise TritonModelException(
                "Cannot get a response sender for a request that the model itself made."
            )
        if self._sender is None:
            self._sender = InferenceResponseSender(
                self._port, self._key, self._host.kept_outputs(self), self._host.decoupled
            )
        return self._sender

    def is_cancelled(self) -> bool:
        """Whether the client has gone; asks anew at each call."""
        return self._key is not None and self._port.is_cancelled(self._key)

    def set_release_flags(self, flags: int) -> None:
        """TRITONSERVER_REQUEST_RELEASE_ALL, or _RESCHEDULE to get the request again."""
        if flags not in (
            TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
        ):  # fmt: skip
            raise TritonModelException(f"Unable to set release flags. Unsupported flag {flags}.")
        self._release_flags = flags

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Run the request on its model and wait for the response.

        Failures of the other model are responses with an error.

        Args:
            decoupled: give an iterator over any number of responses instead.
        """
        mailbox = self._start(decoupled)
        if decoupled:
            return ResponseIterator(self._port, mailbox)
        return _only_response(self._port.wait(mailbox))

    async def async_exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Like `exec`, without blocking the event loop of the caller."""
        mailbox = self._start(decoupled)
        if decoupled:
            return ResponseIterator(self._port, mailbox)
        return _only_response(await self._port.wait_async(mailbox))

    def _start(self, decoupled: bool) -> Mailbox:
        if self._host is None or not self._host.serving:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        mailbox: Mailbox = self._port.infer(self, decoupled)
        return mailbox


def _only_response(answer: tuple[InferenceResponse | None, bool]) -> InferenceResponse:
    response = answer[0]
    return InferenceResponse() if response is None else response


class ResponseIterator:
    """Responses of a BLS request with decoupled=True; for `for` and for `async for`, once.

    The last one is empty if the other model ended without data.
    """

    __slots__ = ("_ended", "_mailbox", "_port")

    def __init__(self, port: Port, mailbox: Mailbox) -> None:
        self._port = port
        self._mailbox = mailbox
        self._ended = False

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        if self._ended:
            raise StopIteration
        return self._take(self._port.wait(self._mailbox))

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._ended:
            raise StopAsyncIteration
        return self._take(await self._port.wait_async(self._mailbox))

    def _take(self, answer: tuple[InferenceResponse | None, bool]) -> InferenceResponse:
        self._ended = answer[1]
        return _only_response(answer)

    def cancel(self) -> None:
        """Ask the other model to stop; a CANCELLED error may be the last response."""
        if not self._ended:
            self._port.cancel_infer(self._mailbox)

    def __del__(self) -> None:
        if not self._ended:  # nobody will look at the rest
            self._port.cancel_infer(self._mailbox)
