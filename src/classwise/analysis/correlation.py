"""Correlation coefficients between two quantities of classes, with intervals and p-values.

Intervals use Fisher's transformation with variance 1 / (n - 3), for ranks (1 + r²/2) / (n - 3) (Bonett & Wright 2000).
P-values are two-sided: the t distribution for Pearson, seeded permutations for Spearman. Both treat the classes as a
sample of classes, so with ten classes they are rough. Noise in the accuracies attenuates coefficients; nothing here
corrects for that.
"""

# K classes

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, pearsonr, rankdata

from classwise.analysis.result import p_text
from classwise.reporting.part import Part

Floats = NDArray[np.float64]
Values = Sequence[float | None] | Sequence[float]
LEVEL = 0.95
SHUFFLES = 2000
FEWEST = 4
"""Minimum number of classes for a coefficient and for its interval."""


class Correlation(Part):
    """A coefficient over classes; null with too few classes or without variation."""

    value: float | None
    low: float | None
    high: float | None
    p_value: float | None
    n: int
    """Classes with both quantities."""

    def __str__(self) -> str:
        return "–" if self.value is None else f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    @property
    def with_p(self) -> str:
        """The coefficient, its interval and its p-value as text."""
        return f"{self}{p_text(self.p_value)}"


def pearson(x: Values, y: Values) -> Correlation:
    """Return Pearson's coefficient.

    >>> str(pearson([1.0, 2.0, None, 3.0, 5.0], [2.0, 1.0, 7.0, 6.0, 9.0]))
    '0.92 [-0.33, 1.00]'
    """
    one, other = _known(x, y)
    r = _coefficient(one, other)
    return _correlation(r, 1.0, None if r is None else float(pearsonr(one, other).pvalue), len(one))


def spearman(x: Values, y: Values, seed: int = 0) -> Correlation:
    """Return Spearman's coefficient.

    >>> str(spearman([1.0, 2.0, None, 3.0, 5.0], [2.0, 1.0, 7.0, 6.0, 9.0]))
    '0.80 [-0.82, 1.00]'
    """
    one, other = (rankdata(part) for part in _known(x, y))
    r = _coefficient(one, other)
    if r is None:
        return _correlation(None, 1.0, None, len(one))
    random = np.random.default_rng(seed)
    shuffled = random.permuted(np.tile(other - other.mean(), (SHUFFLES, 1)), axis=1) @ (one - one.mean())
    chance = np.abs(shuffled) / (len(one) * one.std() * other.std())
    # The observed order is one of the permutations.
    p = (1 + int((chance >= abs(r) - 1e-12).sum())) / (1 + SHUFFLES)
    return _correlation(r, 1 + r**2 / 2, p, len(one))


def _known(x: Values, y: Values) -> Floats:
    """Return the pairs of values (2, n) of classes for which both are known."""
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if a is not None and b is not None]
    return np.array(pairs, dtype=np.float64).reshape(-1, 2).T


def _coefficient(x: Floats, y: Floats) -> float | None:
    if len(x) < FEWEST or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.clip(np.corrcoef(x, y)[0, 1], -1, 1))


def _correlation(r: float | None, factor: float, p_value: float | None, n: int) -> Correlation:
    if r is None:
        return Correlation(value=None, low=None, high=None, p_value=None, n=n)
    with np.errstate(divide="ignore"):  # a perfect correlation has an interval of length zero
        center = np.arctanh(r)
    half = norm.ppf(0.5 + LEVEL / 2) * np.sqrt(factor / (n - 3))
    low, high = np.tanh([center - half, center + half])
    return Correlation(value=round(r, 4), low=round(float(low), 4), high=round(float(high), 4), p_value=p_value, n=n)
