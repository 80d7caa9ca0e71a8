"""How classes fare over training (Tian et al. 2021, Fig. 1): each class a curve, the gap between them shaded.

The accuracies are those of the validation images, under the training's validation attack and untouched: the paper shows
the test set, which training never sees here. Of more classes than ``sample`` a few are drawn, as the paper draws
twelve; the shaded gap and all numbers are of every class. Classes without validation images have no part in them.

The worst class of a few images changes by chance, and classes tie. The class that was worst stays so as long as no
other does worse; of several new ones it is the first. From which epoch the last worst class stays worst is counted with
ties.
"""

# K classes

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt, ValidationError

from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.core.errors import InputError
from classwise.metrics import class_variance
from classwise.reporting.figures import COLOURS, DASHES, INK, Figure, Series, lines
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.storage.verdicts import NATURAL

Floats = NDArray[np.float64]
ROBUST = "robust"
MOST_TOLD = 30
"""Epochs in a table; of more it tells every second, third, ..., and the one that was kept."""
LOOKS = [(colour, dash) for dash in DASHES for colour in COLOURS if colour != "#000000"]
"""For classes; black is the average's."""


class Accuracy(Part):
    """As an epoch of the history has it."""

    overall: float
    by_class: list[float | None]


class Validation(Part):
    """As the history has it; null where there were no images to judge by."""

    n: list[NonNegativeInt]
    robust: Accuracy | None
    natural: Accuracy | None

    def get(self, name: str) -> Accuracy | None:
        """One of the two."""
        return self.robust if name == ROBUST else self.natural


class Record(Part):
    """What is read of a line of the history."""

    epoch: int
    validation: Validation
    best: bool


class Extreme(Part):
    """A class at one end of an epoch."""

    label: int
    value: float


class Epoch(Part):
    """The classes after one epoch, in percent."""

    epoch: int
    overall: float
    best: Extreme
    worst: Extreme
    tied: int
    """How many classes are as bad as the worst."""
    gap: float
    cv: float


class Curve(Part):
    """The classes over training, untouched or under attack."""

    epochs: list[Epoch]
    by_class: list[list[float | None]]
    """For each epoch the accuracy of every class."""
    changes: list[int]
    """The epochs at which another class became the worst."""
    worst_classes: list[int]
    """The classes that were the worst at some epoch, the first first."""
    settled: int
    """The epoch from which the worst class of the last epoch stays the worst."""

    @property
    def last(self) -> Epoch:
        """How it ended."""
        return self.epochs[-1]


class Epochs(Answer):
    """The training of one model, class by class."""

    kind: ClassVar[str] = "epochs"

    model: str
    classes: list[str]
    n: list[int]
    """Validation images of each class."""
    selected: int
    """The epoch that was kept as the best."""
    robust: Curve | None
    natural: Curve | None
    shown: list[int]
    """The classes with a curve of their own in the figures."""

    @property
    def curves(self) -> dict[str, Curve]:
        """What was measured."""
        both = {ROBUST: self.robust, NATURAL: self.natural}
        return {name: curve for name, curve in both.items() if curve is not None}

    def sentences(self) -> list[str]:
        found = [self._told(name, curve) for name, curve in self.curves.items()]
        sizes = sorted({size for size in self.n if size})
        images = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        found.append(
            f"Epoch {self.selected} was kept as the best. There are {images} validation images a class: "
            "the lowest of so few is partly chance, and so is which class it is."
        )
        if absent := [name for name, size in zip(self.classes, self.n, strict=True) if not size]:
            found.append(f"Without validation images: {', '.join(absent)}.")
        return found

    def tables(self) -> list[Table]:
        def row(one: Epoch) -> list[str]:
            numbers = (one.overall, one.best.value, one.worst.value, one.gap, one.cv)
            return [
                f"{one.epoch}{' *' if one.epoch == self.selected else ''}",
                *(f"{value:.1f}" for value in numbers),
                self.classes[one.best.label],
                self.classes[one.worst.label] + (f" and {one.tied - 1} more" if one.tied > 1 else ""),
            ]

        def told(curve: Curve) -> list[Epoch]:
            step = 1 + (len(curve.epochs) - 1) // MOST_TOLD
            last = len(curve.epochs) - 1
            return [
                one
                for place, one in enumerate(curve.epochs)
                if (last - place) % step == 0 or one.epoch == self.selected
            ]

        return [
            Table(
                title=f"by epoch, {name}",
                about="Accuracy on the validation images in percent; * the epoch that was kept.",
                columns=["epoch", "average", "best", "worst", "gap", "CV", "best class", "worst class"],
                rows=[row(one) for one in told(curve)],
            )
            for name, curve in self.curves.items()
        ]

    def figures(self) -> list[Figure]:
        return [self._figure(name, curve) for name, curve in self.curves.items()]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"measured": name, "epoch": one.epoch, "label": label, "class": self.classes[label], "value": value}
            for name, curve in self.curves.items()
            for one, shares in zip(curve.epochs, curve.by_class, strict=True)
            for label, value in enumerate(shares)
        ]

    def _told(self, name: str, curve: Curve) -> str:
        widest = max(curve.epochs, key=lambda one: one.gap)
        ever, last = curve.worst_classes, curve.last
        if len(ever) == 1:
            who = f"{self.classes[ever[0]]} is the worst class throughout"
        else:
            who = (
                f"the worst class changes {len(curve.changes)} times among {len(ever)} classes; "
                f"the last, {self.classes[last.worst.label]}, stays worst from epoch {curve.settled}"
            )
        return (
            f"Accuracy, {name}: the gap between the best and the worst class is {last.gap:.1f} points at the last "
            f"epoch ({last.worst.value:.1f} to {last.best.value:.1f}%), and at most {widest.gap:.1f} (epoch "
            f"{widest.epoch}); {who}."
        )

    def _figure(self, name: str, curve: Curve) -> Figure:
        at = [one.epoch for one in curve.epochs]
        average = Series(
            name="average",
            x=at,
            y=[one.overall for one in curve.epochs],
            low=[one.worst.value for one in curve.epochs],
            high=[one.best.value for one in curve.epochs],
            colour=INK,
        )
        own = []
        for place, label in enumerate(self.shown):
            colour, dash = LOOKS[place % len(LOOKS)]
            values = [shares[label] for shares in curve.by_class]
            own.append(Series(name=self.classes[label], x=at, y=values, colour=colour, dash=dash))
        some = f", {len(self.shown)} of {len(self.classes)} classes" if len(self.shown) < len(self.classes) else ""
        return lines(
            [average, *own],
            title=f"Accuracy by epoch, {name}{some}; shaded from the worst class to the best",
            alt=f"Curves of {self.model} by class over training. {self._told(name, curve)}",
            x="epoch",
            y="validation accuracy, %",
            zero=True,
            marks={"kept": self.selected},
        )


