"""Tables: cells with their look for pages, and tables of text for the console and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: a text, a smaller text beside or below it, and its style."""

    text: str
    small: str = ""
    css: str = ""
    value: Any = None
    """Sort key."""
    tip: str = ""
    span: int = 1
    link: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table; the first cell of a row names it. Columns are right-aligned unless their css is ``left``."""

    title: str
    columns: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    css: str = ""
    caption: str = ""
    sortable: bool = False
    strong: frozenset[int] = frozenset()
    """Rows in bold."""
    parts: Sequence[int] = ()
    """Rows that begin a new part."""


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
    rows = [[cell.replace("|", "\\|") for cell in row] for row in (table.columns, *table.rows)]
    lines = [f"## {table.title}", "", table.about, "", *markdown_lines(rows, "l" + "r" * (len(table.columns) - 1))]
    return "\n".join([*lines, *(["", table.foot.replace("*", "\\*")] if table.foot else [])])


def markdown_lines(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Return the lines of a Markdown table; the first row is its head, ``align`` is l or r for each column."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, f"|{'|'.join(':--' if side == 'l' else '--:' for side in align)}|", *body]
