"""Confusion matrices without and under attack (Tian et al. 2021, Fig. 2 and Table 2; Fig. 4a).

* The **misclassified matrix** counts wrong predictions by true class (rows).
* The **symmetry** is the correlation between the rates off the diagonal and the transposed ones: 1 if i is predicted as
  j as often as j as i.
* The **within-superclass share** is the percentage of wrong predictions within the true superclass, next to the share
  of the wrong classes that lie in it, which is what chance gives.

Shares have Wilson intervals, the symmetry a seeded bootstrap over examples within each class.
"""

# N examples, K classes

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from classwise.analysis.result import AnalysisResult, Record
from classwise.analysis.run import Run, condition
from classwise.analysis.superclasses import Superclasses, membership, superclasses_of
from classwise.metrics import confusion_matrix
from classwise.reporting.estimates import Estimate, estimate, share
from classwise.reporting.figures import Figure, heatmap, off_diagonal
from classwise.storage.verdicts import NATURAL

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_PAIRS = 10
"""Number of most confused pairs that are listed."""
RESAMPLES = 500


def confusion(
    run: Run | str | Path,
    *,
    attack: str | None = None,
    superclasses: Superclasses | Path | None = None,
    seed: int = 0,
) -> AnalysisResult:
    """Which classes are predicted as which. ``attack``: one of the report, by default the worst case over all."""
    run = Run.open(run)
    key = run.key(attack)
    run.require_classes(2)
    verdicts, classes = run.verdicts, run.classes
    groups = superclasses_of(run.report.dataset.name, len(classes), superclasses)
    natural, adversarial = (
        matrix_of(confusion_matrix(verdicts.label, verdicts.predictions(name), len(classes)), classes, groups, seed)
        for name in (NATURAL, key)
    )
    values = Record(
        model=run.name,
        dataset=run.report.dataset.name,
        classes=classes,
        superclasses=groups,
        attack=key,
        natural=natural,
        adversarial=adversarial,
    )
    return confusion_result(values)


def confusion_result(values: Record) -> AnalysisResult:
    """Return the result for two matrices of ``matrix_of``."""
    matrices = {values.attack: values.adversarial, NATURAL: values.natural}
    return AnalysisResult(
        name="confusion",
        finding=_finding(values.attack, values.adversarial),
        values=values,
        frames={"predictions": pd.concat([_frame(name, matrix, values) for name, matrix in matrices.items()])},
        draw=lambda: [_figure(name, matrix, values) for name, matrix in matrices.items()],
    )


def matrix_of(counts: Ints, classes: list[str], groups: dict[str, list[int]], seed: int = 0) -> Record:
    """Return the numbers of one (K, K) matrix of counts."""
    n, wrong = counts.sum(1), counts.copy()
    np.fill_diagonal(wrong, 0)
    within = chance = by_group = None
    if groups:
        member = membership(groups, len(classes))
        same = member[:, None] == member
        within = Estimate(**estimate(int(wrong[same].sum()), int(wrong.sum())))
        others = (same.sum(1) - 1) / (len(classes) - 1)
        chance = round(float(100 * (wrong.sum(1) * others).sum() / wrong.sum()), 4) if wrong.any() else None
        onto = np.eye(len(groups), dtype=np.int64)[member]
        by_group = (onto.T @ counts @ onto).tolist()
    return Record(
        counts=counts.tolist(),
        wrong=int(wrong.sum()),
        symmetry=_symmetry(counts, seed),
        pairs=_pairs(wrong, n, classes),
        within_superclass=within,
        within_by_chance=chance,
        by_superclass=by_group,
    )


def symmetry(counts: NDArray[np.int64]) -> float | None:
    """Return the correlation of the rates off the diagonal with the transposed ones, over the classes with examples.

    >>> symmetry(np.array([[8, 2, 0], [2, 7, 1], [0, 1, 9]]))
    1.0
    """
    labels, predicted = (np.repeat(place, counts[counts > 0]) for place in np.nonzero(counts))
    return _correlation(labels, predicted, counts.sum(1))


