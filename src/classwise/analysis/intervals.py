"""How many classes lie in each interval of accuracy (Tian, Kuang et al. 2021 at ICLR, Appendix A, Fig. 6).

The intervals are the figure's: [0, 10], (10, 20], ..., (90, 100]. Zero thus counts in the first; how many classes are
at zero is told apart. A class whose Wilson interval reaches into another interval may belong there; how many surely
stay where they are is told too. Runs may be of different data sets; then shares of the classes compare, not numbers.
"""

# K classes

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.analysis.several import MOST_RUNS, names_apart, opened
from classwise.core.errors import InputError
from classwise.reporting.estimates import Estimate
from classwise.reporting.figures import Figure, Series, bars
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.storage.verdicts import NATURAL

NAMES = ["[0, 10]", *(f"({low}, {low + 10}]" for low in range(10, 100, 10))]


class Spread(Part):
    """The classes of one model, by interval."""

    counts: list[int]
    """How many classes lie in each interval."""
    labels: list[list[int]]
    """Which."""
    zero: int
    """How many are at 0, which the first interval counts too."""
    sure: int
    """How many have their whole 95% interval where they are."""
    present: int
    """How many have examples."""

    @property
    def occupied(self) -> int:
        """How many intervals hold a class."""
        return sum(count > 0 for count in self.counts)


class Row(Part):
    """One model."""

    model: str
    dataset: str
    attack: str
    classes: list[str]
    natural: Spread
    adversarial: Spread


class Intervals(Answer):
    """Models, each with the number of its classes in every interval."""

    kind: ClassVar[str] = "intervals"

    intervals: list[str]
    models: list[Row]

    def sentences(self) -> list[str]:
        return [
            f"{row.model}: {_told(row.attack, row.adversarial)}; {_told(NATURAL, row.natural)}." for row in self.models
        ]

    def tables(self) -> list[Table]:
        parts = [part for row in self.models for part in (row.adversarial, row.natural)]
        return [
            Table(
                title="classes by interval of accuracy",
                about="The number of classes whose accuracy in percent lies in each. "
                "Sure are those whose whole 95% interval does.",
                columns=["", *(f"{row.model}, {name}" for row in self.models for name in (row.attack, NATURAL))],
                rows=[
                    *(
                        [name, *(str(part.counts[place]) for part in parts)]
                        for place, name in enumerate(self.intervals)
                    ),
                    ["of these at 0", *(str(part.zero) for part in parts)],
                    ["sure", *(f"{part.sure} of {part.present}" for part in parts)],
                ],
            )
        ]

    def figures(self) -> list[Figure]:
        def figure(title: str, series: list[Series]) -> Figure:
            alt = f"Bars of the number of classes in each interval of accuracy. {' '.join(self.sentences())}"
            return bars(self.intervals, series, title=title, alt=alt, x="accuracy, %", y="number of classes")

        if len(self.models) == 1:
            (row,) = self.models
            both = [Series(name=row.attack, y=row.adversarial.counts), Series(name=NATURAL, y=row.natural.counts)]
            return [figure(f"Classes by interval of accuracy, {row.model}", both)]
        attacks = ", ".join(dict.fromkeys(row.attack for row in self.models))
        return [
            figure(
                f"Classes by interval of accuracy, {attacks}",
                [Series(name=row.model, y=row.adversarial.counts) for row in self.models],
            ),
            figure(
                f"Classes by interval of accuracy, {NATURAL}",
                [Series(name=row.model, y=row.natural.counts) for row in self.models],
            ),
        ]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "model": row.model,
                "attack": name,
                "interval": interval,
                "number": count,
                "share": round(100 * count / part.present, 4),
            }
            for row in self.models
            for name, part in ((row.attack, row.adversarial), (NATURAL, row.natural))
            for interval, count in zip(self.intervals, part.counts, strict=True)
        ]


def intervals(*runs: Subject | str | Path, attack: str | None = None) -> Intervals:
    """Count the classes by accuracy. ``attack``: one of the reports', else all of them together."""
    subjects = opened(runs, 1, MOST_RUNS)
    models = []
    for subject, name in zip(subjects, names_apart(subjects), strict=True):
        key, report = subject.key(attack), subject.report
        natural, adversarial = (spread_of(report[one].by_class) for one in (NATURAL, key))
        if not natural.present:
            raise InputError(f"{subject.path} holds no examples")
        models.append(
            Row(
                model=name,
                dataset=report.dataset.name,
                attack=key,
                classes=subject.classes,
                natural=natural,
                adversarial=adversarial,
            )
        )
    return Intervals(intervals=NAMES, models=models)


def spread_of(by_class: Sequence[Estimate]) -> Spread:
    """Classes sorted into the intervals; absent ones into none."""
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
    return Spread(counts=counts, labels=labels, zero=zero, sure=sure, present=sum(counts))


def place_of(percent: float) -> int:
    """The interval that an accuracy lies in.

    >>> [place_of(percent) for percent in (0.0, 10.0, 10.01, 30.0, 100.0)]
    [0, 0, 1, 2, 9]
    """
    return max(1, math.ceil(percent / 10)) - 1


def _told(name: str, part: Spread) -> str:
    lowest = next(place for place, count in enumerate(part.counts) if count)
    highest = max(place for place, count in enumerate(part.counts) if count)
    where = f"all in {NAMES[lowest]}%" if lowest == highest else f"from {NAMES[lowest]} to {NAMES[highest]}%"
    many = "class lies" if part.present == 1 else "classes lie"
    at_zero = f", {part.zero} of them at 0" if part.zero else ""
    return f"{name}, {part.present} {many} in {part.occupied} of the 10 intervals, {where}{at_zero}"
