"""Homing: which errors are corrected when the confused class is left out of training (Tian et al. 2021, Def. 6.1, Fig.
4).

For every class j the run's recipe is trained without the training examples of j. Entry (i, j) of the homing matrix
counts the examples of class i that are predicted as j under attack and that are classified correctly under attack by
the model trained without j. A pair is one-to-one if j is the most frequent wrong prediction among the corrected
examples of i, and i among those of j.

This needs K trainings and evaluations, in ``work/without-<label>``; finished ones are reused.
"""

# N examples, K classes

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from classwise.analysis.result import AnalysisResult, Record, frame_of, interval_columns
from classwise.analysis.retraining import evaluate_variant, recipe_of, repeatable_attack, train_variants
from classwise.analysis.run import Run
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.metrics import confusion_matrix
from classwise.reporting.estimates import Estimate, estimate, share
from classwise.reporting.figures import Figure, heatmap, off_diagonal
from classwise.storage.verdicts import Verdicts


def homing(
    run: Run | str | Path,
    *,
    work: Path | str | None = None,
    attack: str | None = None,
    workers: int = 1,
    progress: Progress = SILENT,
) -> AnalysisResult:
    """Which errors are corrected without the confused class. Trains K models into ``work``, by default RUN/homing."""
    run = Run.open(run)
    recipe_of(run)
    key = repeatable_attack(run, attack)
    run.require_classes(3)
    folder = run.path / "homing" if work is None else Path(work)
    places = {label: folder / f"without-{label}" for label in range(run.num_classes)}
    changes = {place: {"data.without_class": label} for label, place in places.items()}
    train_variants(run, changes, workers=workers, progress=progress)
    without = {
        label: evaluate_variant(run, place, attack=key, progress=progress).verdicts for label, place in places.items()
    }
    return homing_matrix(run.name, key, run.classes, run.verdicts, without)


def homing_matrix(
    model: str, attack: str, classes: list[str], before: Verdicts, without: Mapping[int, Verdicts]
) -> AnalysisResult:
    """Return the result for the verdicts of a model and of the models trained without one class."""
    flipped = confusion_matrix(before.label, before.predictions(attack), len(classes))
    np.fill_diagonal(flipped, 0)
    home = np.zeros_like(flipped)
    for label, verdicts in without.items():
        if not np.array_equal(verdicts.index, before.index):
            raise InputError(f"the model without class {label} was evaluated on other examples")
        rows = (before.predictions(attack) == label) & verdicts.survived(attack) & (before.label != label)
        home[:, label] = np.bincount(before.label[rows], minlength=len(classes))
    best = home.argmax(1)
    mutual = (best[best] == np.arange(len(classes))) & (home.max(1) > 0) & (home[best].max(1) > 0)
    order = sorted(zip(*np.nonzero(flipped), strict=True), key=lambda pair: (-home[pair], -flipped[pair], pair))
    values = Record(
        model=model,
        attack=attack,
        classes=classes,
        flipped=flipped.tolist(),
        homing=home.tolist(),
        overall=Estimate(**estimate(int(home.sum()), int(flipped.sum()))),
        pairs=[
            Record(
                true=classes[i],
                taken_for=classes[j],
                home=Estimate(**estimate(int(home[i, j]), int(flipped[i, j]))),
                came_home=int(home[i, j]),
                one_to_one=bool(mutual[i] and best[i] == j),
            )
            for i, j in order
        ],
    )
    finding = (
        f"No example is misclassified under {attack}, so no error can be corrected."
        if values.overall.value is None
        else f"Of {values.overall.n} examples misclassified under {attack}, {share(values.overall, '%')} are "
        "classified correctly under attack when the class they were predicted as is left out of training."
    )
    cells = order + [(i, j) for i, j in np.ndindex(flipped.shape) if i != j and not flipped[i, j]]
    rows = [
        {
            "class": classes[i],
            "predicted_class": classes[j],
            "label": int(i),
            "predicted": int(j),
            "flipped": int(flipped[i, j]),
            "homing": int(home[i, j]),
            **interval_columns("homing_percent", Estimate(**estimate(int(home[i, j]), int(flipped[i, j])))),
            "one_to_one": bool(mutual[i] and best[i] == j),
        }
        for i, j in cells
    ]
    return AnalysisResult(
        name="homing",
        finding=finding,
        values=values,
        frames={"pairs": frame_of(rows)},
        draw=lambda: _figures(values),
    )


def _figures(values: Record) -> list[Figure]:
    most = float(max([1, *(count for row in values.flipped for count in row)]))
    panels = (
        ("Misclassified", values.flipped, "predicted as another class under attack"),
        ("Homing", values.homing, "of those, classified correctly by a model trained without that class"),
    )
    return [
        heatmap(
            off_diagonal(matrix),
            title=f"{title} confusion matrix",
            alt=f"{title} confusion matrix of {values.model} under {values.attack}: examples {what}",
            names=values.classes,
            x="predicted class",
            y="true class",
            unit="examples",
            span=(0.0, most),
        )
        for title, matrix, what in panels
    ]
