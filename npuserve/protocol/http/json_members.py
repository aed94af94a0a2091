"""Members of JSON objects, checked one by one, with Triton's words for what is wrong. Pure.

Every function raises `InvalidArgumentError` that names the member.
"""

from __future__ import annotations

from typing import Any

from npuserve.errors import InvalidArgumentError

_MAX_DIM = 2**63 - 1
_UINT64_MAX = 2**64 - 1


def objects(value: Any, key: str) -> list[dict[str, Any]]:
    """The value as a list of objects."""
    if type(value) is not list:
        raise wrong_kind(key, "array")
    for entry in value:
        if type(entry) is not dict:
            raise wrong_kind(key, "object")
    return value


def text_member(entry: dict[str, Any], key: str) -> str:
    """The text that an object has under this key."""
    if key not in entry:
        raise missing_member(key)
    return text(entry[key], key)


def shape_member(entry: dict[str, Any]) -> list[int]:
    """The `shape` of an object: dimensions that are not negative."""
    if "shape" not in entry:
        raise missing_member("shape")
    shape = entry["shape"]
    if type(shape) is not list:
        raise wrong_kind("shape", "array")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= _MAX_DIM:
            raise wrong_kind("shape", "unsigned-integer")
    return shape


def text(value: Any, key: str) -> str:
    """The value as a text."""
    if type(value) is not str:
        raise wrong_kind(key, "string")
    return value


def unsigned(value: Any, key: str) -> int:
    """The value as an integer from 0 to 2**64 - 1."""
    if type(value) is not int or not 0 <= value <= _UINT64_MAX:
        raise wrong_kind(key, "unsigned-integer")
    return value


def boolean(value: Any, key: str) -> bool:
    """The value as a boolean."""
    if type(value) is not bool:
        raise wrong_kind(key, "boolean")
    return value


def wrong_kind(key: str, kind: str) -> InvalidArgumentError:
    """The error for a value of another kind than `kind`."""
    # Differs from Triton: 400 instead of 500 for a value of the wrong kind.
    return InvalidArgumentError(
        f"Unable to parse '{key}': attempt to access JSON non-{kind} as {kind}"
    )


def missing_member(key: str) -> InvalidArgumentError:
    """The error for a member that is not there."""
    return InvalidArgumentError(
        f"Unable to parse '{key}': attempt to access non-existing object member '{key}'"
    )
