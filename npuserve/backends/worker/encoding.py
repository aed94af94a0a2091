"""A model's tensors, requests and responses as they cross a channel, see `wire`.

Runs in every interpreter a worker may have: standard library and NumPy only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npuserve.backends.worker import wire
from npuserve.backends.worker.pb_response import InferenceResponse
from npuserve.backends.worker.pb_tensor import Tensor

if TYPE_CHECKING:
    from npuserve.backends.worker.pb_request import InferenceRequest
    from npuserve.backends.worker.shm import SharedMemoryLink

_INTERNAL = wire.STATUS_NAMES.index("INTERNAL")


def tensors_from_wire(link: SharedMemoryLink, tensors: Any) -> list[Tensor]:
    """Tensors over the peer's memory.

    Raises:
        OSError: it cannot be mapped; `SharedMemoryLink.decline` is due.
    """
    make, borrow = Tensor._from_wire, link.borrow
    return [
        make(name, code, shape, data if type(data) is bytes else borrow(data))
        for name, code, shape, data in tensors
    ]


def tensor_to_wire(link: SharedMemoryLink, tensor: Tensor, *, copy: bool = False) -> Any:
    """A tensor as it travels.

    Args:
        copy: it does not leave at once, and the model may use its array again.
    """
    data = tensor._to_wire()
    size = data.nbytes if type(data) is not bytes else len(data)
    if size >= wire.INLINE_BYTES:
        data = link.lend(data)
    elif copy:
        data = bytes(data)
    return tensor._name, tensor._code, tensor._shape, data


def response_to_wire(
    link: SharedMemoryLink, response: InferenceResponse, names: Any, *, copy: bool = False
) -> Any:
    """A response as it travels. Under the channel's lock.

    Args:
        names: outputs to keep.
        copy: as in `tensor_to_wire`.
    """
    error = response._error
    if error is not None:
        return (), response._parameters, error._to_wire()
    first_token = link.next_token
    try:
        tensors = [
            tensor_to_wire(link, tensor, copy=copy)
            for tensor in response._outputs
            if tensor._name in names
        ]
    except Exception as failure:  # text that cannot be encoded, memory that cannot be had
        link.take_back(first_token)
        return (), None, (_INTERNAL, f"output of the model cannot be sent: {failure}")
    return tensors, response._parameters, None


def response_from_wire(link: SharedMemoryLink, item: Any) -> InferenceResponse:
    """The response of another model."""
    tensors, parameters, error = item
    try:
        outputs = tensors_from_wire(link, tensors)
    except OSError as failure:
        link.decline(tensors)
        outputs, error = [], (_INTERNAL, f"response cannot be read: {failure}")
    return InferenceResponse._from_wire(outputs, parameters, error)


def request_to_wire(link: SharedMemoryLink, request: InferenceRequest) -> Any:
    """A request for another model. Under the channel's lock."""
    fields = (
        request._request_id, request._correlation_id, request._flags, request._timeout,
        request._priority, request._parameters, request._output_names, request._trace,
    )  # fmt: skip
    return [tensor_to_wire(link, tensor) for tensor in request._inputs], fields
