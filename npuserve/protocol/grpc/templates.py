"""Short cuts for messages that come again and again. Pure.

Clients repeat themselves: all but the raw tensor bytes of a small request is the same as in the
one before, and so is the answer's. What was decoded or encoded once is kept and found by a
comparison of bytes. The slow way in `codec.py` gives the same result; tests run both.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npuserve.buffer_pool import LARGE_TENSOR_BYTES
from npuserve.protocol.grpc.codec import (
    RAW_OUTPUT_TAG,
    check_response_size,
    infer_response_message,
)
from npuserve.protocol.grpc.raw_contents import varint
from npuserve.response import InferenceResponse
from npuserve.tensor import Buffer, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npuserve._proto import grpc_service_pb2 as pb
    from npuserve.protocol.grpc.codec import Parts
    from npuserve.request import Checked

_RAW_INPUT_TAG = b"\x3a"  # ModelInferRequest.raw_input_contents = 7, length-delimited
_ID_TAG = b"\x1a"  # ModelInferResponse.id = 3, length-delimited
_MAX_ENTRIES = 1024
# Short enough to end before the first tensor's bytes in any request.
_KEY_BYTES = 12


# `triton_final_response` as the parameters field of a response: fields may stand in any order.
_FINAL_PARAMETER = {
    value: infer_response_message(InferenceResponse([]), "", value).SerializeToString()
    for value in (False, True)
}


@dataclass(slots=True)
class RequestTemplate:
    """A request without its tensor bytes.

    Attributes:
        prefix: everything before the first tensor's bytes.
        separators: (offset, bytes) of what stands between tensors.
        inputs: name, datatype, shape, start and end of the bytes of each.
        checked: the core's proof that such requests are valid, once it has seen one.
    """

    prefix: bytes
    separators: tuple[tuple[int, bytes], ...]
    model_name: str
    version: int
    requested_outputs: tuple[str, ...]
    inputs: tuple[tuple[str, str, tuple[int, ...], int, int], ...]
    checked: Checked | None = None

    def tensors(self, data: Buffer) -> dict[str, Tensor]:
        """The inputs of a message that matched; they are small and copied."""
        return {
            name: Tensor(name, datatype, shape, data[start:end])
            for name, datatype, shape, start, end in self.inputs
        }


class RequestTemplates:
    """Templates of small requests, found by length and the beginning of the model's name."""

    def __init__(self) -> None:
        self._templates: dict[tuple[int, bytes], RequestTemplate] = {}

    def match(self, data: Buffer) -> RequestTemplate | None:
        """The template that `data` is an instance of, if there is one."""
        if not isinstance(data, bytes):
            return None
        template = self._templates.get((len(data), data[:_KEY_BYTES]))
        if template is None or not data.startswith(template.prefix):
            return None
        for offset, separator in template.separators:
            if not data.startswith(separator, offset):
                return None
        return template

    def learn(
        self, data: Buffer, message: pb.ModelInferRequest, raw: Sequence[Buffer], version: int
    ) -> None:
        """Keep a template of this request if it is one of the plain kind."""
        if not isinstance(data, bytes) or not _is_plain(message, raw):
            return
        spans = _trailing_spans(data, raw)
        if not spans:
            return
        if len(self._templates) >= _MAX_ENTRIES:
            self._templates.clear()
        self._templates[len(data), data[:_KEY_BYTES]] = RequestTemplate(
            data[: spans[0][0]],
            tuple((end, data[end:start]) for (_, end), (start, _) in itertools.pairwise(spans)),
            message.model_name,
            version,
            tuple([output.name for output in message.outputs]),
            tuple(
                (item.name, item.datatype, tuple(item.shape), start, end)
                for item, (start, end) in zip(message.inputs, spans, strict=True)
            ),
        )


def _is_plain(message: pb.ModelInferRequest, raw: Sequence[Buffer]) -> bool:
    """No id, parameters, typed contents or shared memory: nothing that differs between requests."""
    return (
        not message.id
        and not message.parameters
        and len(raw) == len(message.inputs) > 0
        and not any(item.parameters or item.HasField("contents") for item in message.inputs)
        and not any(output.parameters for output in message.outputs)
        and len({item.name for item in message.inputs}) == len(raw)
    )


def _trailing_spans(data: bytes, raw: Sequence[Buffer]) -> list[tuple[int, int]]:
    """Where the raw contents lie, if they end the message as protobuf writes them; else []."""
    spans: list[tuple[int, int]] = []
    end = len(data)
    for each in reversed(raw):
        start = end - len(each)
        head = _RAW_INPUT_TAG + varint(len(each))
        if not each or data[start:end] != each or not data.endswith(head, 0, start):
            return []
        spans.append((start, end))
        end = start - len(head)
    return spans[::-1]


class ResponseHeads:
    """Serialised responses without id and tensor bytes, by model version and outputs."""

    def __init__(self) -> None:
        self._heads: dict[object, bytes] = {}

    def encode(self, response: InferenceResponse, request_id: str, final: bool | None) -> Parts:
        """The bytes of a response that has no parameters; large tensors are not copied.

        Args:
            final: value of `triton_final_response`; None leaves it out.

        Raises:
            InvalidArgumentError: larger than a gRPC message can be.
        """
        outputs = response.outputs
        key = (
            response.model_name,
            response.model_version,
            tuple([(t.name, t.datatype, tuple(t.shape)) for t in outputs]),
        )
        head = self._heads.get(key)
        if head is None:
            head = self._learn(key, response)
        if request_id:
            data = request_id.encode()
            head += _ID_TAG + varint(len(data)) + data
        if final is not None:
            head += _FINAL_PARAMETER[final]
        parts: Parts = [head]
        size = 0
        for tensor in outputs:
            size += len(tensor.data)
            parts.append(RAW_OUTPUT_TAG + varint(len(tensor.data)))
            parts.append(tensor.data)
        if size < LARGE_TENSOR_BYTES:
            return [b"".join(parts)]
        check_response_size(size)
        return parts

    def _learn(self, key: object, response: InferenceResponse) -> bytes:
        message = infer_response_message(response, "")
        for tensor in response.outputs:
            message.outputs.add(name=tensor.name, datatype=str(tensor.datatype), shape=tensor.shape)
        if len(self._heads) >= _MAX_ENTRIES:
            self._heads.clear()
        head = self._heads[key] = message.SerializeToString()
        return head
