"""The protobuf wire format as far as large tensors need it. Pure.

A large tensor would be copied twice by protobuf: out of the message and into a Python object. So
raw contents are cut out of a request as views before protobuf reads the rest, and written
between the pieces of a response by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from npuserve.buffer_pool import LARGE_TENSOR_BYTES
from npuserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from npuserve.tensor import Buffer

_RAW_INPUT_FIELD = 7  # ModelInferRequest.raw_input_contents
_RAW_ALIGNMENT_BYTES = 64
# Top-level fields of a large message: a request has a few for each tensor. Without a limit, two
# bytes each would keep the event loop busy for minutes.
_MAX_FIELDS = 10_000
# Bytes of a value by wire type, where that is fixed.
_FIXED_BYTES = {1: 8, 5: 4}


def padding_for_alignment(prefix: memoryview) -> int:
    """Bytes to leave free before a message so that its first large raw tensor is aligned.

    Args:
        prefix: the beginning of a ModelInferRequest (of any message: garbage gives 0).
    """
    try:
        for number, start, end in _fields(prefix):
            if number == _RAW_INPUT_FIELD and end - start >= LARGE_TENSOR_BYTES:
                return -start % _RAW_ALIGNMENT_BYTES
    except InvalidArgumentError:
        pass  # cut off before any large tensor, or no such message: nothing to align
    return 0


def split_raw_contents(data: memoryview) -> tuple[bytes, list[Buffer]]:
    """The message without its raw input contents, and those as views."""
    rest: list[memoryview] = []
    raw: list[Buffer] = []
    kept_from = 0
    field_start = 0
    for number, start, end in _fields(data):
        if number == _RAW_INPUT_FIELD:
            rest.append(data[kept_from:field_start])
            raw.append(data[start:end])
            kept_from = end
        field_start = end
    if field_start != len(data):
        raise InvalidArgumentError("failed to parse ModelInferRequest: the message is cut off")
    rest.append(data[kept_from:])
    return b"".join(rest), raw


def _fields(data: memoryview) -> Iterable[tuple[int, int, int]]:
    """(field number, start, end) of the length-delimited value of each top-level field.

    Fields of other wire types come as number 0. The last one may reach past the data: that is
    how `padding_for_alignment` sees a tensor of which only the beginning has arrived.

    Raises:
        InvalidArgumentError: not the encoding of a protobuf message.
    """
    offset, size = 0, len(data)
    fields = 0
    while offset < size:
        fields += 1
        if fields > _MAX_FIELDS:
            raise InvalidArgumentError(f"the message has more than {_MAX_FIELDS} fields")
        tag, offset = _read_varint(data, offset)
        wire_type = tag & 7
        if wire_type == 2:
            length, start = _read_varint(data, offset)
            offset = start + length
            yield tag >> 3, start, offset
            continue
        if wire_type == 0:
            _, offset = _read_varint(data, offset)
        elif wire_type in _FIXED_BYTES:
            offset += _FIXED_BYTES[wire_type]
        else:
            raise InvalidArgumentError(f"protobuf wire type {wire_type} is not supported")
        yield 0, offset, offset


def _read_varint(data: memoryview, offset: int) -> tuple[int, int]:
    value = shift = 0
    for index in range(offset, min(offset + 10, len(data))):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    raise InvalidArgumentError("a protobuf integer is cut off or longer than 10 bytes")


def varint(value: int) -> bytes:
    """A non-negative integer as protobuf writes it."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
