"""Paired comparison of two models on the same examples."""

# N examples, K classes

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr  # scipy.stats.binomtest gives the same and takes seconds to import

from classwise.metrics.counts import Ints

Bools = NDArray[np.bool_]


def mcnemar(gained: int, lost: int) -> float:
    """Return the p-value of the exact two-sided McNemar test for ``gained`` and ``lost`` discordant pairs.

    >>> mcnemar(5, 5), round(mcnemar(10, 0), 5)
    (1.0, 0.00195)
    """
    return min(1.0, 2 * float(bdtr(min(gained, lost), gained + lost, 0.5)))


def holm(p_values: list[float]) -> list[float]:
    """Correct p-values for multiple testing by Holm's step-down method, which scipy does not have.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values)
    adjusted = np.empty(len(p_values))
    remaining = np.arange(len(p_values), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(remaining * np.asarray(p_values)[order]), 1)
    return [float(value) for value in adjusted]


@dataclass(frozen=True, slots=True)
class ClassChange:
    """The change of one class from a baseline to another model, on the same examples."""

    label: int
    gained: int
    """Examples that only the other model gets right."""
    lost: int
    """Examples that only the baseline gets right."""
    n: int
    p_value: float
    """Of the exact McNemar test, corrected by Holm's method for the number of classes."""


def paired_changes(labels: Ints, before: Bools, after: Bools, num_classes: int) -> list[ClassChange]:
    """Compare two models class by class; classes without examples are omitted."""
    raw = []
    for label in range(num_classes):
        rows = labels == label
        if rows.any():
            gained = int((~before[rows] & after[rows]).sum())
            lost = int((before[rows] & ~after[rows]).sum())
            raw.append((label, gained, lost, int(rows.sum())))
    corrected = holm([mcnemar(gained, lost) for _, gained, lost, _ in raw])
    return [ClassChange(*row, p_value=p) for row, p in zip(raw, corrected, strict=True)]
