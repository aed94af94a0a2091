"""A table as tritonserver prints it. Pure."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def render_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their longest line; cells may have several lines.

    Returns:
        The table with `+---+` rules around header and body, ended by a newline.
    """
    cells = [[cell.splitlines() or [""] for cell in row] for row in rows]
    head = [[title] for title in header]
    widths = [
        max(len(line) for row in (head, *cells) for line in row[column])
        for column in range(len(header))
    ]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    body = [line for row in cells for line in _row_lines(row, widths)]
    return "\n".join([rule, *_row_lines(head, widths), rule, *body, rule]) + "\n"


def _row_lines(row: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    lines = []
    for texts in zip_longest(*row, fillvalue=""):
        padded = (text.ljust(width) for text, width in zip(texts, widths, strict=True))
        lines.append(f"| {' | '.join(padded)} |")
    return lines
