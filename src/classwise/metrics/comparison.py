"""Two models on the same examples: who gained what, and can the data tell."""

# N examples, K classes

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr

from classwise.metrics.counts import Ints

Bools = NDArray[np.bool_]


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided McNemar test: could this many gains and losses come from two equally good models?

    >>> mcnemar(5, 5), round(mcnemar(10, 0), 5)
    (1.0, 0.00195)
    """
    return min(1.0, 2 * float(bdtr(min(gained, lost), gained + lost, 0.5)))


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down correction for looking at several classes at once.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values)
    adjusted = np.empty(len(p_values))
    running = 0.0
    for rank, position in enumerate(order):
        running = max(running, (len(p_values) - rank) * p_values[position])
        adjusted[position] = min(1.0, running)
    return [float(value) for value in adjusted]


@dataclass(frozen=True, slots=True)
class ClassChange:
    """One class, before and after, on the same examples."""

    label: int
    gained: int
    """Examples the baseline lost and the other model holds."""
    lost: int
    """Examples the baseline held and the other model loses."""
    n: int
    p_value: float
    """Exact McNemar, corrected by Holm for the number of classes compared."""


def paired_changes(labels: Ints, before: Bools, after: Bools, num_classes: int) -> list[ClassChange]:
    """Class by class, who gained and who lost; classes without examples are left out."""
    raw = []
    for label in range(num_classes):
        rows = labels == label
        if rows.any():
            gained = int((~before[rows] & after[rows]).sum())
            lost = int((before[rows] & ~after[rows]).sum())
            raw.append((label, gained, lost, int(rows.sum())))
    corrected = holm([mcnemar(gained, lost) for _, gained, lost, _ in raw])
    return [ClassChange(*row, p_value=p) for row, p in zip(raw, corrected, strict=True)]
