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

from classwise.analysis.confusion import misclassified
from classwise.analysis.result import AnalysisResult, frame_of, interval_columns
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
    flipped = misclassified(confusion_matrix(before.label, before.predictions(attack), len(classes)))
    home = np.zeros_like(flipped)
    for label, verdicts in without.items():
        if not np.array_equal(verdicts.index, before.index):
            raise InputError(f"the model without class {label} was evaluated on other examples")
        rows = (before.predictions(attack) == label) & verdicts.survived(attack) & (before.label != label)
        home[:, label] = np.bincount(before.label[rows], minlength=len(classes))
    best = home.argmax(1)
    mutual = (best[best] == np.arange(len(classes))) & (home.max(1) > 0) & (home[best].max(1) > 0)
    pairs = [(i, j) for i, j in np.ndindex(flipped.shape) if i != j]
    frame = frame_of(
        {
            "class": classes[i],
            "predicted_class": classes[j],
            "label": i,
            "predicted": j,
            "flipped": int(flipped[i, j]),
            "homing": int(home[i, j]),
            **interval_columns("homing_percent", Estimate(**estimate(int(home[i, j]), int(flipped[i, j])))),
            "one_to_one": bool(mutual[i] and best[i] == j),
        }
        for i, j in sorted(pairs, key=lambda pair: (-home[pair], -flipped[pair]))
    )
    overall = Estimate(**estimate(int(home.sum()), int(flipped.sum())))
    finding = (
        f"No example is misclassified under {attack}, so no error can be corrected."
        if overall.value is None
        else f"Of {overall.n} examples misclassified under {attack}, {share(overall, '%')} are "
        "classified correctly under attack when the class they were predicted as is left out of training."
    )
    panels = (
        ("Misclassified", flipped, "predicted as another class under attack"),
        ("Homing", home, "of those, classified correctly by a model trained without that class"),
    )

    def figures() -> list[Figure]:
        return [
            heatmap(
                off_diagonal(matrix),
                title=f"{title} confusion matrix",
                alt=f"{title} confusion matrix of {model} under {attack}: examples {what}",
                names=classes,
                x="predicted class",
                y="true class",
                unit="examples",
                span=(0.0, float(max(1, flipped.max()))),
            )
            for title, matrix, what in panels
        ]

    return AnalysisResult(
        name="homing",
        finding=finding,
        about={"model": model, "attack": attack, "classes": classes},
        frames={"pairs": frame},
        draw=figures,
    )
