"""Does a flipped example come home when the class it was taken for is gone? (Tian et al. 2021, Def. 6.1, Fig. 4)

For every class j the run's recipe is trained anew without the training examples of j, labels as they were. Entry
(i, j) of the homing matrix counts the examples of class i that the attack turned into j and that withstand it in the
model without j. A pair is one-to-one where most of what comes home to i comes from j, and most of j's from i.

K trainings and evaluations, in ``work/without-<label>``; asked again, finished ones are read.
"""

# N examples, K classes

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from classwise.analysis.result import Answer
from classwise.analysis.retraining import evaluated, one_attack, recipe_of, trained
from classwise.analysis.run import Subject
from classwise.core.errors import InputError
from classwise.core.progress import SILENT, Progress
from classwise.metrics import confusion_matrix
from classwise.reporting.estimates import Estimate, estimate, share
from classwise.reporting.figures import Figure, heatmap, off_diagonal
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.storage.verdicts import Verdicts

Ints = NDArray[np.int64]
TOLD = 10
"""Pairs in the table."""


class HomingPair(Part):
    """Examples of one class that were taken for another."""

    true: str
    taken_for: str
    home: Estimate
    """How many of them withstand the attack without the other class, in percent; ``n`` were flipped."""
    came_home: int
    one_to_one: bool


class Homing(Answer):
    """The homing matrix of a run."""

    kind: ClassVar[str] = "homing"

    model: str
    attack: str
    classes: list[str]
    flipped: list[list[int]]
    """[i][j] examples of i that the attack turned into j."""
    homing: list[list[int]]
    """[i][j] how many of those withstand it in the model without j."""
    overall: Estimate
    pairs: list[HomingPair]
    """From the most examples that come home."""

    def sentences(self) -> list[str]:
        if self.overall.value is None:
            return [f"{self.attack} flips no example: there is nothing that could come home."]
        found = [
            f"Of {self.overall.n} examples that {self.attack} flips, {share(self.overall, '%')} "
            f"withstand it once the class they were taken for is "
            "left out of training."
        ]
        mutual = {frozenset((pair.true, pair.taken_for)): pair for pair in reversed(self.pairs) if pair.one_to_one}
        named = [f"{pair.true} – {pair.taken_for}" for pair in reversed(mutual.values())]
        return [*found, f"One-to-one: {', '.join(named)}." if named else "No pair is one-to-one."]

    def tables(self) -> list[Table]:
        return [
            Table(
                title="coming home",
                about="Of the examples that were flipped, those that withstand the attack without the confound class.",
                columns=["true class", "taken for", "flipped", "come home", "percent [95%]", "one-to-one"],
                rows=[
                    [
                        pair.true,
                        pair.taken_for,
                        str(pair.home.n),
                        str(pair.came_home),
                        share(pair.home),
                        "yes" if pair.one_to_one else "",
                    ]
                    for pair in self.pairs[:TOLD]
                ],
            )
        ]

    def figures(self) -> list[Figure]:
        most = float(max([1, *(count for row in self.flipped for count in row)]))
        parts = (
            ("Misclassified", self.flipped, "that the attack turned into another class"),
            ("Homing", self.homing, "of those, that withstand the attack in a model trained without that class"),
        )
        return [
            heatmap(
                off_diagonal(matrix),
                title=f"{title} confusion matrix",
                alt=f"{title} confusion matrix of {self.model} under {self.attack}: examples {what}",
                names=self.classes,
                x="taken for",
                y="true class",
                unit="examples",
                span=(0.0, most),
            )
            for title, matrix, what in parts
        ]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"label": i, "predicted": j, "flipped": self.flipped[i][j], "homing": self.homing[i][j]}
            for i in range(len(self.classes))
            for j in range(len(self.classes))
            if i != j
        ]


def homing(
    run: Subject | str | Path,
    *,
    work: Path | str | None = None,
    attack: str | None = None,
    workers: int = 1,
    progress: Progress = SILENT,
) -> Homing:
    """Train K models without one class each, and count who comes home. They go into ``work``, else RUN/homing."""
    subject = Subject.open(run)
    recipe_of(subject)
    key = one_attack(subject, attack)
    if subject.num_classes < 3:
        raise InputError(f"{subject.path} has {subject.num_classes} classes: without one of them there is no question")
    folder = subject.path / "homing" if work is None else Path(work)
    places = {label: folder / f"without-{label}" for label in range(subject.num_classes)}
    changes = {place: {"data.without_class": label} for label, place in places.items()}
    trained(subject, changes, workers=workers, progress=progress)
    without = {
        label: evaluated(subject, place, attack=key, progress=progress).verdicts for label, place in places.items()
    }
    return matrix_of(subject.name, key, subject.classes, subject.verdicts, without)


def matrix_of(model: str, attack: str, classes: list[str], before: Verdicts, without: Mapping[int, Verdicts]) -> Homing:
    """The homing matrix from the verdicts of the model and of those without one class."""
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
    return Homing(
        model=model,
        attack=attack,
        classes=classes,
        flipped=flipped.tolist(),
        homing=home.tolist(),
        overall=Estimate(**estimate(int(home.sum()), int(flipped.sum()))),
        pairs=[
            HomingPair(
                true=classes[i],
                taken_for=classes[j],
                home=Estimate(**estimate(int(home[i, j]), int(flipped[i, j]))),
                came_home=int(home[i, j]),
                one_to_one=bool(mutual[i] and best[i] == j),
            )
            for i, j in order
        ],
    )
