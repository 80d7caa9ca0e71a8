"""The charts of a report and of a comparison, for their pages and as files for papers."""

# K classes

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

from classwise.reporting.estimates import Interval
from classwise.reporting.figures import NARROW, Bars, Figure, Points, Series, heatmap, lines, radar
from classwise.reporting.formatting import interval, listing, number, percent, signed
from classwise.reporting.plotting import COLORS, KINDS, MODEL_COLORS
from classwise.reporting.results import ComparisonData, ReportData, Result, Row
from classwise.storage.verdicts import NATURAL

MANY_CLASSES = 40
"""Above this number of classes, bars show the weakest and the strongest only."""
WEAKEST, STRONGEST = 20, 5
MOST_DRAWN = 200
"""Above this number of classes a confusion matrix is not drawn."""
MOST_MARKED = 3
"""Maximum number of tied lowest classes that are marked."""
FEWEST_DIRECTIONS = 3
BAR_AXES: dict[str, Any] = {"span": (0, 100), "y": "accuracy, %, with 95% intervals"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The classes that a chart shows, from the weakest up."""

    labels: list[int]
    left_out: int = 0
    """Number of classes that are not shown between the weakest and the last ``STRONGEST``."""

    @property
    def gap(self) -> tuple[int, str] | None:
        """The row before which classes are omitted, and a text with their number."""
        return (len(self.labels) - STRONGEST, f"{self.left_out:,} classes in between") if self.left_out else None


def select(values: Sequence[float | None], *, keep: Iterable[int] = ()) -> Selection:
    """Sort classes by value; of many, take the weakest, the strongest and those in ``keep``.

    Classes without a value come last, and are dropped if there are many.

    >>> select([50.0, None, 20.0]).labels
    [2, 0, 1]
    """
    present = sorted((k for k, value in enumerate(values) if value is not None), key=lambda k: (values[k], k))
    if len(values) <= MANY_CLASSES:
        return Selection(labels=present + [k for k, value in enumerate(values) if value is None])
    kept = set(present[:WEAKEST]) | set(present[-STRONGEST:]) | set(keep)
    labels = [k for k in present if k in kept]
    return Selection(labels=labels, left_out=len(present) - len(labels))


def marked(result: Result) -> set[int]:
    """Return the weakest class, or a few that share the lowest value; none if many do."""
    return set(result.lowest) if len(result.lowest) <= MOST_MARKED else set()


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the Pareto front from left to right: the points that no other is at least as high as in both values.

    >>> front([(50.0, 20.0), (48.0, 30.0), (47.0, 25.0), (50.0, 18.0)])
    [1, 0]
    """
    kept = [
        place
        for place, (x, y) in enumerate(points)
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)
    ]
    return sorted(kept, key=lambda place: (points[place], place))


def class_bars(report: ReportData, key: str) -> Figure:
    """Return the classes from the weakest up: natural accuracy behind accuracy under an attack."""
    result, overall = report[key], report[key].overall.value
    chosen = select(result.shares)
    parts = [result.by_class[label] for label in chosen.labels]
    results = [(NATURAL, report[NATURAL], COLORS["natural"]), (key, result, COLORS["attack"])]
    summary = "; ".join(f"{part.name} {_share(part)}" for part in parts)
    return Figure(
        title=f"Classes, {key}",
        alt=f"Accuracy of each class with 95% intervals, {key}: {summary}",
        plot=Bars(
            names=[part.name for part in parts],
            data=[_series(name, one, chosen, marked(result), color) for name, one, color in results[key == NATURAL :]],
            mode="overlaid",
            values=True,
            line=None if overall is None else (f"all classes {percent(overall)}", overall),
            gap=chosen.gap,
            sizes=(NARROW, 670.0),
            **BAR_AXES,
        ),
    )


def model_bars(rows: Sequence[Row], classes: Sequence[str]) -> Figure:
    """Return the classes of up to six models, by their mean over the models."""
    rows = rows[: len(MODEL_COLORS)]
    known = [[value for row in rows if (value := row.shares[label]) is not None] for label in range(len(classes))]
    means = [statistics.fmean(values) if values else None for values in known]
    chosen = select(means, keep=[row.worst.label for row in rows if row.worst])
    return Figure(
        title="Classes",
        alt=f"Accuracy of each class with 95% intervals for {listing([row.model for row in rows])}; the table of "
        "changes holds the numbers.",
        plot=Bars(
            names=[classes[label] for label in chosen.labels],
            data=[
                _series(row.model, row, chosen, marked(row), color)
                for row, color in zip(rows, MODEL_COLORS, strict=False)
            ],
            gap=chosen.gap,
            sizes=(NARROW, 620.0),
            **BAR_AXES,
        ),
    )


def _series(name: str, result: Result, chosen: Selection, lowest: set[int], color: str) -> Series:
    worst = frozenset(place for place, label in enumerate(chosen.labels) if label in lowest)
    return Series.of(name, [result.by_class[label] for label in chosen.labels], color=color, worst=worst)


def average_and_worst(rows: Sequence[Row]) -> Figure | None:
    """Return average against worst class with the Pareto front; None without examples."""
    colors = chain(MODEL_COLORS, repeat(COLORS["muted"]))
    known = [(row, row.worst, color) for row, color in zip(rows, colors, strict=False) if row.worst]
    if not known:
        return None
    at = [(row.overall.value or 0.0, worst.value) for row, worst, _ in known]
    summary = "; ".join(
        f"{row.model} {percent(average)} and {percent(worst)}"
        for (row, *_), (average, worst) in zip(known, at, strict=True)
    )
    return Figure(
        title="Average and worst class",
        alt=f"Average accuracy and accuracy of the worst class, with 95% intervals: {summary}",
        plot=Points(
            data=[
                Series.of(
                    row.model,
                    [worst],
                    text=[row.model],
                    x=[row.overall.value],
                    x_low=[row.overall.low],
                    x_high=[row.overall.high],
                    color=color,
                )
                for row, worst, color in known
            ],
            front=[at[place] for place in front(at)],
            legended=False,
            x="average, %",
            y="worst class, %",
            sizes=(NARROW,),
        ),
    )


