"""Parsing of large JSON requests in small steps, for a thread beside the event loop.

A JSON parser holds Python's global lock for the whole document: 60 MB of numbers would stop the
event loop for a second even from another thread. Nearly all of such a document is arrays of
numbers, so these are cut out and parsed piece by piece into NumPy arrays, and the lock is free
between two pieces. Anything unusual is left to the ordinary parser, which alone decides what is
valid. Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from npuserve.protocol.http.json_text import parse_json

if TYPE_CHECKING:
    from npuserve.tensor import Buffer

# Arrays of numbers below this are not worth cutting out.
_MIN_ARRAY_BYTES = 32 * 1024
_PIECE_BYTES = 64 * 1024

# Outside of a JSON text this is always a key: within one its quotes would be escaped.
_DATA_KEY = re.compile(rb'"data"\s*:\s*(?=[\[{])')
_NUMBERS = b"0123456789+-.eE, \t\r\n[]"
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]"))
# What piecewise parsing without brackets would not notice.
_BROKEN = re.compile(rb"\[\s*[,\]]|,\s*\]|\]\s*[^\s,\]]|[^\s,\[]\s*\[")


class _UnusualError(Exception):
    """Not a plain array of numbers: leave it to the ordinary parser."""


def parse_large_json(text: Buffer) -> Any:
    """As `parse_json`, but `data` arrays of many numbers come as flat NumPy arrays.

    Raises:
        InvalidArgumentError: malformed text.
    """
    # Not copied where that can be avoided: it is large.
    document = bytes(text) if isinstance(text, memoryview) else text
    try:
        skeleton, arrays = _cut_out_arrays(document)
        value = orjson.loads(skeleton)
        _put_back(value, arrays)
    except (_UnusualError, orjson.JSONDecodeError, OverflowError):
        return parse_json(document)
    return value


def _cut_out_arrays(document: bytes | bytearray) -> tuple[bytes, list[NDArray[Any]]]:
    """The document with an empty object in place of each large array of numbers."""
    arrays: list[NDArray[Any]] = []
    kept: list[bytes | bytearray] = []
    done = 0
    while (key := _DATA_KEY.search(document, done)) is not None:
        start = key.end()
        if document[start] == ord("{"):  # would be taken for a place holder
            raise _UnusualError
        end = _end_of_numbers(document, start)
        if end - start < _MIN_ARRAY_BYTES:
            kept.append(document[done:end])
        else:
            arrays.append(_parse_numbers(document[start:end]))
            kept += (document[done:start], b"{}")
        done = end
    kept.append(document[done:])
    return b"".join(kept), arrays


def _end_of_numbers(document: bytes | bytearray, start: int) -> int:
    """Where the array that begins at `start` ends, if it holds nothing but numbers."""
    position = start
    while position < len(document):
        piece = document[position : position + _PIECE_BYTES]
        other = piece.translate(None, _NUMBERS)
        if other:
            position += piece.index(other[:1])
            break
        position += len(piece)
    end = document.rfind(b"]", start, position) + 1
    return max(end, start + 1)


def _parse_numbers(text: bytes | bytearray) -> NDArray[Any]:
    """The numbers of one array, nested in any way."""
    pieces: list[NDArray[Any]] = []
    depth, position = 0, 0
    while position < len(text):
        end = text.find(b",", position + _PIECE_BYTES)
        end = len(text) if end < 0 else end
        piece = text[position:end]
        depth = _check_brackets(piece, depth, last=end == len(text))
        pieces.append(_parse_piece(piece))
        position = end + 1
    if depth or text.endswith(b","):
        raise _UnusualError
    return _join(pieces)


def _parse_piece(piece: bytes | bytearray) -> NDArray[Any]:
    numbers = orjson.loads(b"[" + piece.translate(None, b"[]") + b"]")
    kinds = set(map(type, numbers))
    if kinds == {int}:
        return np.array(numbers, np.int64 if max(numbers) < 2**63 else np.uint64)
    if kinds and kinds <= {int, float}:
        return np.array(numbers, np.float64)
    raise _UnusualError


def _join(pieces: list[NDArray[Any]]) -> NDArray[Any]:
    """All pieces in one array; unsigned ones do not turn the others into floats."""
    kinds = {piece.dtype.kind for piece in pieces}
    if kinds == {"i", "u"}:
        if any(piece.dtype.kind == "i" and piece.min() < 0 for piece in pieces):
            raise _UnusualError
        pieces = [piece.astype(np.uint64) for piece in pieces]
    return np.concatenate(pieces)


def _check_brackets(piece: bytes | bytearray, depth: int, *, last: bool) -> int:
    """The nesting depth after this piece, which must not come to zero before the last bracket."""
    if _BROKEN.search(piece):
        raise _UnusualError
    brackets = piece.translate(None, _NO_BRACKETS)
    while b"[]" in brackets:
        # A pair at depth 0 is only right as the outermost pair of all.
        if depth == 0 and brackets.startswith(b"[]") and (len(brackets) > 2 or not last):
            raise _UnusualError
        brackets = brackets.replace(b"[]", b"")
    closing = brackets.count(b"]")
    if closing > depth or (closing == depth and closing and (not last or b"[" in brackets)):
        raise _UnusualError
    return depth - closing + brackets.count(b"[")


def _put_back(value: Any, arrays: list[NDArray[Any]]) -> None:
    """Set the `data` of the inputs, in their order."""
    inputs = value.get("inputs") if type(value) is dict else None
    if type(inputs) is not list:
        raise _UnusualError
    waiting = iter(arrays)
    for entry in inputs:
        if type(entry) is dict and entry.get("data") == {}:
            entry["data"] = next(waiting, {})
    if next(waiting, None) is not None:
        raise _UnusualError
