"""What was decoded and encoded before, remembered by its bytes. Pure.

A client that calls one model again and again sends the same JSON each time, only the binary data
differ, and gets the same JSON back. Looking both up costs a tenth of parsing and writing them.
Nothing that depends on more than the bytes is remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from npuserve.protocol.http.reply import BINARY, Reply
from npuserve.tensor import Tensor

if TYPE_CHECKING:
    from npuserve.protocol.http.codec import InferMessage
    from npuserve.request import Checked
    from npuserve.response import InferenceResponse

_MAX_TEMPLATES = 512
_MAX_TEXT_BYTES = 4096
_MAX_REPLIES = 32  # of one template: clients with variable shapes get many


class _KnownReply(NamedTuple):
    """A reply without its data: head for a kept connection, headers in it, JSON text."""

    head: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    text: bytes


class InferTemplate:
    """A request whose inputs all lie in the binary data, without these data.

    Attributes:
        message: decoded; its own `inputs` are those of the first such request and not used.
            Shared by all requests of the template: never changed.
        requested_outputs: names, as listed.
        binary_size: bytes that must follow the JSON.
        checked: the core's proof that such requests are valid, once it has seen one.
    """

    __slots__ = (
        "_places", "_replies", "binary_size", "checked", "message", "requested_outputs",
    )  # fmt: skip

    def __init__(self, message: InferMessage) -> None:
        self.message = message
        self.requested_outputs = tuple(message.outputs)
        self.checked: Checked | None = None
        self._places: list[tuple[str, str, tuple[int, ...], int, int]] = []
        self._replies: dict[tuple[Any, ...], _KnownReply] = {}
        end = 0
        for tensor in message.inputs.values():
            start, end = end, end + len(tensor.data)
            self._places.append((tensor.name, tensor.datatype, tuple(tensor.shape), start, end))
        self.binary_size = end
        message.inputs = {}

    def inputs(self, binary: memoryview) -> dict[str, Tensor]:
        """The request's tensors, as views of its own binary data."""
        return {
            name: Tensor(name, datatype, shape, binary[start:end])
            for name, datatype, shape, start, end in self._places
        }

    def reply(self, response: InferenceResponse) -> Reply | None:
        """The reply to a response whose like was encoded before; None if there was none."""
        known = self._replies.get(_signature(response))
        if known is None:
            return None
        parts = [known.text, *[tensor.data for tensor in response.outputs]]
        return Reply(200, parts, BINARY, known.headers, known_head=known.head)

    def remember_reply(self, response: InferenceResponse, reply: Reply) -> None:
        """Keep the JSON and the headers of a reply without anything but binary outputs."""
        if response.parameters or reply.content_type is not BINARY:
            return
        for tensor in response.outputs:
            output = self.message.output(tensor.name)
            if output is None or not output.binary or output.classification:
                return
        if len(self._replies) >= _MAX_REPLIES:
            self._replies.clear()
        self._replies[_signature(response)] = _KnownReply(
            reply.head(keep_alive=True), tuple(reply.headers), bytes(reply.parts[0])
        )


class Templates:
    """Templates by the JSON text of the request; bounded, so clients cannot make it grow."""

    def __init__(self) -> None:
        self._known: dict[bytes, InferTemplate] = {}
        self.get = self._known.get

    def remember(self, text: bytes, document: Any, message: InferMessage) -> InferTemplate | None:
        """Keep a decoded request if others may follow with the same text.

        Not one with an id or of a sequence, whose text hardly comes twice, nor one with inputs
        that do not lie in the binary data.
        """
        if (
            len(text) > _MAX_TEXT_BYTES
            or message.id
            or message.correlation_id
            or any(output.region is not None for output in message.outputs.values())
            or not all(_is_binary(entry) for entry in document["inputs"])
        ):
            return None
        if len(self._known) >= _MAX_TEMPLATES:
            self._known.clear()
        template = self._known[text] = InferTemplate(message)
        return template


def _is_binary(entry: dict[str, Any]) -> bool:
    parameters = entry.get("parameters")
    return type(parameters) is dict and parameters.get("binary_data_size") is not None


def _signature(response: InferenceResponse) -> tuple[Any, ...]:
    """All that a reply without parameters says besides the data."""
    outputs = response.outputs
    if response.parameters:
        return ()
    if len(outputs) == 1:
        (tensor,) = outputs
        return (
            response.model_name, response.model_version, tensor.name, tensor.datatype,
            len(tensor.data), *tensor.shape,
        )  # fmt: skip
    return (
        response.model_name,
        response.model_version,
        *[(t.name, t.datatype, len(t.data), *t.shape) for t in outputs],
    )