def class_radar(rows: Sequence[Row], classes: Sequence[str]) -> Figure | None:
    """Return the classes of up to six models around a center; None if too few, too many or without examples."""
    rows = rows[: len(MODEL_COLORS)]
    missing = any(value is None for row in rows for value in row.shares)
    if missing or not FEWEST_DIRECTIONS <= len(classes) <= MANY_CLASSES:
        return None
    return radar(
        classes,
        [Series(name=row.model, y=row.shares, color=color) for row, color in zip(rows, MODEL_COLORS, strict=False)],
        title="Radar chart",
        alt=f"Accuracy of each class around a center for {listing([row.model for row in rows])}; the table of changes "
        "holds the numbers.",
        unit="%",
        span=(0, 100),
    )


def confusion_matrix(report: ReportData, key: str, *, counts: bool = True) -> Figure | None:
    """Return true against predicted classes, superclasses together; None if there are too many classes.

    The cells hold counts or, if the page is switched, percent of the row; without ``counts`` percent only.
    """
    classes, order = report.dataset.classes, report.dataset.order
    if len(classes) > MOST_DRAWN:
        return None
    matrix = np.array(report.confusion[key])[np.ix_(order, order)]
    totals = matrix.sum(axis=1, keepdims=True)
    shares = 100 * matrix / totals.clip(1)
    names = [classes[label] for label in order]
    tips = [
        [
            f"{name} {'correct' if i == j else f'predicted as {names[j]}'}: {count:,} of {totals[i, 0]:,}, "
            f"{percent(shares[i, j])}"
            for j, count in enumerate(matrix[i])
        ]
        for i, name in enumerate(names)
    ]
    as_percent = [[number(share) if share >= 0.05 else "0" for share in row] for row in shares]
    as_counts = [[str(count) for count in row] for row in matrix]
    edges = np.cumsum([len(group) for group in report.dataset.together])[:-1].tolist()
    return heatmap(
        [row.tolist() if total else [None] * len(row) for row, total in zip(shares, totals[:, 0], strict=True)],
        title=f"Confusion matrix, {key}",
        alt=f"Confusion matrix, {key}. Correct: {'; '.join(tips[i][i] for i in range(len(tips)))}",
        names=names,
        x="predicted class",
        y="true class",
        unit="% of the row",
        span=(0, 100),
        groups=edges,
        confusion=True,
        texts=as_counts if counts else as_percent,
        others=as_percent if counts else None,
        tips=tips,
    )


def largest_errors(report: ReportData, key: str, most: int) -> list[str]:
    """Return the most frequent wrong predictions of a result, each as a line of text."""
    counts, classes = report.confusion[key], report.dataset.classes
    errors = [
        (count, true, predicted)
        for true, row in enumerate(counts)
        for predicted, count in enumerate(row)
        if count and true != predicted
    ]
    errors.sort(key=lambda error: -error[0])
    return [
        f"{classes[true]} predicted as {classes[predicted]}: {count:,} of {sum(counts[true]):,}, "
        f"{percent(100 * count / sum(counts[true]))}"
        for count, true, predicted in errors[:most]
    ]


def probe_curves(report: ReportData) -> list[Figure]:
    """Return what the trust checks measured over steps and radii; nothing without trust checks."""
    probes = report.sanity.probes
    if probes is None:
        return []
    losses = [(str(part.step), part.log_odds, signed(part.log_odds)) for part in probes.steps]
    broken = [(f"{part.eps:.2g}", 100 * part.broken / probes.n) for part in probes.radii]
    return [
        _curve("Mean log-odds of a wrong label (expected: rising)", "steps", losses),
        _curve("Images broken (expected: 100% at a large radius)", "eps", [(at, y, f"{y:.0f}%") for at, y in broken]),
    ]


def _curve(title: str, axis: str, values: Sequence[tuple[str, float | None, str]]) -> Figure:
    summary = ", ".join(f"{text} at {axis} {at}" for at, _, text in values)
    series = [Series(name=title, y=[value for _, value, _ in values], color=COLORS["attack"])]
    look = {"height": 90, "sizes": (320.0,), "zero": title.startswith("Images")}
    return lines(series, title=title, alt=f"{title}: {summary}", x=axis, y="", names=[at for at, *_ in values], **look)


def save_figures(subject: ReportData | ComparisonData, out: Path) -> list[Path]:
    """Write every chart as SVG, PDF and PNG, as wide as the text of a page; return the files."""
    figures: dict[str, Figure | None]
    if isinstance(subject, ReportData):
        matrices = [confusion_matrix(subject, key, counts=False) for key in subject.confusion]
        figures = {"classes": class_bars(subject, subject.strongest)}
        figures |= {f"confusion-{place}": figure for place, figure in enumerate(matrices)}
    else:
        rows, classes = subject[subject.strongest], subject.dataset.classes
        figures = {
            "average-and-worst": average_and_worst(rows),
            "classes": model_bars(rows, classes),
            "radar": class_radar(rows, classes),
        }
    out.mkdir(parents=True, exist_ok=True)
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    files = {out / f"{name}.{kind}": figure for name, figure in drawn.items() for kind in KINDS}
    for file, figure in files.items():
        figure.save(file)
    return list(files)


def _share(part: Interval) -> str:
    return "no examples" if part.value is None else f"{percent(part.value)} ({interval(part.low, part.high)})"
