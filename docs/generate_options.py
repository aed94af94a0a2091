"""Writes docs/reference/options.md from the declarations in npuserve/options.py (`make docs`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npuserve.options import SECTIONS, Flag

TARGET = Path(__file__).with_name("reference") / "options.md"

HEAD = """\
# Options

Written by `make docs` from `npuserve/options.py`. Names, forms and defaults are tritonserver's:
`--name=value`, `--name value` and any unambiguous prefix of a name. In Python the same settings
are fields of `npuserve.ServerOptions`, with `_` instead of `-`.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for section in SECTIONS:
        parts.append(f"\n## {section.title}\n\n{section.__doc__}\n")
        parts.append("\n| Flag | Default | Meaning |\n|---|---|---|\n")
        parts.extend(row(name, field) for name, field in section.model_fields.items())
    return "".join(parts)


def row(name: str, field: Any) -> str:
    """One flag as a row of the table."""
    flag = next((item for item in field.metadata if isinstance(item, Flag)), Flag())
    default = field.get_default(call_default_factory=True)
    repeatable = flag.collects or isinstance(default, tuple)
    meaning = field.description + (" Repeatable." if repeatable else "")
    if flag.no_effect:
        meaning += f" Accepted without effect: {flag.no_effect}."
    meaning = meaning.replace("|", "\\|")
    return f"| `--{name.replace('_', '-')}` | {text(default)} | {meaning} |\n"


def text(default: Any) -> str:
    """A default as it is typed; nothing for an empty one."""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, int | float | str) and default != "":
        return f"`{default}`"
    return ""


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
