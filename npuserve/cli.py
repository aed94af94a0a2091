"""Command line: flags into ServerOptions, as tritonserver parses them. Thin.

Every flag is derived from a field of `options.py`. Forms: `--flag=value`, `--flag value`, any
unambiguous prefix of a name. Errors are worded and ordered as tritonserver's are.
Source: server src/command_line_parser.cc (which uses getopt_long).
"""

from __future__ import annotations

import difflib
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from npuserve import __version__, environment, flag_values
from npuserve.errors import InvalidArgumentError, NpuserveError
from npuserve.options import SECTIONS, Flag, ServerOptions

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

PROGRAM = "npuserve"

_SCALARS: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: (flag_values.parse_bool, "<boolean>"),
    int: (flag_values.parse_int, "<integer>"),
    float: (flag_values.parse_float, "<float>"),
    str: (str, "<string>"),
}


class UsageError(Exception):
    """The command line cannot be used.

    Attributes:
        before: printed before the usage text, where getopt prints its complaints.
        after: printed behind it.
    """

    def __init__(self, after: str, before: str = "") -> None:
        super().__init__(after or before)
        self.before = before
        self.after = after


@dataclass(frozen=True)
class _Option:
    """One flag, ready to be parsed and printed."""

    name: str
    field: str
    help: str
    form: str
    parse: Callable[[Any], Any]
    collects: bool
    takes_value: bool
    no_effect: str


