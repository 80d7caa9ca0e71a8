"""What the worst class costs the average: one class's weight or beta swept.

Weights as in Li & Liu 2023, Fig. 3, betas as in Tian et al. 2021, Fig. 4c. Given one run, its recipe is trained anew
for every value of the sweep, into ``work/<turn>-<label>-<value>``; given several runs, they are the points. A point is
on the Pareto front if no other has a better average and a better worst class. With several points close together a
front is partly chance: the intervals of both are told.
"""

# K classes

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from classwise.analysis.answer import Answer
from classwise.analysis.runs import evaluated, one_attack, recipe_of, trained
from classwise.analysis.subject import Subject
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.reporting.estimates import ClassEstimate, Estimate, share
from classwise.reporting.figures import Figure, Series, lines, points
from classwise.reporting.part import Part
from classwise.reporting.report import Worst
from classwise.reporting.tables import Table
from classwise.training.plan import make_objective

Turn = Literal["weight", "beta"]


class Setting(Part):
    """One model on the way."""

    name: str
    value: float | None
    """What was turned to: of the run that is swept, what it was trained with; None where runs are compared."""
    average: Estimate
    worst: Worst
    by_class: list[ClassEstimate]
    front: bool
    """Whether no other model is better in both."""


class TradeOff(Answer):
    """Average against worst class."""

    kind: ClassVar[str] = "trade-off"

    attack: str
    turned: str | None
    """What was swept, in words; None where runs were given."""
    label: int | None
    settings: list[Setting]

    def sentences(self) -> list[str]:
        best = max(self.settings, key=lambda one: one.worst.value)
        first = self.settings[0]
        found = [
            f"The worst class does best in {best.name}: {share(best.worst, '%')} "
            f"({best.worst.name}), at an average of {best.average.value:.1f}%."
        ]
        if best is not first and best.average.value is not None and first.average.value is not None:
            found.append(
                f"Against {first.name} that is {best.worst.value - first.worst.value:+.1f} points for the worst class "
                f"and {best.average.value - first.average.value:+.1f} on average."
            )
        front = [one.name for one in self.settings if one.front]
        return [*found, f"On the Pareto front: {', '.join(front)}."]

    def tables(self) -> list[Table]:
        return [
            Table(
                title=f"average and worst class, {self.attack}",
                about="Percent [95%]; on the front are those that no other beats in both.",
                columns=["", "average", "worst class", "worst", "front"],
                rows=[
                    [
                        one.name,
                        share(one.average),
                        one.worst.name,
                        share(one.worst),
                        "yes" if one.front else "",
                    ]
                    for one in self.settings
                ],
            )
        ]

    def figures(self) -> list[Figure]:
        front = sorted((one for one in self.settings if one.front), key=lambda one: one.average.value or 0.0)
        others = [one for one in self.settings if not one.front]

        def series(name: str, some: Sequence[Setting]) -> Series:
            return Series(
                name=name,
                x=[one.average.value for one in some],
                y=[one.worst.value for one in some],
                low=[one.worst.low for one in some],
                high=[one.worst.high for one in some],
                text=[one.name for one in some],
            )

        drawn = [
            points(
                [series("Pareto front", front), *([series("others", others)] if others else [])],
                title="Average against worst class",
                alt=f"Average and worst-class accuracy under {self.attack}. {self.sentences()[-1]}",
                x="average accuracy under attack, %",
                y="accuracy of the worst class, %",
                joined=["Pareto front"],
            )
        ]
        swept = sorted((one for one in self.settings if one.value is not None), key=lambda one: one.value or 0.0)
        if len(swept) > 1 and self.turned is not None:
            at = [one.value for one in swept]
            own = [] if self.label is None else [_of_class(swept, self.label)]
            drawn.append(
                lines(
                    [
                        Series(name="average", x=at, y=[one.average.value for one in swept]),
                        Series(name="worst class", x=at, y=[one.worst.value for one in swept]),
                        *own,
                    ],
                    title=f"Over the {self.turned}",
                    alt=f"Accuracy under {self.attack} over the {self.turned}",
                    x=self.turned,
                    y="accuracy under attack, %",
                    zero=True,
                )
            )
        return drawn

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "name": one.name,
                "value": one.value,
                "label": part.label,
                "class": part.name,
                "accuracy": part.value,
                "n": part.n,
                "front": one.front,
            }
            for one in self.settings
            for part in one.by_class
        ]


