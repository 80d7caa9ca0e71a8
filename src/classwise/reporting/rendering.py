"""Templates to HTML, the cells of tables, and the content policy of every page.

Every text from outside (names of classes, models and attacks, settings) is escaped by Jinja; ids and selectors are
built from positions, never from names.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from markupsafe import Markup

from classwise.core.errors import InputError
from classwise.reporting import formatting, plotting
from classwise.reporting.estimates import Interval
from classwise.reporting.formatting import ABSENT, interval, number, printable
from classwise.reporting.results import Result
from classwise.reporting.tables import Cell
from classwise.storage.verdicts import NATURAL, WORST_CASE

if TYPE_CHECKING:
    from jinja2 import Environment

CV = Cell("CV", tip="class variance, in percent squared")
MCD = Cell("MCD", tip="maximum class difference, in points")
RHO = Cell("rho", tip="relative gain of the worst class minus relative loss of the average")
WORST_HEADERS = (Cell("Worst class", css="left"), "its accuracy", "selection-corrected")


def name_cell(name: str, small: str = "", css: str = "", **look: Any) -> Cell:
    """Return the cell of a name, which is cut if it is long."""
    return Cell(name, small, f"{css} cut".strip(), name, tip=name, **look)


def estimate_cell(part: Interval | None, css: str = "") -> Cell:
    """Return a value with its interval; a dash without one."""
    if part is None or part.value is None:
        return Cell(ABSENT, css=f"{css} absent".strip())
    return Cell(number(part.value), interval(part.low, part.high), css, part.value)


def count_cell(value: int) -> Cell:
    """Return a count."""
    return Cell(f"{value:,}", value=value)


def worst_cells(result: Result) -> list[Cell]:
    """Return the cells under ``WORST_HEADERS``."""
    worst, others = result.worst, len(result.lowest) - 1
    if worst is None:
        return [Cell(ABSENT, css="left absent"), Cell(ABSENT, css="absent"), Cell(ABSENT, css="absent")]
    more = f"and {others} more" if others else ""
    return [name_cell(worst.name, more, "left"), estimate_cell(worst, "accent"), estimate_cell(worst.corrected)]


def render(template: str, **values: Any) -> str:
    """Return a template filled with values."""
    return _environment().get_template(template).render(**values)


def relative(href: str) -> str:
    """Return a link if it is relative: a page refers to nothing outside its own directory tree."""
    parts = urlsplit(href)
    if parts.scheme or parts.netloc:
        raise InputError(f"a link must be a relative path, got {href!r}")
    return href


def condition(key: str) -> Markup:
    """Return the condition of a result for a heading: ``natural``, ``under all attacks``, or ``under`` an attack."""
    if key == NATURAL:
        return Markup("natural")
    return Markup("under all attacks") if key == WORST_CASE else Markup("under <bdi>{}</bdi>").format(_printable(key))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("classwise.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = files("classwise.reporting").joinpath("templates/page.js").read_text(encoding="utf-8")
    environment.filters.update(
        percent=formatting.percent,
        number=number,
        signed=formatting.signed,
        unbroken=_unbroken,
        cell=lambda text: text if isinstance(text, Cell) else Cell(text),
        count=lambda value: f"{value:,}",
        compact=lambda value: f"{value:g}",
    )
    environment.globals.update(
        condition=condition,
        interval=interval,
        NATURAL=NATURAL,
        WORST_CASE=WORST_CASE,
        LEVEL=formatting.SIGNIFICANT,
        COLORS=plotting.COLORS,
        MODEL_NAMES=plotting.MODEL_NAMES,
        PALETTE=Markup(plotting.style_sheet()),
        SCRIPT=Markup(script),
        SCRIPT_DIGEST=f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}",
    )
    return environment


def _printable(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _unbroken(text: str) -> str:
    """Keep an interval and a p-value on one line."""
    text = re.sub(r"(?<=\d)–(?=\d)", "\u2060–\u2060", text)
    return re.sub(r"\bp ([<=]) (?=[01])", "p\u00a0\\1\u00a0", text)
