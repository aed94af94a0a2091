"""JSON text to values and back, with the NaN and Infinity literals that Triton reads and writes.

orjson does the work; it is strict, so the standard library's parser gets what orjson refuses and
decides whether that is an error. Pure.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from npuserve.errors import InvalidArgumentError
from npuserve.protocol.tensor_codec import is_finite

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npuserve.tensor import Buffer

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
_PIECE_ELEMENTS = 16 * 1024


def parse_json(text: Buffer) -> Any:
    """The value of a JSON document.

    Raises:
        InvalidArgumentError: malformed text, no UTF-8, or nested too deep.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _parse_leniently(text)


def _parse_leniently(text: Buffer) -> Any:
    try:
        return json.loads(bytes(text))
    except RecursionError:
        reason = "JSON nesting depth exceeds maximum allowed limit"
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at {error.pos}" if len(text) else "The document is empty. at 0"
    except (UnicodeDecodeError, ValueError) as error:  # ValueError: more digits than int() takes
        reason = str(error)
    # Differs from Triton: malformed JSON is the client's fault, 400 instead of 500.
    raise InvalidArgumentError(f"failed to parse the request JSON buffer: {reason}")


def dump_json(value: Any) -> bytes:
    """JSON text of dicts, lists, texts, finite numbers and what `json_data` made."""
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except TypeError:  # an integer beyond 64 bits, or a lone surrogate
        text = json.dumps(value, default=_plain, separators=(",", ":"))
        return text.encode()


def json_data(values: NDArray[Any] | list[str]) -> Any:
    """Elements of a tensor in a form that `dump_json` takes.

    Large arrays become text here, piece by piece: in a thread, others run in between. NaN and
    infinities do too, as orjson would turn them into null.
    """
    if isinstance(values, list) or (len(values) <= _PIECE_ELEMENTS and is_finite(values)):
        return values
    pieces = (values[i : i + _PIECE_ELEMENTS] for i in range(0, len(values), _PIECE_ELEMENTS))
    return orjson.Fragment(b"[%b]" % b",".join(_piece_text(piece)[1:-1] for piece in pieces))


def json_scalar(value: Any) -> Any:
    """As `json_data`, for one element."""
    if isinstance(value, float) and not math.isfinite(value):
        return orjson.Fragment(json.dumps(value))
    return value


def _piece_text(piece: NDArray[Any]) -> bytes:
    if is_finite(piece):
        return orjson.dumps(np.ascontiguousarray(piece), option=_OPTIONS)
    return json.dumps(piece.tolist(), separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, orjson.Fragment):
        return json.loads(orjson.dumps(value))
    raise TypeError(f"{type(value).__name__} has no JSON form")
