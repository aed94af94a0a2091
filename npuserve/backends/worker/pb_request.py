"""Requests of triton_python_backend_utils: those of a batch and those a model makes itself.

Behaviour and texts: Triton python_backend, src/infer_request.cc.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from npuserve.backends.worker import wire
from npuserve.backends.worker.pb_response import (
    InferenceResponse,
    InferenceResponseSender,
    parameters_json,
)
from npuserve.backends.worker.pb_tensor import Tensor, TritonModelException

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from npuserve.backends.worker.port import Mailbox, Port

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

_UINT32_MAX = (1 << 32) - 1
_INT64_MIN = -(1 << 63)
_INT64_MAX = (1 << 63) - 1
_UINT64_MAX = (1 << 64) - 1


class MemoryType(enum.Enum):
    """Where BLS outputs should be placed."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 1
    DEFAULT = 2


TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU


class PreferredMemory:
    """Wish for the memory of BLS outputs; outputs are always in host memory here."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise TypeError(
                "__init__(): incompatible constructor arguments: preferred_memory_type must be "
                "TRITONSERVER_MEMORY_CPU or TRITONSERVER_MEMORY_GPU"
            )
        self._type = preferred_memory_type
        self._device_id = wire.integer(preferred_device_id, "preferred_device_id", 0, _INT64_MAX)


class InferenceTrace:
    """Reference to the trace of a request, to be handed on to the requests it makes."""

    def __init__(self, context: str | None = None, key: Any = None) -> None:
        self._context = context
        self._key = key  # of the request it belongs to

    def get_context(self) -> str | None:
        """The propagated OpenTelemetry context as JSON text, or None."""
        return self._context


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
        if type(requested_output_names) not in (list, tuple):
            raise TypeError(
                "__init__(): incompatible constructor arguments: requested_output_names must be a "
                f"list, got {type(requested_output_names).__name__}"
            )
        where = f"for request with id '{request_id}' and model name '{model_name}'"
        for tensor in inputs:
            if tensor is None:
                raise TritonModelException(f"Input tensor {where} should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"inputs must hold Tensor objects, got {type(tensor).__name__}")
        if correlation_id is None:
            raise TypeError(
                "__init__(): incompatible constructor arguments: correlation_id must not be None"
            )
        if not isinstance(correlation_id, (int, str)):
            raise TritonModelException("Correlation ID must be integer or string")
        for value, kind in ((preferred_memory, PreferredMemory), (trace, InferenceTrace)):
            if value is not None and not isinstance(value, kind):
                raise TypeError(
                    "__init__(): incompatible constructor arguments: expected a "
                    f"{kind.__name__}, got {type(value).__name__}"
                )
        self._request_id = wire.text(request_id, "request_id")
        self._correlation_id = (
            wire.text(correlation_id, "correlation_id")
            if isinstance(correlation_id, str)
            else wire.integer(correlation_id, "correlation_id", 0, _UINT64_MAX)
        )
        self._inputs = list(inputs)
        self._output_names: Any = [
            wire.text(name, "requested_output_names") for name in requested_output_names
        ]
        self._model_name = wire.text(model_name, "model_name")
        self._model_version = wire.integer(model_version, "model_version", _INT64_MIN, _INT64_MAX)
        self._flags = wire.integer(flags, "flags", 0, _UINT32_MAX)
        self._timeout = wire.integer(timeout, "timeout", 0, _UINT64_MAX)
        self._priority = wire.integer(priority, "priority", 0, _UINT64_MAX)
        self._preferred_memory = preferred_memory
        self._parameters = parameters_json(parameters)
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
        self._flags = wire.integer(flags, "flags", 0, _UINT32_MAX)

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
        """Like `exec`, without blocking the event loop of the caller.

        With `decoupled` the first response is waited for too: models read the iterator with a
        plain `for`, which would keep the loop from all else until then.
        """
        mailbox = self._start(decoupled)
        if decoupled:
            responses = ResponseIterator(self._port, mailbox)
            await responses._wait_for_first()
            return responses
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

    __slots__ = ("_ended", "_first", "_mailbox", "_port")

    def __init__(self, port: Port, mailbox: Mailbox) -> None:
        self._port = port
        self._mailbox = mailbox
        self._first: tuple[InferenceResponse | None, bool] | None = None  # waited for already
        self._ended = False

    async def _wait_for_first(self) -> None:
        self._first = await self._port.wait_async(self._mailbox)

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        if self._ended:
            raise StopIteration
        return self._take(self._first or self._port.wait(self._mailbox))

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._ended:
            raise StopAsyncIteration
        return self._take(self._first or await self._port.wait_async(self._mailbox))

    def _take(self, answer: tuple[InferenceResponse | None, bool]) -> InferenceResponse:
        self._first = None
        self._ended = answer[1]
        return _only_response(answer)

    def cancel(self) -> None:
        """Ask the other model to stop; a CANCELLED error may be the last response."""
        if not self._ended:
            self._port.cancel_infer(self._mailbox)

    def __del__(self) -> None:
        if not self._ended:  # nobody will look at the rest
            self._port.cancel_infer(self._mailbox)
