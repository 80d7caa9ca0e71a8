"""Number of classes in each interval of accuracy (Tian, Kuang et al. 2021 at ICLR, Appendix A, Fig. 6).

The intervals are those of the figure: [0, 10], (10, 20], ..., (90, 100]. Classes at 0 are in the first one and counted
separately. ``sure`` counts the classes whose whole Wilson interval lies in their interval. If runs have different data
sets, compare shares of classes.
"""

# K classes

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import pandas as pd

from classwise.analysis.result import AnalysisResult, frame_of
from classwise.analysis.run import MOST_RUNS, Run, condition, open_runs, unique_names
from classwise.core.errors import InputError
from classwise.reporting.estimates import Estimate
from classwise.reporting.figures import Figure, Series, bars
from classwise.storage.verdicts import NATURAL

NAMES = ["[0, 10]", *(f"({low}, {low + 10}]" for low in range(10, 100, 10))]


def intervals(*runs: Run | str | Path, attack: str | None = None) -> AnalysisResult:
    """Number of classes by accuracy. ``attack``: one of the report, by default the worst case over all."""
    opened = open_runs(runs, 1, MOST_RUNS)
    names = unique_names(opened)
    counts, totals = [], []
    for run, name in zip(opened, names, strict=True):
        for key in (run.key(attack), NATURAL):
            part = count_classes(run.report[key].by_class)
            if not part.present:
                raise InputError(f"{run.path} has no examples")
            row = {"model": name, "attack": key}
            counts += [
                {
                    **row,
                    "interval_percent": interval,
                    "classes": count,
                    "share_of_classes_percent": round(100 * count / part.present, 4),
                }
                for interval, count in zip(NAMES, part.counts, strict=True)
            ]
            totals.append({**row, "classes": part.present, "at_0_percent": part.zero, "sure": part.sure})
    frames = {"intervals": frame_of(counts), "totals": frame_of(totals)}
    finding = "; ".join(map(_summary, names, opened, repeat(attack))) + "."
    return AnalysisResult(
        name="intervals",
        finding=finding,
        about={"models": names, "datasets": [run.report.dataset.name for run in opened]},
        frames=frames,
        draw=lambda: _figures(frames["intervals"], finding),
    )


@dataclass(frozen=True, slots=True)
class Counts:
    """Classes with examples by interval of accuracy."""

    counts: list[int]
    zero: int
    """Classes at an accuracy of 0."""
    sure: int
    """Classes whose Wilson interval lies in their interval of accuracy."""

    @property
    def present(self) -> int:
        """Number of classes with examples."""
        return sum(self.counts)


def count_classes(by_class: Sequence[Estimate]) -> Counts:
    """Count the classes with examples in each interval."""
    counts = [0] * len(NAMES)
    zero = sure = 0
    for part in by_class:
        if part.value is None or part.low is None or part.high is None:
            continue
        place = place_of(part.value)
        counts[place] += 1
        zero += part.value == 0
        sure += place_of(part.low) == place == place_of(part.high)
    return Counts(counts, zero, sure)


def place_of(percent: float) -> int:
    """Return the number of the interval of an accuracy.

    >>> [place_of(percent) for percent in (0.0, 10.0, 10.01, 30.0, 100.0)]
    [0, 0, 1, 2, 9]
    """
    return max(1, math.ceil(percent / 10)) - 1


def _summary(name: str, run: Run, attack: str | None) -> str:
    key = run.key(attack)
    part = count_classes(run.report[key].by_class)
    occupied = [place for place, count in enumerate(part.counts) if count]
    many = "1 class lies" if part.present == 1 else f"{part.present} classes lie"
    where = f"in {NAMES[occupied[0]]}%"
    if len(occupied) > 1:
        where = f"in {len(occupied)} of the 10 intervals, from {NAMES[occupied[0]]} to {NAMES[occupied[-1]]}%"
    at_zero = f", {part.zero} of them at 0" if part.zero else ""
    return f"{name}: {condition(key)}, {many} {where}{at_zero}"


def _figures(frame: pd.DataFrame, finding: str) -> list[Figure]:
    def figure(title: str, rows: pd.DataFrame, by: str) -> Figure:
        alt = f"Bars of the number of classes in each interval of accuracy. {finding}"
        series = [Series(name=name, y=list(part["classes"])) for name, part in rows.groupby(by, sort=False)]
        title = f"Classes by interval of accuracy, {title}"
        return bars(NAMES, series, title=title, alt=alt, x="accuracy, %", y="number of classes")

    models = frame["model"].unique()
    if len(models) == 1:
        return [figure(models[0], frame, "attack")]
    natural = frame["attack"] == NATURAL
    attacks = ", ".join(frame["attack"][~natural].unique())
    return [figure(attacks, frame[~natural], "model"), figure(NATURAL, frame[natural], "model")]
