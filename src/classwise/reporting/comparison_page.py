"""The page of several models, and its fragment for a notebook."""

# K classes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from classwise.core.errors import unknown
from classwise.reporting import charts
from classwise.reporting.comparison import ClassChange, Comparison, Row
from classwise.reporting.rendering import marked, relative, render
from classwise.reporting.story import LEVEL, comparison_sentences, listing, unpaired

COLOURED_MODELS = 6
"""Models that get a colour of their own, and bars; tables show all."""
LONG_STORY = 5
"""Beyond this many models a page opens with the first and the last sentence and folds away those in between."""


def comparison_page(
    comparison: Comparison,
    *,
    title: str | None = None,
    story: Sequence[str] = (),
    links: Mapping[str, str] | None = None,
) -> str:
    """A whole document. ``story``: the sentences to open with, else those the numbers support by themselves.

    ``links``: from a model's name to the relative address of its own report.
    """
    warning = unpaired(comparison)
    told = [text for text in comparison_sentences(comparison) if text != warning]
    each: list[str] = []
    if len(comparison.models) > LONG_STORY:
        told, each = [told[0], *told[len(comparison.models) :]], told[1 : len(comparison.models)]
    return render(
        "comparison.html",
        comparison=comparison,
        title=title or _title(comparison.models),
        story=list(story) or told,
        each=[] if story else each,
        warning=warning,
        links=_checked(links or {}, comparison),
        panels=_comparison_panels(comparison),
        coloured=COLOURED_MODELS,
    )


def comparison_fragment(comparison: Comparison) -> str:
    """A small table of the models, styled inline, for a notebook."""
    return render(
        "comparison_fragment.html",
        comparison=comparison,
        key=comparison.strongest,
        rows=comparison[comparison.strongest],
        story=comparison_sentences(comparison),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelBar:
    """One model's bar in a class."""

    number: int
    model: str
    value: float | None
    bar: charts.Bar | None
    worst: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClassGroup:
    """The bars of one class."""

    name: str
    bars: list[_ModelBar]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChangeCell:
    """One model in one class: its value, and the change where it was tested."""

    value: float | None
    change: ClassChange | None
    told: bool
    worst: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChangeRow:
    """One class, over all models."""

    name: str
    baseline: float | None
    baseline_worst: bool
    cells: list[_ChangeCell]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ComparisonPanel:
    """What one position of the switch shows."""

    number: int
    key: str
    rows: list[Row]
    groups: list[_ClassGroup]
    strongest: list[_ClassGroup]
    left_out: int
    scatter: charts.Scatter | None
    scatter_numbers: list[int]
    radar: charts.Radar | None
    changes: list[_ChangeRow]
    changes_left_out: int
    untested: list[str]


def _comparison_panels(comparison: Comparison) -> list[_ComparisonPanel]:
    keys = list(reversed(comparison.results))
    return [_comparison_panel(number, key, comparison) for number, key in enumerate(keys)]


def _comparison_panel(number: int, key: str, comparison: Comparison) -> _ComparisonPanel:
    rows, classes = comparison[key], comparison.dataset.classes
    worst = [marked(row.shares, row.worst) for row in rows]
    means = [charts.mean([row.shares[label] for row in rows]) for label in range(len(classes))]
    chosen = charts.select(means, keep=[row.worst.label for row in rows if row.worst])

    def group(label: int) -> _ClassGroup:
        bars = [
            _ModelBar(
                number=position,
                model=row.model,
                value=part.value,
                bar=charts.bar(part.value, part.low, part.high),
                worst=label in worst[position],
            )
            for position, row in enumerate(rows[:COLOURED_MODELS])
            for part in [row.by_class[label]]
        ]
        return _ClassGroup(name=classes[label], bars=bars)

    placed = [(position, row) for position, row in enumerate(rows) if row.worst and row.overall.value is not None]
    changes, changes_left_out = _change_rows(rows, classes, worst)
    return _ComparisonPanel(
        number=number,
        key=key,
        rows=rows,
        groups=[group(label) for label in chosen.weakest],
        strongest=[group(label) for label in chosen.strongest],
        left_out=chosen.left_out,
        scatter=charts.scatter([_point(row) for _, row in placed]),
        scatter_numbers=[position for position, _ in placed],
        radar=charts.radar(classes, [row.shares for row in rows[:COLOURED_MODELS]]),
        changes=changes,
        changes_left_out=changes_left_out,
        untested=[row.model for row in rows[1:] if row.change is None],
    )


def _point(row: Row) -> tuple[str, charts.Measured, charts.Measured]:
    overall, worst = row.overall, row.worst
    assert worst is not None
    assert overall.value is not None
    assert overall.low is not None
    assert overall.high is not None
    average = charts.Measured(value=overall.value, low=overall.low, high=overall.high)
    return row.model, average, charts.Measured(value=worst.value, low=worst.low, high=worst.high)


def _change_rows(rows: list[Row], classes: list[str], worst: list[set[int]]) -> tuple[list[_ChangeRow], int]:
    """Class by class; of many classes those whose change is surest, or without tests the weakest of the baseline."""
    baseline, *others = rows
    changes = [{part.label: part for part in row.changes} for row in others]
    labels = list(range(len(classes)))
    if len(labels) > charts.MANY_CLASSES:
        surest = [min((c[label].p_value for c in changes if label in c), default=1.0) for label in labels]
        values = [100.0 if value is None else value for value in baseline.shares]
        labels = sorted(labels, key=lambda label: (surest[label], values[label], label))[: charts.MANY_CLASSES]

    def cell(label: int, position: int, row: Row) -> _ChangeCell:
        change = changes[position].get(label)
        return _ChangeCell(
            value=row.shares[label],
            change=change,
            told=change is not None and change.p_value < LEVEL,
            worst=label in worst[position + 1],
        )

    table = [
        _ChangeRow(
            name=classes[label],
            baseline=baseline.shares[label],
            baseline_worst=label in worst[0],
            cells=[cell(label, position, row) for position, row in enumerate(others)],
        )
        for label in labels
    ]
    return table, len(classes) - len(labels)


def _title(models: Sequence[str]) -> str:
    who = listing(models) if len(models) <= 4 else f"{len(models)} models"
    return f"{who}, class by class"


def _checked(links: Mapping[str, str], comparison: Comparison) -> dict[str, str]:
    """Links stay relative: a page of ours points at nothing outside its own directory tree."""
    for model in links:
        if model not in comparison.models:
            raise unknown("model", model, comparison.models)
    return {model: relative(href) for model, href in links.items()}