def _correlation(labels: Ints, predicted: Ints, n: Ints) -> float | None:
    """Compute the symmetry from examples; with many classes most pairs never occur and add nothing to the sums."""
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


def _symmetry(counts: Ints, seed: int) -> Record:
    value = symmetry(counts)
    if value is None:
        return Record(value=None, low=None, high=None)
    labels, predicted = (np.repeat(place, counts[counts > 0]) for place in np.nonzero(counts))
    n = counts.sum(1)
    start = (n.cumsum() - n)[labels]
    random = np.random.default_rng(seed)
    drawn = (
        _correlation(labels, predicted[start + (random.random(len(labels)) * n[labels]).astype(np.int64)], n)
        for _ in range(RESAMPLES)
    )
    low, high = np.quantile([one for one in drawn if one is not None], [0.025, 0.975])
    return Record(value=round(value, 4), low=round(float(low), 4), high=round(float(high), 4))


def _pairs(wrong: Ints, n: Ints, classes: list[str]) -> list[Record]:
    """Return the most confused pairs: how many examples of the two, or of one, are predicted as the other."""
    both = wrong + wrong.T
    first, second = np.triu_indices(len(classes), 1)
    total = n[first] + n[second]
    shares = np.divide(both[first, second], total, out=np.zeros(len(first)), where=total > 0)
    order = np.argsort(-shares, kind="stable")[:MOST_PAIRS]
    return [
        Record(
            one=classes[i],
            other=classes[j],
            share=Estimate(**estimate(int(both[i, j]), int(n[i] + n[j]))),
            one_for_other=Estimate(**estimate(int(wrong[i, j]), int(n[i]))),
            other_for_one=Estimate(**estimate(int(wrong[j, i]), int(n[j]))),
        )
        for i, j in zip(first[order], second[order], strict=True)
        if both[i, j]
    ]


def _rates(counts: Ints) -> Floats:
    """Return the share of each row; NaN in the rows of absent classes."""
    n = counts.sum(1, keepdims=True)
    return np.where(n > 0, counts / np.maximum(n, 1), np.nan)


def _frame(attack: str, matrix: Record, values: Record) -> pd.DataFrame:
    """Return all cells, wrong predictions first, from the most frequent."""
    counts, names = np.array(matrix.counts), np.array(values.classes, dtype=object)
    label, predicted = (place.ravel() for place in np.indices(counts.shape))
    frame = pd.DataFrame(
        {
            "class": names[label],
            "predicted_class": names[predicted],
            "attack": attack,
            "label": label,
            "predicted": predicted,
            "count": counts.ravel(),
            "share_of_class_percent": 100 * _rates(counts).ravel(),
        }
    )
    order = np.lexsort((-frame["share_of_class_percent"].fillna(-1), label == predicted))
    return frame.iloc[order]


def _figure(attack: str, matrix: Record, values: Record) -> Figure:
    sizes = [len(labels) for labels in values.superclasses.values()]
    order = [label for labels in values.superclasses.values() for label in labels] or list(range(len(values.classes)))
    shares = 100 * _rates(np.array(matrix.counts)[np.ix_(order, order)])
    return heatmap(
        off_diagonal(shares),
        title=f"Wrong predictions, {attack}",
        alt=f"Matrix of wrong predictions of {values.model} on {values.dataset}. {_finding(attack, matrix)}",
        names=[values.classes[label] for label in order],
        x="predicted class",
        y="true class",
        unit="% of the row",
        digits=1,
        groups=np.cumsum(sizes)[:-1].tolist() if sizes else (),
    )


def _finding(attack: str, matrix: Record) -> str:
    if not matrix.pairs:
        return f"No example is misclassified {condition(attack)}."
    top, within = matrix.pairs[0], matrix.within_superclass
    superclass = (
        ""
        if within is None
        else f"; {share(within, '%')} of the wrong predictions stay in the true superclass "
        f"({matrix.within_by_chance:.1f}% by chance)"
    )
    return (
        f"Most confused classes {condition(attack)}: {top.one} – {top.other}, with {share(top.share, '%')} of their "
        f"images predicted as the other{superclass}."
    )
