"""Which classes are taken for which, untouched and under attack (Tian et al. 2021, Fig. 2 and Table 2; Fig. 4a).

* The **misclassified matrix** counts wrong predictions, row by row of the true class; its diagonal is empty.
* The **symmetry score** is the correlation between the rates off the diagonal and their mirror images: 1 where i is
  taken for j as often as j for i.
* The **within-superclass share** is how many of the wrong predictions stay in the true superclass. Beside it stands
  what chance would give: the share of the wrong classes that lie in it.

Intervals are Wilson's for shares, and a seeded bootstrap over examples within each class for the symmetry.
"""

# N examples, K classes

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.analysis.superclasses import Superclasses, membership, superclasses_of
from classwise.core.errors import InputError
from classwise.metrics import confusion_matrix
from classwise.reporting.estimates import Estimate, estimate, share
from classwise.reporting.figures import Figure, heatmap, off_diagonal
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.storage.verdicts import NATURAL

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_CONFUSED = 10
"""Pairs that are told."""
RESAMPLES = 500


class Pair(Part):
    """Two classes that are taken for each other."""

    one: str
    other: str
    share: Estimate
    """How many examples of the two are taken for the other, in percent."""
    one_for_other: Estimate
    other_for_one: Estimate


class Symmetry(Part):
    """How alike the matrix and its mirror image are; null where there are too few errors to tell."""

    value: float | None
    low: float | None
    high: float | None


class Matrix(Part):
    """Who was taken for whom."""

    counts: list[list[int]]
    wrong: int
    symmetry: Symmetry
    pairs: list[Pair]
    """From the most confused."""
    within_superclass: Estimate | None
    within_by_chance: float | None
    by_superclass: list[list[int]] | None


class Confusion(Answer):
    """The confusion of one model."""

    kind: ClassVar[str] = "confusion"

    model: str
    dataset: str
    classes: list[str]
    superclasses: dict[str, list[int]]
    attack: str
    natural: Matrix
    adversarial: Matrix

    def sentences(self) -> list[str]:
        found = [f"Under {self.attack}: {_told(self.adversarial)}", f"Untouched: {_told(self.natural)}"]
        if (within := self.adversarial.within_superclass) is not None and within.value is not None:
            found.append(
                f"{share(within, '%')} of the wrong predictions under attack stay "
                f"in the true superclass; by chance {self.adversarial.within_by_chance:.1f}% would."
            )
        return found

    def tables(self) -> list[Table]:
        return [
            Table(
                title=f"most confused, {name}",
                about="Percent of the examples of both classes that are taken for the other [95%].",
                columns=["pair", "either way", "first for second", "second for first"],
                rows=[
                    [f"{p.one} – {p.other}", share(p.share), share(p.one_for_other), share(p.other_for_one)]
                    for p in matrix.pairs
                ],
            )
            for name, matrix in ((self.attack, self.adversarial), (NATURAL, self.natural))
            if matrix.pairs
        ]

    def figures(self) -> list[Figure]:
        order = [label for labels in self.superclasses.values() for label in labels] or list(range(len(self.classes)))
        sizes = [len(labels) for labels in self.superclasses.values()]
        names = [self.classes[label] for label in order]
        found = []
        for name, matrix in ((self.attack, self.adversarial), (NATURAL, self.natural)):
            counts = np.array(matrix.counts)[np.ix_(order, order)]
            shares = _rates(counts) * 100
            found.append(
                heatmap(
                    off_diagonal(shares),
                    title=f"Wrong predictions, {name}",
                    alt=f"Matrix of wrong predictions of {self.model} on {self.dataset}, {name}: {_told(matrix)}",
                    names=names,
                    x="taken for",
                    y="true class",
                    unit="% of the row",
                    digits=1,
                    groups=np.cumsum(sizes)[:-1].tolist() if sizes else (),
                )
            )
        return found

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "attack": name,
                "label": i,
                "predicted": j,
                "count": count,
                "class": self.classes[i],
                "as": self.classes[j],
            }
            for name, matrix in ((NATURAL, self.natural), (self.attack, self.adversarial))
            for i, row in enumerate(matrix.counts)
            for j, count in enumerate(row)
        ]


def confusion(
    run: Subject | str | Path,
    *,
    attack: str | None = None,
    superclasses: Superclasses | Path | None = None,
    seed: int = 0,
) -> Confusion:
    """Which classes a model takes for which. ``attack``: one of the report's, else all of them together."""
    subject = Subject.open(run)
    key, verdicts, classes = subject.key(attack), subject.verdicts, subject.classes
    if len(classes) < 2:
        raise InputError(f"{subject.path} has one class: there is nothing to confuse it with")
    groups = superclasses_of(subject.report.dataset.name, len(classes), superclasses)
    natural, adversarial = (
        matrix_of(confusion_matrix(verdicts.label, verdicts.predictions(name), len(classes)), classes, groups, seed)
        for name in (NATURAL, key)
    )
    return Confusion(
        model=subject.name,
        dataset=subject.report.dataset.name,
        classes=classes,
        superclasses=groups,
        attack=key,
        natural=natural,
        adversarial=adversarial,
    )


