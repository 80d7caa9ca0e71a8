"""Class accuracies over training (Tian et al. 2021, Fig. 1): one curve per class, and the gap between them.

Accuracies are those of the validation images, without attack and under the training's validation attack; the paper
shows test accuracies, which are not available during training here. With more classes than ``sample``, a random sample
is drawn, as the paper draws twelve; the shaded gap and all numbers are of every class with validation images.

With few validation images the worst class changes by chance, and classes tie. A worst class stays the worst until
another one is strictly worse; among several new ones the first counts. ``worst_since_epoch`` is the epoch from
which the last worst class is the worst, ties included.
"""

# K classes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import NonNegativeInt, PositiveInt, ValidationError

from classwise.analysis.result import AnalysisResult, frame_of
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
    measured = {
        name: parts
        for name in (ROBUST, NATURAL)
        if (parts := [(one.epoch, part) for one in records if (part := one.validation.get(name))])
    }
    if not measured:
        raise InputError(f"{run.path} was trained without validation images, so it has no accuracies by epoch")
    classes = [str(label) for label in range(len(n))]
    if (run.path / "report.json").exists() and len(run.classes) == len(n):
        classes = run.classes
    by_class = frame_of(
        {"accuracy": name, "epoch": epoch, "label": label, "class": classes[label], "accuracy_percent": value}
        for name, parts in measured.items()
        for epoch, part in parts
        for label, value in enumerate(part.by_class)
    )
    selected = max((one.epoch for one in records if one.best), default=records[-1].epoch)
    found = [curve_of(name, parts, classes, selected) for name, parts in measured.items()]
    by_epoch = frame_of(row for rows, _ in found for row in rows)
    findings = [_finding(row, n) for _, row in found]
    present = np.flatnonzero(n)
    shown = sorted(np.random.default_rng(seed).choice(present, min(sample, len(present)), replace=False).tolist())
    return AnalysisResult(
        name="epochs",
        finding=findings[0],
        about={"model": run.name, "validation_images": n, "sample": sample, "seed": seed},
        frames={"classes by epoch": by_class, "epochs": by_epoch, "summary": frame_of(row for _, row in found)},
        draw=lambda: [
            _figure(
                rows, own, shown, selected, f"Curves of the class accuracies of {run.name} over training. {finding}"
            )
            for (_, rows), (_, own), finding in zip(
                by_epoch.groupby("accuracy", sort=False),
                by_class.groupby("accuracy", sort=False),
                findings,
                strict=True,
            )
        ],
    )


def curve_of(
    name: str, measured: Sequence[tuple[int, Accuracy]], classes: Sequence[str], selected: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row for each epoch, and a row that summarizes them."""
    rows: list[dict[str, Any]] = []
    ties: list[list[int]] = []
    path: list[int] = []
    for epoch, part in measured:
        shares = np.array(part.by_class, dtype=np.float64)  # null becomes NaN
        low, high = float(np.nanmin(shares)), float(np.nanmax(shares))
        ties.append(np.flatnonzero(shares == low).tolist())
        path.append(path[-1] if path and path[-1] in ties[-1] else ties[-1][0])
        rows.append(
            {
                "accuracy": name,
                "epoch": epoch,
                "selected": epoch == selected,
                "average_percent": part.overall,
                "best_class_percent": high,
                "worst_class_percent": low,
                "gap_points": round(high - low, 4),
                "class_variance": round(class_variance(shares) or 0.0, 4),
                "best_class": classes[int(np.nanargmax(shares))],
                "worst_class": classes[path[-1]],
                "classes_tied_for_worst": len(ties[-1]),
            }
        )
    settled = len(path)
    while settled and path[-1] in ties[settled - 1]:
        settled -= 1
    widest = max(rows, key=lambda row: row["gap_points"])
    return rows, {
        "accuracy": name,
        "gap_points": rows[-1]["gap_points"],
        "widest_gap_points": widest["gap_points"],
        "widest_gap_epoch": widest["epoch"],
        "worst_class": classes[path[-1]],
        "worst_since_epoch": measured[settled][0],
        "changes_of_worst_class": sum(before != now for before, now in pairwise(path)),
    }


def _finding(row: Mapping[str, Any], n: Sequence[int]) -> str:
    sizes = sorted({size for size in n if size})
    images = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return (
        f"The maximum class difference (MCD) of the {row['accuracy']} accuracies is {row['gap_points']:.1f} points "
        f"after the last epoch (at most {row['widest_gap_points']:.1f}, epoch {row['widest_gap_epoch']}); the worst "
        f"class, {row['worst_class']}, has been the worst since epoch {row['worst_since_epoch']}, after "
        f"{row['changes_of_worst_class']} changes ({images} validation images per class)."
    )


def _figure(rows: pd.DataFrame, own: pd.DataFrame, shown: Sequence[int], selected: int, alt: str) -> Figure:
    name, x = rows["accuracy"].iloc[0], rows["epoch"].tolist()
    average, low, high = (rows[f"{one}_percent"].tolist() for one in ("average", "worst_class", "best_class"))
    parts = [own[own["label"] == label] for label in shown]
    curves = [
        Series(name=part["class"].iloc[0], x=x, y=part["accuracy_percent"].tolist(), color=color, dash=dash)
        for part, (color, dash) in zip(parts, cycle(LOOKS), strict=False)
    ]
    total = own["label"].nunique()
    some = f", {len(shown)} of {total} classes" if len(shown) < total else ""
    return lines(
        [Series(name="average", x=x, y=average, low=low, high=high, color=INK), *curves],
        title=f"{name.capitalize()} accuracy by epoch{some}; shaded from the worst class to the best",
        alt=alt,
        x="epoch",
        y="validation accuracy, %",
        zero=True,
        marks={"selected": selected},
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
