"""Class accuracies over training (Tian et al. 2021, Fig. 1): one curve per class, and the gap between them.

Accuracies are those of the validation images, without attack and under the training's validation attack; the paper
shows test accuracies, which are not available during training here. With more classes than ``sample``, a random sample
is drawn, as the paper draws twelve; the shaded gap and all numbers are of every class with validation images.

With few validation images the worst class changes by chance, and classes tie. A worst class stays the worst until
another one is strictly worse; among several new ones the first counts. ``settled`` is the epoch from which the last
worst class is the worst, ties included.
"""

# K classes

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import NonNegativeInt, PositiveInt, ValidationError

from classwise.analysis.result import AnalysisResult, Record, frame_of
from classwise.analysis.run import Run
from classwise.core.errors import InputError
from classwise.metrics import class_variance
from classwise.reporting.figures import DASHES, INK, SERIES_COLORS, Figure, Series, lines
from classwise.reporting.part import Part
from classwise.storage.verdicts import NATURAL

ROBUST = "robust"
LOOKS = [(color, dash) for dash in DASHES for color in SERIES_COLORS if color != "#000000"]
"""Color and dash of the classes; black is the average."""


class Accuracy(Part):
    """Accuracies of an epoch of the history."""

    overall: float
    by_class: list[float | None]


class Validation(Part):
    """Validation of an epoch of the history; null without validation images."""

    n: list[NonNegativeInt]
    robust: Accuracy | None
    natural: Accuracy | None

    def get(self, name: str) -> Accuracy | None:
        """Return the robust or the natural accuracies."""
        return self.robust if name == ROBUST else self.natural


class Epoch(Part):
    """The part of a line of the history that is used."""

    epoch: int
    validation: Validation
    best: bool


def epochs(run: Run | str | Path, *, sample: PositiveInt = 12, seed: NonNegativeInt = 0) -> AnalysisResult:
    """Class accuracies over a training. ``sample``: number of classes that a figure draws."""
    run = Run.open(run)
    records = _records(run)
    n = records[0].validation.n
    curves = {
        name: curve_of(
            [(one.epoch, part.overall, part.by_class) for one in records if (part := one.validation.get(name))]
        )
        for name in (ROBUST, NATURAL)
    }
    if not any(curves.values()):
        raise InputError(f"{run.path} was trained without validation images, so it has no accuracies by epoch")
    classes = [str(label) for label in range(len(n))]
    if (run.path / "report.json").exists() and len(run.classes) == len(n):
        classes = run.classes
    present = np.flatnonzero(n)
    chosen = np.random.default_rng(seed).choice(present, min(sample, len(present)), replace=False)
    values = Record(
        model=run.name,
        classes=classes,
        n=n,
        selected=max((one.epoch for one in records if one.best), default=records[-1].epoch),
        **curves,
        shown=sorted(chosen.tolist()),
    )
    known = {name: curve for name, curve in curves.items() if curve is not None}
    return AnalysisResult(
        name="epochs",
        finding=_finding(*next(iter(known.items())), values),
        values=values,
        frames={
            "classes by epoch": _class_frame(known, classes),
            "epochs": frame_of(row for name, curve in known.items() for row in _epoch_rows(name, curve, values)),
        },
        draw=lambda: [_figure(name, curve, values) for name, curve in known.items()],
    )


def _class_frame(curves: dict[str, Record], classes: list[str]) -> pd.DataFrame:
    return frame_of(
        {"accuracy": name, "epoch": one.epoch, "label": label, "class": classes[label], "accuracy_percent": value}
        for name, curve in curves.items()
        for one, shares in zip(curve.epochs, curve.by_class, strict=True)
        for label, value in enumerate(shares)
    )


def _epoch_rows(name: str, curve: Record, values: Record) -> list[dict[str, object]]:
    return [
        {
            "accuracy": name,
            "epoch": one.epoch,
            "selected": one.epoch == values.selected,
            "average_percent": one.overall,
            "best_class_percent": one.best.value,
            "worst_class_percent": one.worst.value,
            "gap_points": one.gap,
            "class_variance": one.cv,
            "best_class": values.classes[one.best.label],
            "worst_class": values.classes[one.worst.label],
            "classes_tied_for_worst": one.tied,
        }
        for one in curve.epochs
    ]


def _finding(name: str, curve: Record, values: Record) -> str:
    last, widest = curve.epochs[-1], max(curve.epochs, key=lambda one: float(one.gap))
    worst = values.classes[last.worst.label]
    sizes = sorted({size for size in values.n if size})
    images = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return (
        f"The {name} accuracies of the best and the worst class differ by {last.gap:.1f} points after the last epoch "
        f"(at most {widest.gap:.1f}, epoch {widest.epoch}); the worst class, {worst}, has been the worst since epoch "
        f"{curve.settled}, after {len(curve.changes)} changes ({images} validation images per class)."
    )


def _figure(name: str, curve: Record, values: Record) -> Figure:
    x = [one.epoch for one in curve.epochs]
    average = Series(
        name="average",
        x=x,
        y=[one.overall for one in curve.epochs],
        low=[one.worst.value for one in curve.epochs],
        high=[one.best.value for one in curve.epochs],
        color=INK,
    )
    own = []
    for place, label in enumerate(values.shown):
        color, dash = LOOKS[place % len(LOOKS)]
        accuracies = [shares[label] for shares in curve.by_class]
        own.append(Series(name=values.classes[label], x=x, y=accuracies, color=color, dash=dash))
    some = f", {len(values.shown)} of {len(values.classes)} classes" if len(own) < len(values.classes) else ""
    return lines(
        [average, *own],
        title=f"{name.capitalize()} accuracy by epoch{some}; shaded from the worst class to the best",
        alt=f"Curves of the class accuracies of {values.model} over training. {_finding(name, curve, values)}",
        x="epoch",
        y="validation accuracy, %",
        zero=True,
        marks={"selected": values.selected},
    )


def _records(run: Run) -> list[Epoch]:
    broken = InputError(f"{run.path / 'metrics.jsonl'} is not a training history")
    try:
        records = [Epoch.model_validate(line) for line in run.history]
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


def curve_of(measured: Sequence[tuple[int, float, Sequence[float | None]]]) -> Record | None:
    """Return the curve for epochs with their overall accuracy and that of every class; None without epochs.

    >>> curve_of([(1, 50.0, [40.0, 60.0]), (2, 60.0, [70.0, 50.0]), (3, 70.0, [80.0, 60.0])]).changes
    [2]
    """
    if not measured:
        return None
    found: list[Record] = []
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
            Record(
                epoch=epoch,
                overall=overall,
                best=Record(label=best, value=float(shares[best])),
                worst=Record(label=worst, value=float(least)),
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
    return Record(
        epochs=found,
        by_class=[list(by_class) for _, _, by_class in measured],
        changes=[one.epoch for one, before, now in zip(found[1:], path, path[1:], strict=False) if before != now],
        worst_classes=list(dict.fromkeys(path)),
        settled=found[settled].epoch,
    )
