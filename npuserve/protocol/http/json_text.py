"""JSON text to values and back, with the NaN and Infinity literals that Triton reads and writes.

orjson does the work; it is strict, so the standard library's parser gets what orjson refuses and
decides whether that is an error. Pure.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from npuserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from npuserve.tensor import Buffer

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


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


def dump_json(value: Any, *, finite: bool = True) -> bytes:
    """JSON text of a value that may hold NumPy arrays.

    Args:
        value: dicts, lists, texts, numbers and arrays.
        finite: False if it may hold NaN or infinities: orjson would turn them into null.
    """
    if finite:
        try:
            return orjson.dumps(value, option=_OPTIONS)
        except TypeError:  # an integer beyond 64 bits, or a lone surrogate
            pass
    return json.dumps(value, default=_plain, separators=(",", ":"), ensure_ascii=not finite).encode(
        errors="replace"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")
