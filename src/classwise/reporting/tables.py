"""Tables of pages, of the console, and of Markdown and LaTeX files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

Item = TypeVar("Item")


class Cell(str):
    """Text of a table cell with its formatting."""

    small: str = ""
    """A smaller text beside or below it."""
    css: str = ""
    value: Any = None
    """Sort key."""
    tip: str = ""
    span: int = 1
    link: str = ""

    def __new__(cls, text: str, small: str = "", css: str = "", value: Any = None, **look: Any) -> Self:
        """Return a cell; ``look``: tip, span, link."""
        cell = super().__new__(cls, text)
        cell.__dict__.update(look, small=small, css=css, value=value)
        return cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under columns. The first column is text, the others are right-aligned unless their css is ``left``."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    about: str = ""
    foot: str = ""
    """Texts above and below the table."""
    caption: str = ""
    css: str = ""
    sortable: bool = False
    strong: int | None = None
    """The row in bold."""
    parts: Sequence[int] = ()
    """Rows that begin a new part."""
    filters: Sequence[str] = ()
    """For each row the positions of its values in the filters of the page."""


def table_of(title: str, items: Iterable[Item], columns: Mapping[str, Callable[[Item], str]], **look: Any) -> Table:
    """Return a table with a row for each item; ``columns``: header to the function that returns the cell."""
    rows = [[cell(item) for cell in columns.values()] for item in items]
    return Table(title=title, columns=list(columns), rows=rows, **look)
