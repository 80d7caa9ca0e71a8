"""Accuracy of each class of several models as a radar chart (Li & Liu 2023, Figs. 4 to 6).

The first run is the baseline. If the runs share their examples, each class has its gains and losses and an exact
McNemar test with Holm's correction for the number of classes; otherwise there is only the difference.
"""

# K classes

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from classwise.analysis.plots import shown_classes, shown_suffix, weakest_first
from classwise.analysis.result import AnalysisResult, frame_of, interval_columns, p_text
from classwise.analysis.run import MOST_RUNS, Run, compare_runs, condition, open_runs
from classwise.core.errors import InputError
from classwise.reporting.comparison import Row
from classwise.reporting.figures import SERIES_COLORS, Figure, Series, bars
from classwise.reporting.figures import radar as radar_figure
from classwise.reporting.formatting import class_name, signed

SIGNIFICANT = 0.05


def radar(*runs: Run | str | Path, attack: str | None = None) -> AnalysisResult:
    """Class accuracies of up to six runs, against the first. ``attack``: by default the worst case that all have."""
    opened = open_runs(runs, 2, MOST_RUNS)
    key, comparison = compare_runs(opened, attack)
    rows, dataset = comparison[key], comparison.dataset
    for row in rows:
        if row.overall.value is None:
            raise InputError(f"{row.model} has no examples")
    frame = _frame(rows)
    base = rows[0].model
    own = [part for name, part in frame.groupby("model", sort=False) if name != base]
    finding = "; ".join(_finding(part.sort_values("label"), f"{base} {condition(key)}") for part in own) + "."
    return AnalysisResult(
        name="radar",
        finding=finding,
        about={"models": comparison.models, "dataset": dataset.name, "attack": key, "paired": comparison.paired},
        frames={"classes": frame},
        draw=lambda: _figures(rows, dataset.classes, key, f"Models on {dataset.name}, class by class. {finding}"),
    )


def _difference(row: Row, base: Row, label: int) -> float | None:
    """Return the difference of a class in points."""
    ours, theirs = row.shares[label], base.shares[label]
    return None if ours is None or theirs is None else round(ours - theirs, 4)


def _frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Return one row for each model and class, from the weakest class of the baseline."""
    base = rows[0]
    changes = {(row.model, part.label): part for row in rows for part in row.changes}
    return frame_of(
        {
            "class": part.name,
            "label": label,
            "model": row.model,
            **interval_columns("accuracy_percent", part),
            "n": part.n,
            "difference_points": None if row is base else _difference(row, base, label),
            **{name: getattr(changes.get((row.model, label)), name, None) for name in ("p_value", "gained", "lost")},
        }
        for label in weakest_first(base.shares)
        for row in rows
        for part in [row.by_class[label]]
    )


def _finding(part: pd.DataFrame, against: str) -> str:
    """Return the summary of one model, from its rows in label order."""
    known = part.dropna(subset="difference_points")
    points, tested = known["difference_points"], known["p_value"].notna().any()
    sentence = (
        f"{part['model'].iloc[0]} against {against}: {(points > 0).sum()} classes higher, {(points < 0).sum()} lower"
    )
    if tested:
        clear = points[known["p_value"] < SIGNIFICANT]
        sentence += f" (significant: {(clear > 0).sum()} higher, {(clear < 0).sum()} lower)"
    if len(known) > 1:
        ends = [known.loc[place] for place in (points.idxmin(), points.idxmax())]
        sentence += ", from " + " to ".join(
            f"{class_name(one['class'])} ({signed(one['difference_points'])} points"
            f"{p_text(one['p_value'] if tested else None)})"
            for one in ends
        )
    return sentence


def _figures(rows: Sequence[Row], classes: Sequence[str], attack: str, alt: str) -> list[Figure]:
    base = rows[0]
    shown = shown_classes(base.shares)
    names = [classes[label] for label in shown]
    title = f"{{}}, {attack}{shown_suffix(shown, classes)}"
    each = [Series.of(row.model, [row.by_class[label] for label in shown]) for row in rows]
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
                Series(name=row.model, y=[_difference(row, base, label) for label in shown], color=color)
                for row, color in zip(rows[1:], SERIES_COLORS[1:], strict=False)
            ],
            title=title.format(f"Difference to {base.model} by class"),
            alt=alt,
            y="points",
        ),
    ]
