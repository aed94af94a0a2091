"""Reading of request bodies on the application's side, within limits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from npuserve.errors import InvalidArgumentError
from npuserve.protocol.http.json_members import missing_member, wrong_kind
from npuserve.protocol.http.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from starlette.requests import Request

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")


async def read_bytes(request: Request, limit: int, flag: str = "--http-max-input-size") -> bytes:
    """The whole body.

    Raises:
        InvalidArgumentError: it has more than `limit` bytes.
    """
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise InvalidArgumentError(
                f"request JSON size of {size} bytes or more exceeds the maximum allowed input "
                f"size of {limit} bytes. Use {flag} to increase the limit."
            )
        parts.append(part)
    return b"".join(parts)


async def read_body(request: Request, model: type[B], limit: int, *, optional: bool = False) -> B:
    """The validated JSON body.

    Args:
        request: its content type does not matter.
        model: what the body has to be.
        limit: of its size in bytes.
        optional: an empty body stands for `{}`.

    Raises:
        InvalidArgumentError: malformed, too large, or members of the wrong type.
    """
    # Differs from Triton: it takes a value that is no object for an empty one.
    text = await read_bytes(request, limit)
    value = {} if optional and not text else parse_json(text)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _first_problem(error) from error


# What pydantic calls a wrong value → what Triton calls the right one.
_KINDS = {
    "bool_type": "boolean",
    "dict_type": "object",
    "greater_than_equal": "unsigned-integer",
    "int_type": "unsigned-integer",
    "list_type": "array",
    "model_type": "object",
    "string_type": "string",
}


def _first_problem(error: ValidationError) -> InvalidArgumentError:
    problem = error.errors(include_url=False)[0]
    member = ".".join(map(str, problem["loc"])) or "request body"
    if problem["type"] == "missing":
        return missing_member(member)
    if problem["type"] in _KINDS:
        return wrong_kind(member, _KINDS[problem["type"]])
    return InvalidArgumentError(f"Unable to parse '{member}': {problem['msg']}")


async def or_disconnect(
    request: Request, waiting: Coroutine[Any, Any, T], abandon: Callable[[], None]
) -> T:
    """Wait for an answer while watching the client.

    Args:
        request: its body has been read.
        waiting: must end soon after `abandon` and not raise.
        abandon: called if the client goes before the end.
    """

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        abandon()

    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch(), name="http-disconnect")
        result = await waiting
        watcher.cancel()
    return result
