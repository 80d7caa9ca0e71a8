"""All pages, each one file without external resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from markupsafe import Markup

from classwise.reporting.comparison_page import comparison_fragment, comparison_page
from classwise.reporting.figures import Figure
from classwise.reporting.formatting import ABSENT, interval, number, signed
from classwise.reporting.leaderboard import Entry, Leaderboard, Spread
from classwise.reporting.rendering import CV, MCD, RHO, count_cell, name_cell, relative, render
from classwise.reporting.report_page import report_fragment, report_page
from classwise.reporting.tables import Cell, Table, table_of
from classwise.storage.verdicts import WORST_CASE

__all__ = ["answers_page", "comparison_fragment", "comparison_page", "report_fragment", "report_page", "site_page"]


class Findings(Protocol):
    """Content of the page of an analysis or a repair."""

    def sentences(self) -> list[str]: ...

    def figures(self) -> list[Figure]: ...

    def tables(self) -> list[Table]: ...


def answers_page(title: str, eyebrow: str, answers: Mapping[str, Findings]) -> str:
    """Return the page of one or more analyses."""
    return render("answers.html", title=title, eyebrow=eyebrow, answers=answers)


def site_page(board: Leaderboard, *, title: str, links: Sequence[str]) -> str:
    """Return the page of a leaderboard. ``links``: relative addresses of the reports of its runs."""
    fields = ("dataset", "threat", "architecture", "method", "result")
    shown = {field: list(dict.fromkeys(getattr(entry, field) for entry in board.entries)) for field in fields}
    checked = [relative(href) for href in links]
    columns: dict[str, Any] = {
        "Model": lambda entry: name_cell(entry.model, _links(entry, checked)),
        "Average": lambda entry: _spread(entry.average),
        Cell("Worst class", css="word"): lambda entry: _word(", ".join(entry.worst_classes)),
        "its accuracy": lambda entry: _spread(entry.worst, "accent"),
        CV: lambda entry: _spread(entry.cv),
        MCD: lambda entry: _spread(entry.mcd),
        RHO: lambda entry: Cell("", "baseline") if entry.baseline else Cell(signed(entry.rho, 3), value=entry.rho),
        Cell("Method", css="word"): lambda entry: _word(entry.method),
        Cell("Architecture", css="word"): lambda entry: _word(entry.architecture),
        Cell("Data set", css="word"): lambda entry: _word(entry.dataset),
        Cell("Threat", css="word"): lambda entry: _word(entry.threat),
        Cell("Result", css="word"): lambda entry: _word(entry.result, tip=entry.settings or entry.result),
        "n": lambda entry: count_cell(entry.n),
    }
    places = [" ".join(str(shown[field].index(getattr(entry, field))) for field in fields) for entry in board.entries]
    return render(
        "site.html",
        board=board,
        title=title,
        runs=len(links),
        filters=dict(zip(("Data set", "Threat", "Architecture", "Method", "Result"), shown.values(), strict=True)),
        chosen=WORST_CASE if WORST_CASE in shown["result"] else next(iter(shown["result"]), ""),
        entries=table_of("Leaderboard", board.entries, columns, css="board", sortable=True, filters=places),
    )


def _links(entry: Entry, links: Sequence[str]) -> Markup:
    """Return a link to the report of each seed."""
    texts = [f"run {run}" if seed is None else f"seed {seed}" for run, seed in enumerate(entry.seeds, 1)]
    texts = texts if len(texts) > 1 else ["report"]
    return Markup(" ").join(
        Markup('<a href="{}">{}</a>').format(links[run], text) for run, text in zip(entry.runs, texts, strict=True)
    )


def _word(text: str, **look: Any) -> Cell:
    return Cell(text, css="word cut", value=text, **({"tip": text} | look))


def _spread(part: Spread, css: str = "") -> Cell:
    if part.value is None:
        return Cell(ABSENT, css="absent")
    small = f"± {number(part.sd)}" if part.sd is not None else interval(part.low, part.high)
    return Cell(number(part.value), small, css, part.value)
