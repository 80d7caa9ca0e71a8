"""All pages, each one file without external resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from classwise.reporting.comparison_page import comparison_fragment, comparison_page
from classwise.reporting.figures import Figure
from classwise.reporting.leaderboard import Leaderboard
from classwise.reporting.rendering import relative, render
from classwise.reporting.report_page import report_fragment, report_page
from classwise.reporting.tables import Table
from classwise.storage.verdicts import WORST_CASE

__all__ = ["answers_page", "comparison_fragment", "comparison_page", "report_fragment", "report_page", "site_page"]


class Findings(Protocol):
    """Content of the page of an analysis or a repair."""

    def sentences(self) -> list[str]: ...

    def figures(self) -> list[Figure]: ...

    def tables(self) -> list[Table]: ...


def answers_page(title: str, eyebrow: str, answers: Mapping[str, Findings]) -> str:
    """Return the page of one or more analyses."""
    return render(
        "answers.html",
        title=title,
        eyebrow=eyebrow,
        answers=[
            {"name": name, "sentences": answer.sentences(), "tables": answer.tables(), "figures": answer.figures()}
            for name, answer in answers.items()
        ],
    )


def site_page(board: Leaderboard, *, title: str, links: Sequence[str]) -> str:
    """Return the page of a leaderboard. ``links``: relative addresses of the reports of its runs."""
    shown = {
        "Data set": list(dict.fromkeys(entry.dataset for entry in board.entries)),
        "Threat": list(dict.fromkeys(entry.threat for entry in board.entries)),
        "Architecture": list(dict.fromkeys(entry.architecture for entry in board.entries)),
        "Method": list(dict.fromkeys(entry.method for entry in board.entries)),
        "Result": list(dict.fromkeys(entry.result for entry in board.entries)),
    }
    results = shown["Result"]
    fields = ("dataset", "threat", "architecture", "method", "result")
    return render(
        "site.html",
        board=board,
        title=title,
        links=[relative(href) for href in links],
        filters=shown,
        chosen=WORST_CASE if WORST_CASE in results else results[0] if results else "",
        rows=[
            (entry, [shown[name].index(getattr(entry, field)) for name, field in zip(shown, fields, strict=True)])
            for entry in board.entries
        ],
    )
