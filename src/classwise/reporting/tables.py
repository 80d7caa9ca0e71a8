"""Tables of text for the console, Markdown and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under columns; the first column is text, the others are right-aligned."""

    title: str
    about: str
    columns: list[str]
    rows: list[list[str]]
    foot: str = ""


def markdown(table: Table) -> str:
    """Return the table as Markdown.

    >>> print(markdown(Table(title="Times", about="Of nothing.", columns=["", "s"], rows=[["a|b", "1.0"]])))
    ## Times
    <BLANKLINE>
    Of nothing.
    <BLANKLINE>
    |  | s |
    |:--|--:|
    | a\\|b | 1.0 |
    """
    rule = "|" + "|".join([":--", *["--:"] * (len(table.columns) - 1)]) + "|"
    lines = [f"## {table.title}", "", table.about, "", _line(table.columns), rule, *map(_line, table.rows)]
    return "\n".join([*lines, *(["", table.foot.replace("*", "\\*")] if table.foot else [])])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