def trade_off(
    *runs: Subject | str | Path,
    turn: Turn = "weight",
    label: str | int | None = None,
    values: Sequence[Number] = (0.5, 1.0, 2.0, 4.0),
    attack: str | None = None,
    work: Path | None = None,
    workers: int = 1,
    progress: Progress = SILENT,
) -> TradeOff:
    """Sweep one class's weight or beta from a run's recipe, or compare several runs.

    ``label`` is the class that is turned, by name or number; the worst one of the run unless told. A weight is relative
    to the other classes' 1, a beta is what the class gets in place of the objective's.
    """
    subjects = [Subject.open(run) for run in runs]
    if not subjects:
        raise InputError("trade-off needs a run whose recipe is swept, or several to compare")
    if len(subjects) > 1:
        key = subjects[0].key(attack)
        return _answer(key, None, None, [(subject.name, None, subject) for subject in subjects])
    (subject,) = subjects
    recipe = recipe_of(subject)
    key = one_attack(subject, attack)
    chosen = subject.label_of(label, key)
    if not values:
        raise InputError("values: at least one is needed")
    name = subject.classes[chosen]
    folder = subject.path / "trade-off" if work is None else work
    places = {value: folder / f"{turn}-{chosen}-{value:g}" for value in values}
    policy = {"weight": ("fixed-weights", "weights"), "beta": ("beta-vector", "beta")}[turn]
    if recipe.policy["name"] != "uniform":
        raise InputError(
            f"the run's policy is {recipe.policy['name']!r}: a sweep takes its place, so it must be uniform"
        )
    changes = {
        place: {"policy": {"name": policy[0], policy[1]: {str(chosen): value}}} for value, place in places.items()
    }
    trained(subject, changes, workers=workers, progress=progress)
    found = [
        (f"{turn} {value:g}", float(value), evaluated(subject, place, attack=key, progress=progress))
        for value, place in places.items()
    ]
    own = 1.0 if turn == "weight" else make_objective(recipe).beta
    return _answer(key, f"{turn} of class {name}", chosen, [(subject.name, own, subject), *found])


def _answer(
    key: str, turned: str | None, label: int | None, found: list[tuple[str, float | None, Subject]]
) -> TradeOff:
    measured = []
    for name, value, subject in found:
        subject.key(key)
        result = subject.report[key]
        if result.worst is None or result.overall.value is None:
            raise InputError(f"{subject.path} has no examples that were attacked")
        measured.append((name, value, result))
    places = [(result.overall.value or 0.0, result.worst.value if result.worst else 0.0) for *_, result in measured]
    return TradeOff(
        attack=key,
        turned=turned,
        label=label,
        settings=[
            Setting(
                name=name,
                value=value,
                average=result.overall,
                worst=result.worst,
                by_class=result.by_class,
                front=not any(beats(other, place) for other in places),
            )
            for (name, value, result), place in zip(measured, places, strict=True)
        ],
    )


def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether one point is at least as good in both and better in one.

    >>> beats((50.0, 20.0), (49.0, 20.0)), beats((50.0, 20.0), (50.0, 20.0)), beats((51.0, 19.0), (50.0, 20.0))
    (True, False, False)
    """
    return one[0] >= other[0] and one[1] >= other[1] and one != other


def _of_class(swept: Sequence[Setting], label: int) -> Series:
    parts = [one.by_class[label] for one in swept]
    return Series(
        name=f"class {parts[0].name}",
        x=[one.value for one in swept],
        y=[part.value for part in parts],
        low=[part.low for part in parts],
        high=[part.high for part in parts],
    )
