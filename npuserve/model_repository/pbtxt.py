"""config.pbtxt into a ModelConfig, and what to write instead where it does not parse.

protobuf's own parser does the work: it knows every spelling of the text format. Added here are
`KIND_NPU`, the position as `file:line:column`, and advice: the nearest name, or the block a
misplaced field belongs to.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from google.protobuf import text_format

from npuserve.errors import InvalidArgumentError
from npuserve.model_config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

_Descriptor = Any  # protobuf has two classes of descriptors and types neither

# Comments, then strings, then the word itself: only the last may be replaced.
_KIND_NPU = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\bKIND_NPU\b""")
_COMMENT_OR_STRING = re.compile(rb"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""")

_POSITION = re.compile(r"^(\d+):(\d+) : ?", re.ASCII)
_UNKNOWN_FIELD = re.compile(r'Message type "([\w.]+)" has no field named "([^"]*)"')
_UNKNOWN_VALUE = re.compile(r'Enum type "([\w.]+)" has no value named ([\w.]+)')

# What people write for a datatype, where the nearest name would mislead.
_DATATYPE_SLIPS = {
    "BYTES": "TYPE_STRING",
    "TYPE_BYTES": "TYPE_STRING",
    "TYPE_STR": "TYPE_STRING",
    "TYPE_FLOAT": "TYPE_FP32",
    "TYPE_FLOAT16": "TYPE_FP16",
    "TYPE_FLOAT32": "TYPE_FP32",
    "TYPE_FLOAT64": "TYPE_FP64",
    "TYPE_DOUBLE": "TYPE_FP64",
    "TYPE_INT": "TYPE_INT32",
    "TYPE_LONG": "TYPE_INT64",
}


def decode_config(content: bytes) -> str:
    """The text of a config.pbtxt: UTF-8, with comments in any encoding, such as GBK.

    # Differs from Triton: there a value may be no UTF-8 either, and no client can read it.

    Raises:
        UnicodeDecodeError: other bytes that are no UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError:
        return _COMMENT_OR_STRING.sub(_readable_comment, content).decode()


def _readable_comment(match: re.Match[bytes]) -> bytes:
    is_comment = match[0].startswith(b"#")
    return match[0].decode(errors="replace").encode() if is_comment else match[0]


def parse_config(text: str, source: str) -> ModelConfig:
    """Parse the text format.

    Args:
        text: contents of a config.pbtxt; empty is valid.
        source: its path, for errors.

    Raises:
        InvalidArgumentError: `failed to read text proto from <source>:<line>:<column>: ...`.
    """
    config = ModelConfig()
    readable = _KIND_NPU.sub(_npu_to_gpu, text.removeprefix("\ufeff"))
    try:
        text_format.Parse(readable, config)
    except text_format.ParseError as error:
        raise InvalidArgumentError(_explain(error, source)) from error
    except (RecursionError, ValueError) as error:
        # protobuf lets these through for absurd nesting and for values out of range.
        raise InvalidArgumentError(f"failed to read text proto from {source}: {error}") from error
    return config


def _npu_to_gpu(match: re.Match[str]) -> str:
    """KIND_NPU is a readable alias; on the wire there is KIND_GPU only. Columns stay."""
    return "KIND_GPU" if match[0] == "KIND_NPU" else match[0]


def _explain(error: text_format.ParseError, source: str) -> str:
    message = str(error)
    position = _POSITION.match(message)
    where = f"{source}:{position[1]}:{position[2]}" if position else source
    reason = _POSITION.sub("", message).strip().rstrip(".")
    return f"failed to read text proto from {where}: {reason}{_advice(reason)}"


def _advice(reason: str) -> str:
    """A sentence on what to write instead, beginning with `. `; "" if there is none."""
    field = _UNKNOWN_FIELD.search(reason)
    if field:
        return _field_advice(field[1], field[2])
    value = _UNKNOWN_VALUE.search(reason)
    if value:
        return _value_advice(value[1], value[2])
    if "should not have multiple" in reason:
        return ". It is given twice: keep one of them"
    return ""


def _field_advice(message: str, name: str) -> str:
    block = _block_names().get(message)
    here = f" in '{block}'" if block else ""
    homes = [home for home in _homes(name) if home != block]
    if "" in homes:
        return (
            f". '{name}' does not exist{here}: it belongs to the top level of the configuration, "
            f"outside of '{block}'"
        )
    close = difflib.get_close_matches(name, _field_names(message), n=1)
    if close:
        return f". Did you mean '{close[0]}'?"
    if homes:
        return f". '{name}' belongs into '{homes[0]} {{ ... }}'"
    return f". Fields{here}: {', '.join(_field_names(message))}"


def _value_advice(enum: str, value: str) -> str:
    values = _enum_values(enum)
    slip = _DATATYPE_SLIPS.get(value.upper(), "")
    if slip in values:
        return f". Did you mean {slip}?"
    prefixed = [name for name in values if name.endswith(f"_{value.upper()}")]
    close = prefixed or difflib.get_close_matches(value.upper(), values, n=1)
    if close:
        return f". Did you mean {close[0]}?"
    return f". Values: {', '.join(values)}"


def _walk() -> Iterator[tuple[str, _Descriptor]]:
    """(path of field names, message type) of every block a configuration may have."""
    seen: set[str] = set()
    pending: list[tuple[str, _Descriptor]] = [("", ModelConfig.DESCRIPTOR)]
    while pending:
        path, descriptor = pending.pop(0)
        if descriptor.full_name in seen:
            continue
        seen.add(descriptor.full_name)
        yield path, descriptor
        for field in descriptor.fields:
            if field.message_type:
                below = f"{path}.{field.name}" if path else field.name
                pending.append((below, field.message_type))


def _block_names() -> dict[str, str]:
    """Type name to path: what an error calls by its type, a writer knows by its field."""
    return {descriptor.full_name: path for path, descriptor in _walk()}


def _homes(field: str) -> list[str]:
    """Blocks that have a field of this name, the outermost first."""
    return [path for path, descriptor in _walk() if field in descriptor.fields_by_name]


def _field_names(message: str) -> list[str]:
    return next(
        ([field.name for field in each.fields] for _, each in _walk() if each.full_name == message),
        [],
    )


def _enum_values(enum: str) -> list[str]:
    for _, descriptor in _walk():
        for field in descriptor.fields:
            if field.enum_type and field.enum_type.full_name == enum:
                return [value.name for value in field.enum_type.values]
    return []
