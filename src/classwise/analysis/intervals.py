"""Number of classes in each interval of accuracy (Tian, Kuang et al. 2021 at ICLR, Appendix A, Fig. 6).

The intervals are those of the figure: [0, 10], (10, 20], ..., (90, 100]. Classes at 0 are in the first one and counted
separately. ``sure`` counts the classes whose whole Wilson interval lies in their interval. If runs have different data
sets, compare shares of classes.
"""

# K classes

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from classwise.analysis.result import AnalysisResult, Record, frame_of
from classwise.analysis.run import MOST_RUNS, Run, condition, open_runs, unique_names
from classwise.core.errors import InputError
from classwise.reporting.estimates import Estimate
from classwise.reporting.figures import Figure, Series, bars
from classwise.storage.verdicts import NATURAL

NAMES = ["[0, 10]", *(f"({low}, {low + 10}]" for low in range(10, 100, 10))]


def intervals(*runs: Run | str | Path, attack: str | None = None) -> AnalysisResult:
    """Number of classes by accuracy. ``attack``: one of the report, by default the worst case over all."""
    opened = open_runs(runs, 1, MOST_RUNS)
    models = []
    for run, name in zip(opened, unique_names(opened), strict=True):
        key, report = run.key(attack), run.report
        natural, adversarial = (spread_of(report[one].by_class) for one in (NATURAL, key))
        if not natural.present:
            raise InputError(f"{run.path} has no examples")
        models.append(
            Record(
                model=name,
                dataset=report.dataset.name,
                attack=key,
                classes=run.classes,
                natural=natural,
                adversarial=adversarial,
            )
        )
    finding = "; ".join(f"{row.model}: {_summary(row)}" for row in models) + "."
    counts = [
        {
            "model": row.model,
            "attack": key,
            "interval_percent": interval,
            "classes": count,
            "share_of_classes_percent": round(100 * count / part.present, 4),
        }
        for row in models
        for key, part in ((row.attack, row.adversarial), (NATURAL, row.natural))
        for interval, count in zip(NAMES, part.counts, strict=True)
    ]
    totals = [
        {"model": row.model, "attack": key, "classes": part.present, "at_0_percent": part.zero, "sure": part.sure}
        for row in models
        for key, part in ((row.attack, row.adversarial), (NATURAL, row.natural))
    ]
    return AnalysisResult(
        name="intervals",
        finding=finding,
        values=Record(intervals=NAMES, models=models),
        frames={"intervals": frame_of(counts), "totals": frame_of(totals)},
        draw=lambda: _figures(models, finding),
    )


def spread_of(by_class: Sequence[Estimate]) -> Record:
    """Sort the classes with examples into the intervals."""
    labels: list[list[int]] = [[] for _ in NAMES]
    zero = sure = 0
    for label, part in enumerate(by_class):
        if part.value is None or part.low is None or part.high is None:
            continue
        place = place_of(part.value)
        labels[place].append(label)
        zero += part.value == 0
        sure += place_of(part.low) == place == place_of(part.high)
    counts = [len(own) for own in labels]
    return Record(counts=counts, labels=labels, zero=zero, sure=sure, present=sum(counts))


def place_of(percent: float) -> int:
    """Return the number of the interval of an accuracy.

    >>> [place_of(percent) for percent in (0.0, 10.0, 10.01, 30.0, 100.0)]
    [0, 0, 1, 2, 9]
    """
    return max(1, math.ceil(percent / 10)) - 1


def _summary(row: Record) -> str:
    part = row.adversarial
    occupied = [place for place, count in enumerate(part.counts) if count]
    many = "1 class lies" if part.present == 1 else f"{part.present} classes lie"
    where = f"in {NAMES[occupied[0]]}%"
    if len(occupied) > 1:
        where = f"in {len(occupied)} of the 10 intervals, from {NAMES[occupied[0]]} to {NAMES[occupied[-1]]}%"
    at_zero = f", {part.zero} of them at 0" if part.zero else ""
    return f"{condition(row.attack)}, {many} {where}{at_zero}"


def _figures(models: list[Record], finding: str) -> list[Figure]:
    def figure(title: str, series: list[Series]) -> Figure:
        alt = f"Bars of the number of classes in each interval of accuracy. {finding}"
        return bars(NAMES, series, title=title, alt=alt, x="accuracy, %", y="number of classes")

    if len(models) == 1:
        (row,) = models
        both = [Series(name=row.attack, y=row.adversarial.counts), Series(name=NATURAL, y=row.natural.counts)]
        return [figure(f"Classes by interval of accuracy, {row.model}", both)]
    attacks = ", ".join(dict.fromkeys(row.attack for row in models))
    return [
        figure(
            f"Classes by interval of accuracy, {title}",
            [Series(name=row.model, y=row[kind].counts) for row in models],
        )
        for title, kind in ((attacks, "adversarial"), (NATURAL, "natural"))
    ]