# Flags of older releases: name to (flag that replaces it, value for that flag).
_DEPRECATED: dict[str, tuple[str, Callable[[str], str | None]]] = {
    "strict-model-config": (
        "disable-auto-complete-config",
        lambda text: "" if flag_values.parse_bool(text) else None,
    ),
    "response-cache-byte-size": ("cache-config", lambda text: f"local,size={text}"),
    "trace-file": ("trace-config", lambda text: f"triton,file={text}"),
    "trace-level": ("trace-config", lambda text: f"level={text}"),
    "trace-rate": ("trace-config", lambda text: f"rate={text}"),
    "trace-count": ("trace-config", lambda text: f"count={text}"),
    "trace-log-frequency": ("trace-config", lambda text: f"triton,log-frequency={text}"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server as the command line says; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in words:
        print(usage())  # noqa: T201
        return 0
    if "--version" in words:  # Differs from Triton: it has no such flag.
        print(f"{PROGRAM} {__version__}")  # noqa: T201
        return 0
    try:
        options, warnings = parse(words, os.environ)
    except UsageError as error:
        _complain(*(text for text in (error.before, usage(), error.after) if text))
        return 1
    _complain(*(f"warning: {warning}" for warning in warnings))
    return _run(options)


def parse(
    words: Sequence[str], environ: Mapping[str, str]
) -> tuple[ServerOptions, tuple[str, ...]]:
    """Options and warnings from the words after the program's name.

    Args:
        words: may begin with `serve`, the command SageMaker starts containers with.
        environ: Vertex AI and SageMaker configure through it.

    Raises:
        UsageError: what is wrong, in tritonserver's words.
    """
    if words and words[0] == "serve":
        words = [*environment.sagemaker_flags(environ), *words[1:]]
    warnings: list[str] = []
    texts = _group(_split(words), warnings)
    values = environment.vertex_ai_defaults(environ)
    for option in _options().values():
        if option.name in texts:
            values[option.field] = _value(option, texts[option.name])
            if option.no_effect:
                warnings.append(f"--{option.name} has no effect: {option.no_effect}")
    return _validated(values), tuple(warnings)


def usage() -> str:
    """The text `--help` prints."""
    lines = [f"Usage: {PROGRAM} [options]"]
    lines += ["  --help", "\tPrint usage", "  --version", "\tPrint version", ""]
    options = _options()
    for section in SECTIONS:
        lines.append(f"{section.title}:")
        for field in section.model_fields:
            option = options[field.replace("_", "-")]
            lines.append(f"  --{option.name} {option.form}".rstrip())
            note = " (accepted, has no effect)" if option.no_effect else ""
            lines.append(f"\t{option.help}{note}")
        lines.append("")
    return "\n".join(lines)


def _run(options: ServerOptions) -> int:
    try:
        options.check_startup()
        from npuserve.app import main as run_server

        return run_server(options)
    except NpuserveError as error:
        _complain(f"error: creating server: {error.code.value} - {error}")
        return 1


def _complain(*texts: str) -> None:
    for text in texts:
        print(text, file=sys.stderr)  # noqa: T201


# ---------------------------------------------------------------- words into flags


def _split(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(full name, value text) of every flag in order; "" for a switch."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("--") or word == "--":
            raise UsageError(f"Unexpected argument: {word}")
        typed, equals, text = word[2:].partition("=")
        name = _full_name(typed, word)
        option = _options().get(name)
        if option is not None and not option.takes_value:
            if equals:
                raise UsageError("", f"{PROGRAM}: option '--{name}' doesn't allow an argument")
            yield name, ""
            continue
        if not equals:
            following = next(rest, None)
            if following is None:
                raise UsageError("", f"{PROGRAM}: option '--{name}' requires an argument")
            text = following
        yield name, text


def _full_name(typed: str, word: str) -> str:
    """The flag a full name, an alias or an unambiguous prefix stands for."""
    names = _names()
    if typed in names:
        return names[typed]
    matches = [name for name in names if name.startswith(typed)]
    if len({names[name] for name in matches}) == 1 and typed:
        return names[matches[0]]
    if matches and typed:
        possible = " ".join(f"'--{name}'" for name in matches)
        raise UsageError("", f"{PROGRAM}: option '{word}' is ambiguous; possibilities: {possible}")
    nearest = difflib.get_close_matches(typed, names, n=1)
    hint = f"Did you mean --{nearest[0]}?" if nearest else ""
    raise UsageError(hint, f"{PROGRAM}: unrecognized option '{word}'")


@cache
def _names() -> dict[str, str]:
    """Everything a flag may be called, to its name."""
    names = {name: name for name in (*_options(), *_DEPRECATED)}
    for section in SECTIONS:
        for field, info in section.model_fields.items():
            names.update(dict.fromkeys(_flag_of(info).aliases, field.replace("_", "-")))
    return names


def _group(flags: Iterator[tuple[str, str]], warnings: list[str]) -> dict[str, list[str]]:
    """All texts of each flag, with deprecated flags turned into what replaced them."""
    texts: dict[str, list[str]] = {}
    deprecated: set[str] = set()
    for name, text in flags:
        if name not in _DEPRECATED:
            texts.setdefault(name, []).append(text)
            continue
        deprecated.add(name)
        replacement, convert = _DEPRECATED[name]
        converted = _checked(name, convert, text)
        if converted is not None:
            texts.setdefault(replacement, []).append(converted)
    if "response-cache-byte-size" in deprecated and len(texts["cache-config"]) > 1:
        raise UsageError(
            "Error: Incompatible flags --response-cache-byte-size and --cache-config both "
            "provided. Please provide one or the other."
        )
    warnings.extend(
        f"--{name} is deprecated, use --{_DEPRECATED[name][0]}" for name in sorted(deprecated)
    )
    return texts


# ---------------------------------------------------------------- flags into values


def _value(option: _Option, texts: list[str]) -> Any:
    if not option.takes_value:
        return True
    if option.name == "model-config-name" and not texts[-1]:
        raise UsageError("Error: empty argument for --model-config-name")
    return _checked(option.name, option.parse, texts if option.collects else texts[-1])


def _checked(name: str, parse: Callable[[Any], Any], text: Any) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f'Bad option: "--{name}".\n{error}\n') from error


def _validated(values: Mapping[str, Any]) -> ServerOptions:
    try:
        return ServerOptions(**values)
    except InvalidArgumentError as error:
        raise UsageError(f"{error}\n") from error
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-")
        raise UsageError(
            f'Bad option: "--{name}".\n{first["msg"]}. Got {first["input"]}\n'
        ) from error


# ---------------------------------------------------------------- fields into options


@cache
def _options() -> dict[str, _Option]:
    """Every flag by name, in the order of the usage text."""
    options = (
        _option(field, info) for section in SECTIONS for field, info in section.model_fields.items()
    )
    return {option.name: option for option in options}


def _flag_of(info: FieldInfo) -> Flag:
    return next((item for item in info.metadata if isinstance(item, Flag)), Flag())


def _option(field: str, info: FieldInfo) -> _Option:
    flag = _flag_of(info)
    name = field.replace("_", "-")
    parse, form, is_tuple = _from_type(name, info.annotation)
    return _Option(
        name=name,
        field=field,
        help=f"{info.description}{_default_note(info, flag)}",
        form=(flag.form or form) if flag.takes_value else "",
        parse=flag.parse or parse,
        collects=flag.collects or (is_tuple and flag.parse is None),
        takes_value=flag.takes_value,
        no_effect=flag.no_effect,
    )


def _default_note(info: FieldInfo, flag: Flag) -> str:
    """` Default: 8000.` where that is a plain value."""
    default = info.default
    if default == "" or not flag.takes_value or not isinstance(default, bool | int | float | str):
        return ""
    return f" Default: {str(default).lower() if isinstance(default, bool) else default}."


def _from_type(name: str, annotation: Any) -> tuple[Callable[[Any], Any], str, bool]:
    """(parser, usage form, whether texts are collected) for the type of a field."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _from_type(name, next(part for part in parts if part is not type(None)))
    if origin is Literal:
        return _choice(name, parts), f"<{'|'.join(parts)}>", False
    if origin is tuple:
        return tuple, "<string>", True
    parse, form = _SCALARS.get(annotation, (str, "<string>"))
    return parse, form, False


def _choice(name: str, allowed: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        for choice in (text, text.lower()):
            if choice in allowed:
                return choice
        raise ValueError(f"invalid argument for --{name}. Got {text}, not {' or '.join(allowed)}")

    return parse
