"""config.pbtxt into a ModelConfig, and what to write instead where it does not parse.

protobuf's own parser does the work. Added here are spellings that only its C++ twin knows, which
is Triton's, `KIND_NPU`, the position as `file:line:column`, and advice: the nearest name, or the
block a misplaced field belongs to.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf import text_format

from npuserve.errors import InvalidArgumentError
from npuserve.model_config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

_Descriptor = Any  # protobuf has two classes of descriptors and types neither

_TOKEN = re.compile(
    r"""
    \#[^\n]*                                                       # a comment
    | (?P<string> "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
    | - (?P<gap> (?:\s|\#[^\n]*+)++ ) (?P<number> [\w.]+(?:(?<=[eE])[+-]\w+)? )
    | (?P<word> [\w.]+(?:(?<=[eE])[+-]\w+)? )
    """,
    re.VERBOSE | re.ASCII,
)
_OCTAL = re.compile(r"0[xX](?P<bit>0*[01])|0(?P<octal>[0-7]+)")
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(
    rf"""
    \\ (?: (?P<plain> [abfnrtv\\'"] | x{_HEX} | [0-3][0-7]{{2}} | [0-7]{{1,2}} (?![0-7]) )
    | u (?P<units> [dD][89abAB]{_HEX}{{2}} \\u [dD][c-fC-F]{_HEX}{{2}} | {_HEX}{{4}} )
    | U (?P<code> {_HEX}{{8}} )
    | (?P<mark> \? ) )?
    """,
    re.VERBOSE,
)
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

    # Differs from Triton: `+4`, `0b1` and `1_000`, octal numbers for floats and white space beyond
    # ASCII are read too, as protobuf's parser for Python does; nothing else can be meant.

    Args:
        text: contents of a config.pbtxt; empty is valid.
        source: its path, for errors.

    Raises:
        InvalidArgumentError: `failed to read text proto from <source>:<line>:<column>: ...`.
    """
    config = ModelConfig()
    try:
        text_format.Parse(_TOKEN.sub(_respelled, text.removeprefix("\ufeff")), config)
    except text_format.ParseError as error:
        raise InvalidArgumentError(_explain(error, source)) from error
    except (RecursionError, ValueError) as error:
        # protobuf lets these through for absurd nesting and for values out of range.
        raise InvalidArgumentError(f"failed to read text proto from {source}: {error}") from error
    return config


def _respelled(match: re.Match[str]) -> str:
    """A token as protobuf for Python reads it. Where the others are does not change."""
    word, string, gap = match.group("word", "string", "gap")
    if word == "KIND_NPU":  # a readable alias; on the wire there is KIND_GPU only
        return "KIND_GPU"
    if word and (number := _OCTAL.fullmatch(word)):  # a boolean, or an enumeration's number
        return str(int(number["bit"] or number["octal"], 8)).ljust(len(word))
    if string and "\\" in string:
        return _ESCAPE.sub(partial(_respelled_escape, match), string).ljust(len(string))
    if gap:
        return f"-{match['number']}{gap}"
    return match[0]


def _respelled_escape(string: re.Match[str], escape: re.Match[str]) -> str:
    """What protobuf for Python would misread, as the character itself."""
    plain, units, code, mark = escape.group("plain", "units", "code", "mark")
    if plain:
        return escape[0]
    with contextlib.suppress(UnicodeDecodeError):  # no character
        if units:  # two where JSON has two
            return _character(bytes.fromhex(units.replace(r"\u", "")).decode("utf-16-be"))
        if code:
            return _character(bytes.fromhex(code).decode("utf-32-be"))
    if mark:
        return mark
    before = string.string[: string.start() + escape.start()]
    raise text_format.ParseError(
        "Invalid escape sequence in string literal. Write two backslashes for one",
        before.count("\n") + 1,
        len(before) - before.rfind("\n") + 1,
    )


def _character(text: str) -> str:
    """A character inside of quotes."""
    return rf"\{ord(text):03o}" if text < " " or text in "\"'\\" else text


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
