"""JSON text to values and back, with the NaN and Infinity literals that Triton reads and writes.

orjson does the work; it is strict, so the standard library's parser gets what orjson refuses and
decides whether that is an error. Pure.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from npuserve.errors import InvalidArgumentError
from npuserve.protocol.tensor_codec import is_finite

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from npuserve.tensor import Buffer

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
_PIECE_ELEMENTS = 16 * 1024

_MAX_DIGITS = 20  # of a 64-bit integer, with its sign

# Triton's other spellings of NaN and Infinity, and the strings in which they are none.
_SHORT_FORMS = ("Inf", "-Inf", "-NaN")
_SHORT_FORM = re.compile(r'"(?:\\.|[^"\\])*"|-NaN|Inf(?!inity)')


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
        return _loads(bytes(text).decode("utf-8-sig"))  # Triton skips a byte order mark, too
    except RecursionError:
        reason = "JSON nesting depth exceeds maximum allowed limit"
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at {error.pos}" if len(text) else "The document is empty. at 0"
    except UnicodeEncodeError:
        reason = "The surrogate pair in string is invalid."
    except ValueError as error:  # no UTF-8, or a number out of range
        reason = str(error)
    # Differs from Triton: malformed JSON is the client's fault, 400 instead of 500; so is a text
    # that is no UTF-8 or goes on after a zero byte, which Triton takes.
    raise InvalidArgumentError(f"failed to parse the request JSON buffer: {reason}")


def _loads(text: str) -> Any:
    """The value as orjson would give it if it knew NaN and Infinity."""
    try:
        value = json.loads(text, parse_float=_finite, parse_int=_integer)
    except json.JSONDecodeError as error:
        if not text.startswith(_SHORT_FORMS, error.pos):
            raise
        value = json.loads(
            _SHORT_FORM.sub(_long_form, text), parse_float=_finite, parse_int=_integer
        )
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # raises if there is a lone surrogate
    return value


def _long_form(match: re.Match[str]) -> str:
    return {"-NaN": "NaN", "Inf": "Infinity"}.get(match[0], match[0])


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("Number too big to be stored in double.")
    return number


def _integer(digits: str) -> int | float:
    """As everywhere in JSON here, integers have 64 bits and larger ones are numbers like others."""
    number = int(digits) if len(digits) <= _MAX_DIGITS else None
    if number is None or not -(2**63) <= number < 2**64:
        return _finite(digits)
    return number


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


def json_scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """As `json_scalar`, for all values."""
    return {key: json_scalar(value) for key, value in values.items()}


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
