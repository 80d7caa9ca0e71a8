"""The charts of a report and of a comparison, for their pages and as files for papers."""

# K classes

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from classwise.reporting.estimates import Interval
from classwise.reporting.figures import NARROW, Bars, Figure, Heatmap, Lines, Points, Radar, Series
from classwise.reporting.formatting import interval, listing, number, percent, signed
from classwise.reporting.plotting import COLORS, KINDS, MODEL_COLORS
from classwise.reporting.results import ComparisonData, ReportData, Row, Worst
from classwise.storage.verdicts import NATURAL

MANY_CLASSES = 40
"""Above this number of classes, bars show the weakest and the strongest only."""
WEAKEST, STRONGEST = 20, 5
MOST_DRAWN = 200
"""Above this number of classes a confusion matrix is not drawn."""
MOST_MARKED = 3
"""Maximum number of tied lowest classes that are marked."""
FEWEST_DIRECTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The classes that a chart shows, from the weakest up."""

    weakest: list[int]
    strongest: list[int]
    """Empty if all classes are shown; they are then in ``weakest``."""
    left_out: int
    """Number of classes between the two that are not shown."""

    @property
    def labels(self) -> list[int]:
        """All classes shown."""
        return [*self.weakest, *self.strongest]

    @property
    def gap(self) -> tuple[int, str] | None:
        """The row before which classes are omitted, and a text with their number."""
        return (len(self.weakest), f"{self.left_out:,} classes in between") if self.strongest else None


def select(values: Sequence[float | None], *, keep: Iterable[int] = ()) -> Selection:
    """Sort classes by value; of many, take the weakest, the strongest and those in ``keep``.

    Classes without a value come last, and are dropped if there are many.

    >>> select([50.0, None, 20.0]).weakest
    [2, 0, 1]
    """
    present = sorted((k for k, value in enumerate(values) if value is not None), key=lambda k: (values[k], k))
    if len(values) <= MANY_CLASSES:
        absent = [k for k, value in enumerate(values) if value is None]
        return Selection(weakest=present + absent, strongest=[], left_out=0)
    if len(present) <= WEAKEST + STRONGEST:
        return Selection(weakest=present, strongest=[], left_out=0)
    kept, strongest = set(keep), present[-STRONGEST:]
    weakest = present[:WEAKEST] + [k for k in present[WEAKEST:-STRONGEST] if k in kept]
    return Selection(weakest=weakest, strongest=strongest, left_out=len(present) - len(weakest) - STRONGEST)


def marked(values: Sequence[float | None], worst: Worst | None) -> set[int]:
    """Return the weakest class, or a few that share the lowest value; none if many do."""
    tied = set() if worst is None else {label for label, value in enumerate(values) if value == worst.value}
    return tied if len(tied) <= MOST_MARKED else set()


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


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
    result, natural = report[key], report[NATURAL]
    chosen = select([part.value for part in result.by_class])
    labels = chosen.labels
    lowest = marked([part.value for part in result.by_class], result.worst)
    worst = frozenset(place for place, label in enumerate(labels) if label in lowest)
    results = [(NATURAL, natural, COLORS["natural"]), (key, result, COLORS["attack"])]
    series = [
        Series.of(name, [one.by_class[label] for label in labels], color=color, worst=worst)
        for name, one, color in results[key == NATURAL :]
    ]
    overall = result.overall.value
    summary = "; ".join(f"{part.name} {_share(part)}" for part in (result.by_class[label] for label in labels))
    return Figure(
        title=f"Classes, {key}",
        alt=f"Accuracy of each class with 95% intervals, {key}: {summary}",
        plot=Bars(
            names=[report.dataset.classes[label] for label in labels],
            data=series,
            mode="overlaid",
            values=True,
            span=(0, 100),
            line=None if overall is None else (f"all classes {percent(overall)}", overall),
            gap=chosen.gap,
            y="accuracy, %, with 95% intervals",
            sizes=(NARROW, 670.0),
        ),
    )


def model_bars(rows: Sequence[Row], classes: Sequence[str]) -> Figure:
    """Return the classes of up to six models, by their mean over the models."""
    rows = rows[: len(MODEL_COLORS)]
    means = [mean([row.shares[label] for row in rows]) for label in range(len(classes))]
    chosen = select(means, keep=[row.worst.label for row in rows if row.worst])
    labels = chosen.labels
    series = [
        Series.of(
            row.model,
            [row.by_class[label] for label in labels],
            color=color,
            worst=frozenset(place for place, label in enumerate(labels) if label in marked(row.shares, row.worst)),
        )
        for row, color in zip(rows, MODEL_COLORS, strict=False)
    ]
    return Figure(
        title="Classes",
        alt=f"Accuracy of each class with 95% intervals for {listing([row.model for row in rows])}; the table of "
        "changes holds the numbers.",
        plot=Bars(
            names=[classes[label] for label in labels],
            data=series,
            span=(0, 100),
            gap=chosen.gap,
            y="accuracy, %, with 95% intervals",
            sizes=(NARROW, 620.0),
        ),
    )


def average_and_worst(rows: Sequence[Row]) -> Figure | None:
    """Return average against worst class with the Pareto front; None without examples."""
    known = [(place, row, row.worst) for place, row in enumerate(rows) if row.worst and row.overall.value is not None]
    if not known:
        return None
    at = [(row.overall.value or 0.0, worst.value) for _, row, worst in known]
    summary = "; ".join(
        f"{row.model} {percent(row.overall.value)} and {percent(worst.value)}" for _, row, worst in known
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
                    color=MODEL_COLORS[place] if place < len(MODEL_COLORS) else COLORS["muted"],
                )
                for place, row, worst in known
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
    return Figure(
        title="Radar chart",
        alt=f"Accuracy of each class around a center for {listing([row.model for row in rows])}; the table of changes "
        "holds the numbers.",
        plot=Radar(
            names=classes,
            data=[
                Series(name=row.model, y=row.shares, color=color)
                for row, color in zip(rows, MODEL_COLORS, strict=False)
            ],
            unit="%",
            span=(0, 100),
        ),
    )


def confusion_matrix(report: ReportData, key: str, *, counts: bool = True) -> Figure | None:
    """Return true against predicted classes, superclasses together; None if there are too many classes.

    The cells hold counts or, if the page is switched, percent of the row; without ``counts`` percent only.
    """
    classes, groups = report.dataset.classes, report.dataset.together
    if len(classes) > MOST_DRAWN:
        return None
    order = [label for group in groups for label in group]
    matrix = [[report.confusion[key][true][predicted] for predicted in order] for true in order]
    shares = [[100 * count / max(1, sum(row)) for count in row] for row in matrix]
    names = [classes[label] for label in order]
    tips = [
        [
            f"{name} {'correct' if i == j else f'predicted as {names[j]}'}: {count:,} of {sum(row):,}, "
            f"{percent(shares[i][j])}"
            for j, count in enumerate(row)
        ]
        for i, (name, row) in enumerate(zip(names, matrix, strict=True))
    ]
    as_percent = [[number(share) if share >= 0.05 else "0" for share in row] for row in shares]
    as_counts = [[str(count) for count in row] for row in matrix]
    edges = [sum(map(len, groups[: place + 1])) for place in range(len(groups) - 1)]
    return Figure(
        title=f"Confusion matrix, {key}",
        alt=f"Confusion matrix, {key}. Correct: {'; '.join(tips[i][i] for i in range(len(tips)))}",
        plot=Heatmap(
            z=[[None if not sum(row) else share for share in part] for row, part in zip(matrix, shares, strict=True)],
            names=names,
            columns=names,
            x="predicted class",
            y="true class",
            unit="% of the row",
            span=(0, 100),
            groups=edges,
            confusion=True,
            texts=as_counts if counts else as_percent,
            others=as_percent if counts else None,
            tips=tips,
        ),
    )


def largest_errors(report: ReportData, key: str, most: int) -> list[str]:
    """Return the most frequent wrong predictions of a result, each as a line of text."""
    counts, classes = report.confusion[key], report.dataset.classes
    errors = (
        (count, -true, -predicted)
        for true, row in enumerate(counts)
        for predicted, count in enumerate(row)
        if count and true != predicted
    )
    found = sorted(errors, reverse=True)[:most]
    return [
        f"{classes[-true]} predicted as {classes[-predicted]}: {count:,} of {sum(counts[-true]):,}, "
        f"{percent(100 * count / sum(counts[-true]))}"
        for count, true, predicted in found
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
    plot = Lines(
        data=[Series(name=title, y=[value for _, value, _ in values], color=COLORS["attack"])],
        names=[at for at, _, _ in values],
        x=axis,
        height=90,
        sizes=(320.0,),
        zero=title.startswith("Images"),
    )
    return Figure(title=title, alt=f"{title}: {summary}", plot=plot)


def save_figures(subject: ReportData | ComparisonData, out: Path) -> list[Path]:
    """Write every chart as SVG, PDF and PNG, as wide as the text of a page; return the files."""
    out.mkdir(parents=True, exist_ok=True)
    return [path for name, figure in _all(subject) for path in figure.save_all(out / name, KINDS)]


def _all(subject: ReportData | ComparisonData) -> Iterator[tuple[str, Figure]]:
    found: list[tuple[str, Figure | None]]
    if isinstance(subject, ReportData):
        found = [("classes", class_bars(subject, subject.strongest))]
        found += [
            (f"confusion-{place}", confusion_matrix(subject, key, counts=False))
            for place, key in enumerate(subject.confusion)
        ]
    else:
        rows, classes = subject[subject.strongest], subject.dataset.classes
        found = [
            ("average-and-worst", average_and_worst(rows)),
            ("classes", model_bars(rows, classes)),
            ("radar", class_radar(rows, classes)),
        ]
    yield from ((name, figure) for name, figure in found if figure is not None)


def _share(part: Interval) -> str:
    return "no examples" if part.value is None else f"{percent(part.value)} ({interval(part.low, part.high)})"
