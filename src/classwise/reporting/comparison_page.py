"""The page of several models, and its fragment for a notebook."""

# K classes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from classwise.core.errors import unknown
from classwise.reporting import charts, wording
from classwise.reporting.formatting import ABSENT, SIGNIFICANT, listing, number, p_text, signed
from classwise.reporting.plotting import MODEL_COLORS
from classwise.reporting.rendering import (
    CV,
    MCD,
    RHO,
    WORST_HEADERS,
    estimate_cell,
    name_cell,
    relative,
    render,
    worst_cells,
)
from classwise.reporting.results import Change, ComparisonData, Row
from classwise.reporting.tables import Cell, Table

NAMED = 4
"""Maximum number of models that a title names."""


def comparison_page(
    comparison: ComparisonData,
    *,
    title: str | None = None,
    story: Sequence[str] = (),
    links: Mapping[str, str] | None = None,
) -> str:
    """Return the page: one file that needs no network.

    ``title``: instead of the names of the models. ``story``: paragraphs below the charts. ``links``: from the name of a
    model to the relative address of its report.
    """
    models = comparison.models
    for model in links or {}:
        if model not in models:
            raise unknown("model", model, models)
    checked = {model: relative(href) for model, href in (links or {}).items()}
    keys = list(reversed(comparison.results))
    return render(
        "comparison.html",
        comparison=comparison,
        title=title or f"{listing(models) if len(models) <= NAMED else f'{len(models)} models'} by class",
        verdict=wording.comparison_verdict(comparison),
        story=story,
        warning=wording.unpaired(comparison),
        keys=keys,
        panels=[_panel(comparison, key, checked) for key in keys],
        colored=len(MODEL_COLORS),
    )


def comparison_fragment(comparison: ComparisonData) -> str:
    """Return a small table of the models, styled inline, for a notebook."""
    return render(
        "comparison_fragment.html",
        comparison=comparison,
        key=comparison.strongest,
        rows=comparison[comparison.strongest],
        verdict=wording.comparison_verdict(comparison),
    )


def _panel(comparison: ComparisonData, key: str, links: Mapping[str, str]) -> dict[str, Any]:
    """Content for one position of the switch."""
    rows, classes = comparison[key], comparison.dataset.classes
    scatter, radar = charts.average_and_worst(rows), charts.class_radar(rows, classes)
    return {
        "key": key,
        "scatter": scatter.html() if scatter else None,
        "bars": charts.model_bars(rows, classes).html(),
        "radar": radar.html() if radar else None,
        "models": _models(rows, links),
        "changes": _changes(rows, classes),
        "left_out": max(0, len(classes) - charts.MANY_CLASSES),
        "untested": [row.model for row in rows[1:] if row.change is None],
    }


def _models(rows: Sequence[Row], links: Mapping[str, str]) -> Table:
    cells = [
        [
            name_cell(
                row.model,
                "" if place else "baseline",
                f"m{place if place < len(MODEL_COLORS) else 'x'}",
                link=links.get(row.model, ""),
            ),
            estimate_cell(row.overall),
            *worst_cells(row),
            number(row.cv),
            number(row.mcd),
            signed(row.rho, 3),
        ]
        for place, row in enumerate(rows)
    ]
    return Table(title="Models", columns=["Model", "Average", *WORST_HEADERS, CV, MCD, RHO], rows=cells, css="models")


def _changes(rows: Sequence[Row], classes: Sequence[str]) -> Table:
    """Table of changes by class; of many classes those with the smallest p-values, else the baseline's weakest."""
    baseline, *others = rows
    lowest = [charts.marked(row) for row in rows]
    changes = [{part.label: part for part in row.changes} for row in others]
    labels = list(range(len(classes)))
    if len(labels) > charts.MANY_CLASSES:
        smallest = [min((own[label].p_value for own in changes if label in own), default=1.0) for label in labels]
        values = [100.0 if value is None else value for value in baseline.shares]
        labels = sorted(labels, key=lambda label: (smallest[label], values[label], label))[: charts.MANY_CLASSES]

    def cells(label: int) -> list[str]:
        if baseline.shares[label] is None:
            return [Cell(ABSENT, "no examples", "absent", span=len(rows))]
        return [
            Cell(number(baseline.shares[label]), css="accent" if label in lowest[0] else ""),
            *(
                _change_cell(row.shares[label], own.get(label), label in low)
                for row, own, low in zip(others, changes, lowest[1:], strict=True)
            ),
        ]

    overall = [_change_cell(row.overall.value, row.change, False) for row in others]
    return Table(
        title="Change of every class against the baseline",
        columns=["Class", *(name_cell(row.model) for row in rows)],
        rows=[
            ["all classes", number(baseline.overall.value), *overall],
            *([name_cell(classes[label]), *cells(label)] for label in labels),
        ],
        css="changes",
        strong=0,
    )


def _change_cell(value: float | None, change: Change | None, lowest: bool) -> Cell:
    css = "accent" if lowest else ""
    if value is None or change is None:
        return Cell(number(value), css=css if value is not None else "absent")
    significant = change.p_value < SIGNIFICANT
    test = f"{p_text(change.p_value)}; {change.gained:,} gained, {change.lost:,} lost"
    small = test if significant else f"not significant, {test}"
    return Cell(f"{number(value)} {signed(change.points)}", small, f"{css} significant" if significant else css)