def epochs(run: Subject | str | Path, *, sample: PositiveInt = 12, seed: NonNegativeInt = 0) -> Epochs:
    """The accuracy of every class over a training. ``sample``: how many classes a figure shows one by one."""
    subject = Subject.open(run)
    records = _records(subject)
    n = records[0].validation.n
    robust, natural = (
        curve_of([(one.epoch, part.overall, part.by_class) for one in records if (part := one.validation.get(name))])
        for name in (ROBUST, NATURAL)
    )
    if robust is None and natural is None:
        raise InputError(f"{subject.path} was trained without validation images: no accuracy by epoch is known")
    classes = [str(label) for label in range(len(n))]
    if (subject.path / "report.json").exists() and len(subject.classes) == len(n):
        classes = subject.classes
    present = np.flatnonzero(n)
    chosen = np.random.default_rng(seed).choice(present, min(sample, len(present)), replace=False)
    return Epochs(
        model=subject.name,
        classes=classes,
        n=n,
        selected=max((one.epoch for one in records if one.best), default=records[-1].epoch),
        robust=robust,
        natural=natural,
        shown=sorted(chosen.tolist()),
    )


def _records(subject: Subject) -> list[Record]:
    broken = InputError(f"{subject.path / 'metrics.jsonl'} is not the history of a training")
    try:
        records = [Record.model_validate(line) for line in subject.history]
    except ValidationError:
        raise broken from None
    sizes = {len(one.validation.n) for one in records}
    for one in records:
        for part in filter(None, (one.validation.robust, one.validation.natural)):
            sizes.add(len(part.by_class))
            if all(share is None for share in part.by_class):
                raise broken
    if len(sizes) != 1 or 0 in sizes:
        raise broken
    return records


def curve_of(measured: Sequence[tuple[int, float, Sequence[float | None]]]) -> Curve | None:
    """The curve of epochs with their overall accuracy and that of every class; None of no epochs.

    >>> curve_of([(1, 50.0, [40.0, 60.0]), (2, 60.0, [70.0, 50.0]), (3, 70.0, [80.0, 60.0])]).changes
    [2]
    """
    if not measured:
        return None
    found: list[Epoch] = []
    worst_sets: list[set[int]] = []
    for epoch, overall, by_class in measured:
        shares = np.array(by_class, dtype=np.float64)  # null becomes NaN
        least = np.nanmin(shares)
        tied = np.flatnonzero(shares == least).tolist()
        before = found[-1].worst.label if found else None
        worst, best = before if before in tied else tied[0], int(np.nanargmax(shares))
        cv = class_variance(shares)
        assert cv is not None
        found.append(
            Epoch(
                epoch=epoch,
                overall=overall,
                best=Extreme(label=best, value=float(shares[best])),
                worst=Extreme(label=worst, value=float(least)),
                tied=len(tied),
                gap=round(float(shares[best] - least), 4),
                cv=round(cv, 4),
            )
        )
        worst_sets.append(set(tied))
    path = [one.worst.label for one in found]
    settled = len(found)
    while settled and path[-1] in worst_sets[settled - 1]:
        settled -= 1
    return Curve(
        epochs=found,
        by_class=[list(by_class) for _, _, by_class in measured],
        changes=[one.epoch for one, before, now in zip(found[1:], path, path[1:], strict=False) if before != now],
        worst_classes=list(dict.fromkeys(path)),
        settled=found[settled].epoch,
    )
