"""Models class by class, one around the other (Li & Liu 2023, Figs. 4 to 6).

The first run is the baseline. Where runs share their examples, each class has its gains and losses and an exact McNemar
test, corrected by Holm for the number of classes; where not, only the difference is known.
"""

# K classes

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.analysis.several import MOST_RUNS, compared, in_view, opened
from classwise.core.errors import InputError
from classwise.reporting.comparison import Row
from classwise.reporting.estimates import ClassEstimate
from classwise.reporting.figures import COLOURS, Figure, Series, bars
from classwise.reporting.figures import radar as radar_figure
from classwise.reporting.part import Part
from classwise.reporting.tables import Table

SURE = 0.05


class Difference(Part):
    """One class of a model less that of the baseline."""

    label: int
    name: str = Field(alias="class")
    points: float | None
    """Null where one of them has no examples of the class."""
    gained: int | None
    lost: int | None
    p_value: float | None
    """Null where the two were not measured on the same examples."""


class Model(Part):
    """One model, class by class."""

    model: str
    average: float
    by_class: list[ClassEstimate]
    differences: list[Difference]
    """To the baseline; empty for the baseline itself."""


class Radar(Answer):
    """Models around one centre."""

    kind: ClassVar[str] = "radar"

    dataset: str
    attack: str
    classes: list[str]
    models: list[Model]
    paired: bool
    """Whether all models were measured on the same examples."""
    shown: list[int]
    """The classes in the figures."""

    def sentences(self) -> list[str]:
        found = [self._told(one) for one in self.models[1:]]
        if len(self.shown) < len(self.classes):
            some = f"the {len(self.shown)} weakest classes of {self.models[0].model}, of {len(self.classes)}"
            found.append(f"Table and figures show {some}.")
        return found

    def tables(self) -> list[Table]:
        def sure(difference: Difference) -> str:
            return "" if difference.p_value is None else f" (p {difference.p_value:.2g})"

        by_label = [{part.label: part for part in one.differences} for one in self.models[1:]]
        about = "Accuracy in percent, and the difference to the first model in points"
        return [
            Table(
                title=f"class by class, {self.attack}",
                about=f"{about}; p: exact McNemar test, corrected for the number of classes."
                if self.paired
                else f"{about}; the models were not all measured on the same examples.",
                columns=[
                    "class",
                    *(one.model for one in self.models),
                    *(f"{one.model} – {self.models[0].model}" for one in self.models[1:]),
                ],
                rows=[
                    [
                        self.classes[label],
                        *(_cell(one.by_class[label].value) for one in self.models),
                        *(
                            "–" if (part := own[label]).points is None else f"{part.points:+.1f}{sure(part)}"
                            for own in by_label
                        ),
                    ]
                    for label in self.shown
                ],
            )
        ]

    def figures(self) -> list[Figure]:
        names = [self.classes[label] for label in self.shown]
        some = f", the {len(self.shown)} weakest classes" if len(self.shown) < len(self.classes) else ""
        title = f"Accuracy by class, {self.attack}{some}"
        alt = f"Models on {self.dataset}, class by class. {' '.join(self.sentences())}"
        each = []
        for one in self.models:
            parts = [one.by_class[label] for label in self.shown]
            low, high = [part.low for part in parts], [part.high for part in parts]
            each.append(Series(name=one.model, y=[part.value for part in parts], low=low, high=high))
        highest = max((value for one in each for value in one.y if value is not None), default=100.0)
        span = (0, max(10, 10 * math.ceil(highest / 10)))
        return [
            radar_figure(names, each, title=title, alt=alt, unit="%", span=span)
            if len(names) > 2  # two directions make no shape
            else bars(names, each, title=title, alt=alt, y="accuracy, %"),
            bars(
                names,
                [
                    Series(name=one.model, y=[one.differences[label].points for label in self.shown], colour=colour)
                    for one, colour in zip(self.models[1:], COLOURS[1:], strict=False)
                ],
                title=f"Difference to {self.models[0].model} by class, {self.attack}{some}",
                alt=alt,
                y="points",
            ),
        ]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "model": one.model,
                "label": label,
                "class": name,
                "accuracy": one.by_class[label].value,
                "low": one.by_class[label].low,
                "high": one.by_class[label].high,
                "n": one.by_class[label].n,
                "points": one.differences[label].points if one.differences else None,
                "p_value": one.differences[label].p_value if one.differences else None,
            }
            for one in self.models
            for label, name in enumerate(self.classes)
        ]

    def _told(self, one: Model) -> str:
        known = [(part.points, part) for part in one.differences if part.points is not None]
        higher, lower = (sum(sign * points > 0 for points, _ in known) for sign in (1, -1))
        said = f"{one.model} against {self.models[0].model} under {self.attack}: "
        said += f"{higher} classes are higher, {lower} lower"
        if any(part.p_value is not None for _, part in known):
            sure = [points for points, part in known if part.p_value is not None and part.p_value < SURE]
            up = sum(points > 0 for points in sure)
            said += f"; beyond chance {up} higher, {len(sure) - up} lower"
        if len(known) > 1:
            (most, best), (least, worst) = max(known, key=_points), min(known, key=_points)
            said += f"; from {worst.name} ({least:+.1f} points) to {best.name} ({most:+.1f})"
        return f"{said}."


def radar(*runs: Subject | str | Path, attack: str | None = None) -> Radar:
    """Hold up to six runs against the first, class by class. ``attack``: one that all have, or natural; else all."""
    subjects = opened(runs, 2, MOST_RUNS)
    key, comparison = compared(subjects, attack)
    classes, rows = comparison.dataset.classes, comparison[key]
    models = []
    for row in rows:
        if row.overall.value is None:
            raise InputError(f"{row.model} has no examples")
        models.append(
            Model(
                model=row.model,
                average=row.overall.value,
                by_class=row.by_class,
                differences=[] if row is rows[0] else _differences(row, rows[0]),
            )
        )
    return Radar(
        dataset=comparison.dataset.name,
        attack=key,
        classes=classes,
        models=models,
        paired=comparison.paired,
        shown=in_view(rows[0].shares),
    )


def _differences(row: Row, base: Row) -> list[Difference]:
    paired = {part.label: part for part in row.changes}

    def difference(ours: ClassEstimate, theirs: ClassEstimate) -> Difference:
        change = paired.get(ours.label)
        known = ours.value is not None and theirs.value is not None
        return Difference(
            label=ours.label,
            name=ours.name,
            points=round((ours.value or 0.0) - (theirs.value or 0.0), 4) if known else None,
            gained=None if change is None else change.gained,
            lost=None if change is None else change.lost,
            p_value=None if change is None else change.p_value,
        )

    return [difference(ours, theirs) for ours, theirs in zip(row.by_class, base.by_class, strict=True)]


def _points(known: tuple[float, Difference]) -> float:
    return known[0]


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
