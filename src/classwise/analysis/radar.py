"""Accuracy of each class of several models as a radar chart (Li & Liu 2023, Figs. 4 to 6).

The first run is the baseline. If the runs share their examples, each class has its gains and losses and an exact
McNemar test with Holm's correction for the number of classes; otherwise there is only the difference.
"""

# K classes

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from classwise.analysis.plots import interval_series, shown_classes, shown_suffix
from classwise.analysis.result import AnalysisResult, Record, frame_of, interval_columns, p_text
from classwise.analysis.run import MOST_RUNS, Run, compare_runs, condition, open_runs
from classwise.core.errors import InputError
from classwise.reporting.comparison import Row
from classwise.reporting.estimates import ClassEstimate
from classwise.reporting.figures import SERIES_COLORS, Figure, Series, bars
from classwise.reporting.figures import radar as radar_figure

SIGNIFICANT = 0.05


def radar(*runs: Run | str | Path, attack: str | None = None) -> AnalysisResult:
    """Class accuracies of up to six runs, against the first. ``attack``: by default the worst case that all have."""
    opened = open_runs(runs, 2, MOST_RUNS)
    key, comparison = compare_runs(opened, attack)
    rows = comparison[key]
    for row in rows:
        if row.overall.value is None:
            raise InputError(f"{row.model} has no examples")
    values = Record(
        dataset=comparison.dataset.name,
        attack=key,
        classes=list(comparison.dataset.classes),
        models=[
            Record(
                model=row.model,
                average=row.overall.value,
                by_class=row.by_class,
                differences=[] if row is rows[0] else _differences(row, rows[0]),
            )
            for row in rows
        ],
        paired=comparison.paired,
        shown=shown_classes(rows[0].shares),
    )
    finding = "; ".join(_finding(one, values) for one in values.models[1:]) + "."
    return AnalysisResult(
        name="radar",
        finding=finding,
        values=values,
        frames={"classes": _frame(values)},
        draw=lambda: _figures(values, finding),
    )


def _differences(row: Row, base: Row) -> list[Record]:
    paired = {part.label: part for part in row.changes}

    def difference(ours: ClassEstimate, theirs: ClassEstimate) -> Record:
        change = paired.get(ours.label)
        known = ours.value is not None and theirs.value is not None
        found = Record(label=ours.label, points=round((ours.value or 0) - (theirs.value or 0), 4) if known else None)
        found["class"] = ours.name
        return Record(found | {key: getattr(change, key, None) for key in ("gained", "lost", "p_value")})

    return [difference(ours, theirs) for ours, theirs in zip(row.by_class, base.by_class, strict=True)]


def _frame(values: Record) -> pd.DataFrame:
    """Return one row for each model and class, from the weakest class of the baseline."""
    first = values.models[0].by_class
    order = sorted(first, key=lambda part: (part.value is None, part.value or 0.0))
    rows = []
    for part in order:
        for one in values.models:
            difference = one.differences[part.label] if one.differences else Record(points=None, p_value=None)
            rows.append(
                {
                    "class": part.name,
                    "label": part.label,
                    "model": one.model,
                    **interval_columns("accuracy_percent", one.by_class[part.label]),
                    "n": one.by_class[part.label].n,
                    "difference_points": difference.points,
                    "p_value": difference.p_value,
                }
            )
    return frame_of(rows)


def _finding(one: Record, values: Record) -> str:
    known = [part for part in one.differences if part.points is not None]
    higher, lower = (sum(sign * part.points > 0 for part in known) for sign in (1, -1))
    base = values.models[0].model
    sentence = f"{one.model} against {base} {condition(values.attack)}: {higher} classes higher, {lower} lower"
    if any(part.p_value is not None for part in known):
        points = [part.points for part in known if part.p_value is not None and part.p_value < SIGNIFICANT]
        up = sum(change > 0 for change in points)
        sentence += f" (significant: {up} higher, {len(points) - up} lower)"
    if len(known) > 1:
        least, most = (pick(known, key=lambda part: float(part.points)) for pick in (min, max))
        ends = [f"{part['class']} {part.points:+.1f} points{p_text(part.p_value)}" for part in (least, most)]
        sentence += f", from {' to '.join(ends)}"
    return sentence


def _figures(values: Record, finding: str) -> list[Figure]:
    shown, base = values.shown, values.models[0].model
    names = [values.classes[label] for label in shown]
    title = f"{{}}, {values.attack}{shown_suffix(shown, values.classes)}"
    alt = f"Models on {values.dataset}, class by class. {finding}"
    each = [interval_series(one.model, [one.by_class[label] for label in shown]) for one in values.models]
    highest = max((value for one in each for value in one.y if value is not None), default=100.0)
    span = (0, max(10, 10 * math.ceil(highest / 10)))
    accuracy = title.format("Accuracy by class")
    return [
        radar_figure(names, each, title=accuracy, alt=alt, unit="%", span=span)
        if len(names) > 2  # a radar chart needs three directions
        else bars(names, each, title=accuracy, alt=alt, y="accuracy, %"),
        bars(
            names,
            [
                Series(name=one.model, y=[one.differences[label].points for label in shown], color=color)
                for one, color in zip(values.models[1:], SERIES_COLORS[1:], strict=False)
            ],
            title=title.format(f"Difference to {base} by class"),
            alt=alt,
            y="points",
        ),
    ]
