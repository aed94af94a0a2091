"""Writes configurations in the text format, in any of the ways that Triton's parser reads."""

from __future__ import annotations

import re
from random import Random
from typing import Any

_SPACES = ["", " ", "\n", "\t", " # a comment { ' \"\n", "\r\n"]
_GAPS = _SPACES[1:]
_TRUE, _FALSE = ("true", "True", "t", "1", "0x1", "01"), ("false", "False", "f", "0", "00", "0x0")
_NAMED = {"\n": "n", "\r": "r", "\t": "t", "\\": "\\", "'": "'", '"': '"', "?": "?", "\a": "a"}


def spelled(random: Random, message: Any) -> str:
    """The fields of a message; `random` decides how each is written."""
    return "".join(_field(random, field, value) for field, value in message.ListFields())


def _field(random: Random, field: Any, value: Any) -> str:
    if not field.is_repeated:
        return _entry(random, field, [value], as_list=False)
    values = _map_entries(field, value) if _is_map(field) else list(value)
    if random.choice([False, True]):
        return "".join(_entry(random, field, [each], as_list=False) for each in values)
    return _entry(random, field, values, as_list=True)


def _entry(random: Random, field: Any, values: list[Any], *, as_list: bool) -> str:
    """`name: value` or `name: [value, value]`."""
    # Words and numbers must not run into each other.
    colon = random.choice([":", " :", ":\n"] if not field.message_type else ["", ":"])
    texts = [_value(random, field, value) for value in values]
    comma = random.choice(_SPACES) + "," + random.choice(_SPACES)
    body = f"[{comma.join(texts)}]" if as_list else texts[0]
    end = random.choice([*_GAPS, ",", ";", " ; "])
    return f"{field.name}{colon}{random.choice(_SPACES)}{body}{end}"


def _value(random: Random, field: Any, value: Any) -> str:
    if field.message_type:
        inner = _map_entry(random, field, value) if _is_map(field) else spelled(random, value)
        first, last = random.choice([("{", "}"), ("<", ">")])
        return f"{first}{random.choice(_SPACES)}{inner}{last}"
    if field.enum_type:
        number = _integer(random, value)
        name: str = field.enum_type.values_by_number[value].name
        return random.choice([name, number])
    if isinstance(value, bool):
        return random.choice(_TRUE if value else _FALSE)
    if isinstance(value, str):
        return _text(random, value)
    if isinstance(value, float):
        return _signed(random, f"{abs(value)!r}", value) + random.choice(["", "f", "F"])
    return _integer(random, value)


def _is_map(field: Any) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def _map_entries(field: Any, value: Any) -> list[tuple[Any, Any]]:
    return [(key, value[key]) for key in value]


def _map_entry(random: Random, field: Any, pair: tuple[Any, Any]) -> str:
    fields = field.message_type.fields_by_name
    parts = [
        _entry(random, fields[name], [each], as_list=False)
        for name, each in zip(("key", "value"), pair, strict=True)
    ]
    return "".join(parts if random.choice([False, True]) else parts[::-1])


def _integer(random: Random, value: int) -> str:
    form = random.choice(["{}", "0{:o}", "0x{:x}", "0X{:X}"])
    return _signed(random, form.format(abs(value)), value)


def _signed(random: Random, digits: str, value: float) -> str:
    return "-" + random.choice(_SPACES) + digits if value < 0 else digits


def _text(random: Random, value: str) -> str:
    """In one string or several that stand side by side."""
    cut = random.choice(range(len(value) + 1))
    pieces = [value[:cut], value[cut:]] if random.choice([False, True]) else [value]
    return random.choice(_SPACES).join(_string(random, piece) for piece in pieces)


def _string(random: Random, value: str) -> str:
    quote = random.choice("'\"")
    return quote + "".join(_character(random, each, quote) for each in value) + quote


def _character(random: Random, character: str, quote: str) -> str:
    escaped = [rf"\U{ord(character):08x}", _as_json(character)]
    escaped.append("".join(rf"\{byte:03o}" for byte in character.encode()))
    if character in _NAMED:
        escaped.append("\\" + _NAMED[character])
    if not re.match(r"[\n\\\0]", character) and character != quote:
        escaped.insert(0, character)
    return random.choice(escaped)


def _as_json(character: str) -> str:
    r"""`\uXXXX`, of characters beyond 16 bits two of them."""
    units = character.encode("utf-16-be").hex()
    return "".join(rf"\u{units[i : i + 4]}" for i in range(0, len(units), 4))