def matrix_of(counts: NDArray[np.int64], classes: list[str], groups: dict[str, list[int]], seed: int = 0) -> Matrix:
    """Everything that is told of one (K, K) matrix of counts."""
    n, wrong = counts.sum(1), counts.copy()
    np.fill_diagonal(wrong, 0)
    within = chance = by_group = None
    if groups:
        member = membership(groups, len(classes))
        same = member[:, None] == member
        inside = int(wrong[same].sum())
        within = Estimate(**estimate(inside, int(wrong.sum())))
        others = (same.sum(1) - 1) / (len(classes) - 1)
        chance = round(float(100 * (wrong.sum(1) * others).sum() / wrong.sum()), 4) if wrong.any() else None
        onto = np.eye(len(groups), dtype=np.int64)[member]
        by_group = (onto.T @ counts @ onto).tolist()
    return Matrix(
        counts=counts.tolist(),
        wrong=int(wrong.sum()),
        symmetry=_symmetry(counts, seed),
        pairs=_pairs(wrong, n, classes),
        within_superclass=within,
        within_by_chance=chance,
        by_superclass=by_group,
    )


def symmetry(counts: NDArray[np.int64]) -> float | None:
    """The correlation of the rates off the diagonal with their mirror images, over the classes that have examples.

    >>> symmetry(np.array([[8, 2, 0], [2, 7, 1], [0, 1, 9]]))
    1.0
    """
    labels, predicted = (np.repeat(place, counts[counts > 0]) for place in np.nonzero(counts))
    return _correlation(labels, predicted, counts.sum(1))


def _correlation(labels: Ints, predicted: Ints, n: Ints) -> float | None:
    """The same from examples. Most pairs of many classes never occur, and a zero adds nothing to a sum of products."""
    known = (labels != predicted) & (n[predicted] > 0)
    pairs, count = np.unique(labels[known] * len(n) + predicted[known], return_counts=True)
    i, j = np.divmod(pairs, len(n))
    rates = count / n[i]
    mirrored = np.zeros(len(pairs))
    if len(pairs):
        at = np.searchsorted(pairs, j * len(n) + i).clip(max=len(pairs) - 1)
        mirrored = np.where(pairs[at] == j * len(n) + i, rates[at], 0.0)
    present = int((n > 0).sum())
    cells = present * (present - 1)
    if cells < 4:
        return None
    mean = rates.sum() / cells
    variance = (rates**2).sum() / cells - mean**2
    if variance <= 1e-15:
        return None
    return round(float(((rates * mirrored).sum() / cells - mean**2) / variance), 12)


def _symmetry(counts: Ints, seed: int) -> Symmetry:
    value = symmetry(counts)
    if value is None:
        return Symmetry(value=None, low=None, high=None)
    labels, predicted = (np.repeat(place, counts[counts > 0]) for place in np.nonzero(counts))
    n = counts.sum(1)
    start = (n.cumsum() - n)[labels]
    random = np.random.default_rng(seed)
    drawn = (
        _correlation(labels, predicted[start + (random.random(len(labels)) * n[labels]).astype(np.int64)], n)
        for _ in range(RESAMPLES)
    )
    low, high = np.quantile([one for one in drawn if one is not None], [0.025, 0.975])
    return Symmetry(value=round(value, 4), low=round(float(low), 4), high=round(float(high), 4))


def _pairs(wrong: NDArray[np.int64], n: NDArray[np.int64], classes: list[str]) -> list[Pair]:
    both = wrong + wrong.T
    first, second = np.triu_indices(len(classes), 1)
    total = n[first] + n[second]
    shares = np.divide(both[first, second], total, out=np.zeros(len(first)), where=total > 0)
    order = np.argsort(-shares, kind="stable")[:MOST_CONFUSED]
    return [
        Pair(
            one=classes[i],
            other=classes[j],
            share=Estimate(**estimate(int(both[i, j]), int(n[i] + n[j]))),
            one_for_other=Estimate(**estimate(int(wrong[i, j]), int(n[i]))),
            other_for_one=Estimate(**estimate(int(wrong[j, i]), int(n[j]))),
        )
        for i, j in zip(first[order], second[order], strict=True)
        if both[i, j]
    ]


def _rates(counts: NDArray[np.int64]) -> Floats:
    """The share of each row; NaN in the rows of absent classes."""
    n = counts.sum(1, keepdims=True)
    return np.where(n > 0, counts / np.maximum(n, 1), np.nan)


def _told(matrix: Matrix) -> str:
    if not matrix.pairs:
        return "no example is misclassified."
    top = matrix.pairs[0]
    said = f"the most confused pair is {top.one} – {top.other} ({top.share.value:.1f}% of both)"
    if matrix.symmetry.value is None:
        return f"{said}."
    low, high = matrix.symmetry.low, matrix.symmetry.high
    return f"{said}; confusion is symmetric to {matrix.symmetry.value:.2f} [{low:.2f}, {high:.2f}]."
