"""Differences between class accuracies, in percent. Classes without examples (NaN) are omitted."""

# K classes

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from classwise.core.errors import InputError


def class_variance(accuracies: ArrayLike) -> float | None:
    """Return the variance of the class accuracies in percent², CV in the papers (Tian et al. 2021, Def. 4.1).

    >>> class_variance([40.0, 60.0])
    100.0
    """
    present = _present(accuracies)
    return float(np.var(present)) if present.size else None


def max_class_difference(accuracies: ArrayLike) -> float | None:
    """Return the best minus the worst class accuracy, MCD in the papers (Tian et al. 2021, Def. 4.2).

    >>> max_class_difference([40.0, float("nan"), 60.0])
    20.0
    """
    present = _present(accuracies)
    return float(np.ptp(present)) if present.size else None


def rho(*, average: float, worst: float, baseline_average: float, baseline_worst: float) -> float | None:
    """Return the relative gain of the worst class minus the relative loss of the average (Li & Liu 2023, Eq. 7).

    None if the baseline's worst class or average is zero, because the relative gain is then undefined.

    >>> round(rho(average=49.13, worst=36.6, baseline_average=51.69, baseline_worst=25.2), 3)
    0.403
    """
    if baseline_average < 0 or baseline_worst < 0:
        raise InputError(f"accuracies cannot be negative: got {baseline_average} and {baseline_worst}")
    if baseline_average == 0 or baseline_worst == 0:
        return None
    gained = (worst - baseline_worst) / baseline_worst
    lost = (baseline_average - average) / baseline_average
    return gained - lost


def _present(accuracies: ArrayLike) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    values = np.asarray(accuracies, dtype=np.float64)
    return values[~np.isnan(values)]
