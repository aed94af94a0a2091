"""What is wrong with a configuration, and where in its file that is. Pure."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Comments, strings, words and numbers, then what structures them.
_TOKEN = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[\w.+-]+|[][{}<>:,;/]""")

_DOT = re.compile(r"\.(?![^\[]*\])")  # not within brackets

_OPENING, _CLOSING, _SEPARATORS, _QUOTES = ("{", "<"), ("}", ">"), (",", ";"), ("'", '"')


class Problem(NamedTuple):
    """A broken rule.

    Attributes:
        field: path of the field it is about, as `input[1].dims` or `parameters["key"]`.
        text: in Triton's words.
    """

    field: str
    text: str


def under(field: str, texts: Iterable[str]) -> Iterator[Problem]:
    """Problems of one field or block."""
    return (Problem(field, text) for text in texts)


class FieldLines:
    """The lines of the fields of a config.pbtxt.

    protobuf's parser keeps no positions, so the text is scanned once more, after it has parsed.
    """

    def __init__(self, text: str) -> None:
        self._lines: dict[str, int] = {}
        self._tokens = _tokens(text)
        self._token, self._line = "", 0
        self._next()
        self._read_block("")

    def find(self, field: str) -> int:
        """Line of the field, or of the innermost block around it that is there; 0 for none.

        Entries of a map are found by number or, as `parameters["key"]`, by a text.
        """
        names = [name if name.endswith("]") else f"{name}[0]" for name in _DOT.split(field)]
        while names:
            line = self._lines.get(".".join(names))
            if line is not None:
                return line
            names.pop()
        return 0

    def _next(self) -> None:
        self._token, self._line = next(self._tokens, ("", self._line))

    def _read_block(self, prefix: str) -> None:
        seen: Counter[str] = Counter()
        while self._token and self._token not in _CLOSING:
            name, line = self._token, self._line
            self._next()
            if self._token == ":":
                self._next()
            if self._token != "[":
                self._read_value(f"{prefix}{name}[{seen[name]}]", line)
                seen[name] += 1
                continue
            self._next()
            while self._token not in ("]", ""):
                self._read_value(f"{prefix}{name}[{seen[name]}]", self._line)
                seen[name] += 1
            self._next()
            self._skip_separators()

    def _read_value(self, path: str, line: int) -> None:
        self._lines[path] = line
        if self._token in _OPENING:
            self._next()
            self._read_block(f"{path}.")
            self._next()
        else:
            is_text = self._token.startswith(_QUOTES)
            if is_text and path.endswith("].key[0]"):
                entry = path.removesuffix(".key[0]")
                key = f'{entry[: entry.rindex("[")]}["{self._token[1:-1]}"]'
                self._lines.setdefault(key, self._lines[entry])
            self._next()
            while is_text and self._token.startswith(_QUOTES):  # split string literals
                self._next()
        self._skip_separators()

    def _skip_separators(self) -> None:
        while self._token in _SEPARATORS:
            self._next()


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    line, position = 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", position, match.start())
        position = match.start()
        if not match[0].startswith("#"):
            yield match[0], line
