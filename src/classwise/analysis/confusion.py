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
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array

from classwise.analysis.result import AnalysisResult, frame_of, interval_columns
from classwise.analysis.run import Run, condition
from classwise.analysis.superclasses import Superclasses, membership, superclasses_of
from classwise.metrics import confusion_matrix
from classwise.reporting.estimates import Estimate, estimate, share
from classwise.reporting.figures import Figure, heatmap, off_diagonal
from classwise.storage.verdicts import NATURAL

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
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
    verdicts, classes, dataset = run.verdicts, run.classes, run.report.dataset.name
    groups = superclasses_of(dataset, len(classes), superclasses)
    matrices = {
        name: matrix_of(confusion_matrix(verdicts.label, verdicts.predictions(name), len(classes)), classes, groups)
        for name in (key, NATURAL)
    }
    findings = {name: _finding(name, matrix, classes) for name, matrix in matrices.items()}
    order = [label for labels in groups.values() for label in labels] or list(range(len(classes)))

    def figure(name: str) -> Figure:
        return heatmap(
            off_diagonal(100 * rates_of(matrices[name].counts)[np.ix_(order, order)]),
            title=f"Wrong predictions, {name}",
            alt=f"Matrix of wrong predictions of {run.name} on {dataset}. {findings[name]}",
            names=[classes[label] for label in order],
            x="predicted class",
            y="true class",
            unit="% of the row",
            digits=1,
            groups=np.cumsum([len(labels) for labels in groups.values()])[:-1].tolist(),
        )

    about = {"model": run.name, "dataset": dataset, "classes": classes, "superclasses": groups, "attack": key}
    return AnalysisResult(
        name="confusion",
        finding=findings[key],
        about={**about, "seed": seed},
        frames={
            "predictions": pd.concat([_predictions(name, one.counts, classes) for name, one in matrices.items()]),
            "summary": frame_of(_summary(name, matrix, seed) for name, matrix in matrices.items()),
        },
        draw=lambda: [figure(name) for name in matrices],
    )


class Matrix(NamedTuple):
    """A (K, K) matrix of counts, and the share of its errors within superclasses, if there are any."""

    counts: Ints
    within_superclass: Estimate | None
    within_by_chance: float | None


def matrix_of(counts: Ints, classes: list[str], groups: dict[str, list[int]]) -> Matrix:
    """Return a matrix of counts with the share of its errors within superclasses."""
    if not groups:
        return Matrix(counts, None, None)
    wrong = misclassified(counts)
    member = membership(groups, len(classes))
    same = member[:, None] == member
    others = (same.sum(1) - 1) / (len(classes) - 1)
    chance = round(float(100 * (wrong.sum(1) * others).sum() / wrong.sum()), 4) if wrong.any() else None
    return Matrix(counts, Estimate(**estimate(int(wrong[same].sum()), int(wrong.sum()))), chance)


def misclassified(counts: Ints) -> Ints:
    """Return a copy with a diagonal of zeros."""
    return counts - np.diag(np.diag(counts))


def rates_of(counts: Ints) -> Floats:
    """Return the share of each row; NaN in the rows of absent classes."""
    n = counts.sum(1, keepdims=True)
    return np.where(n > 0, counts / np.maximum(n, 1), np.nan)


def symmetrized(counts: Ints) -> Floats:
    """Return (K, K) the mean share of two classes that is predicted as the other; NaN for absent classes.

    >>> symmetrized(np.array([[8, 2], [1, 3]]))[0, 1].round(6)
    np.float64(0.225)
    """
    rates = rates_of(counts)
    return np.asarray((rates + rates.T) / 2)


def symmetry(counts: Ints | csr_array) -> float | None:
    """Return the correlation of the rates off the diagonal with the transposed ones, over the classes with examples.

    >>> symmetry(np.array([[8, 2, 0], [2, 7, 1], [0, 1, 9]]))
    1.0
    """
    n = counts.sum(1)
    # With many classes most pairs never occur and add nothing to the sums.
    rates = (diags_array(1 / np.maximum(n, 1)) @ csr_array(counts))[n > 0][:, n > 0]
    rates -= diags_array(rates.diagonal())
    cells = rates.shape[0] * (rates.shape[0] - 1)
    if cells < 4:
        return None
    mean = rates.sum() / cells
    variance = rates.power(2).sum() / cells - mean**2
    if variance <= 1e-15:
        return None
    return round(float((rates.multiply(rates.T).sum() / cells - mean**2) / variance), 12)


def _symmetry_interval(counts: Ints, seed: int) -> Estimate:
    value, n = symmetry(counts), counts.sum(1)
    if value is None:
        return Estimate(value=None, low=None, high=None, n=int(n.sum()))
    label, predicted = (np.repeat(place, counts[counts > 0]) for place in np.nonzero(counts))
    start = (n.cumsum() - n)[label]
    random = np.random.default_rng(seed)

    def resampled() -> csr_array:
        drawn = predicted[start + (random.random(len(label)) * n[label]).astype(np.int64)]
        return csr_array((np.ones(len(label)), (label, drawn)), shape=counts.shape)

    every = [one for one in (symmetry(resampled()) for _ in range(RESAMPLES)) if one is not None]
    low, high = np.quantile(every, [0.025, 0.975])
    return Estimate(value=round(value, 4), low=round(float(low), 4), high=round(float(high), 4), n=int(n.sum()))


def _predictions(attack: str, counts: Ints, classes: list[str]) -> pd.DataFrame:
    """Return all cells, wrong predictions first, from the most frequent."""
    names = np.array(classes, dtype=object)
    label, predicted = (place.ravel() for place in np.indices(counts.shape))
    frame = pd.DataFrame(
        {
            "class": names[label],
            "predicted_class": names[predicted],
            "attack": attack,
            "label": label,
            "predicted": predicted,
            "count": counts.ravel(),
            "share_of_class_percent": 100 * rates_of(counts).ravel(),
        }
    )
    order = np.lexsort((-frame["share_of_class_percent"].fillna(-1), label == predicted))
    return frame.iloc[order]


def _summary(attack: str, matrix: Matrix, seed: int) -> dict[str, object]:
    row: dict[str, object] = {"attack": attack, **interval_columns("symmetry", _symmetry_interval(matrix.counts, seed))}
    if matrix.within_superclass is None:
        return row
    within = interval_columns("within_superclass_percent", matrix.within_superclass)
    return {**row, **within, "within_by_chance_percent": matrix.within_by_chance}


def _finding(attack: str, matrix: Matrix, classes: list[str]) -> str:
    n, wrong, within = matrix.counts.sum(1), misclassified(matrix.counts), matrix.within_superclass
    if not wrong.any():
        return f"No example is misclassified {condition(attack)}."
    both, total = wrong + wrong.T, n[:, None] + n
    one, other = np.unravel_index((both / np.maximum(total, 1)).argmax(), both.shape)
    confused = Estimate(**estimate(int(both[one, other]), int(total[one, other])))
    superclass = (
        ""
        if within is None
        else f"; {share(within, '%')} of the wrong predictions stay in the true superclass "
        f"({matrix.within_by_chance:.1f}% by chance)"
    )
    return (
        f"Most confused classes {condition(attack)}: {classes[one]} – {classes[other]}, with {share(confused, '%')} of "
        f"their images predicted as the other{superclass}."
    )
