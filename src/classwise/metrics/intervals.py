"""Confidence intervals of class accuracies. Accuracies are fractions here, called shares, not percent."""

# K classes

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtrc, chndtr, ndtri

Floats = NDArray[np.float64]
_HALVINGS, _DECIMALS = 32, 8
"""Bounds are computed to eight decimals, so that 0 and 1 are exact."""
_CELLS, _REACH = 256, 4.0
"""Cells and half width of an integral over shares; the half width is 8 standard deviations of the smallest class."""


def wilson(correct: ArrayLike, n: ArrayLike, level: float = 0.95) -> tuple[Floats, Floats]:
    """Return Wilson's score interval of shares, elementwise; NaN where n is 0.

    Implemented here because scipy.stats computes it for a single share only and takes seconds to import.

    >>> low, high = wilson(645, 1000)
    >>> round(float(low), 3), round(float(high), 3)
    (0.615, 0.674)
    """
    count, total = np.asarray(correct, dtype=np.float64), np.asarray(n, dtype=np.float64)
    z = ndtri(0.5 + level / 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = count / total
        center = (share + z**2 / (2 * total)) / (1 + z**2 / total)
        half = z / (1 + z**2 / total) * np.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    # At 0 and 1 the two terms cancel only up to rounding, but the bound is exact.
    return np.where(count == 0, center - center, center - half), np.where(
        count == total, center / center, center + half
    )


@dataclass(frozen=True, slots=True)
class WorstClass:
    """The worst class as measured, and the selection-corrected lowest class accuracy."""

    label: int
    value: float
    low: float
    high: float
    """Wilson's interval of that class, which would be valid if the class had been chosen in advance."""
    corrected: float
    corrected_low: float
    corrected_high: float
    """Estimate and interval of the lowest true class accuracy, corrected for selection."""


def worst_class(correct: ArrayLike, n: ArrayLike, *, level: float = 0.95) -> WorstClass | None:
    """Return the class with the lowest share and the lowest true share. None if no class has examples.

    The smallest m of K noisy shares lies below the smallest true share θ on average. The corrected interval inverts
    a test on m that accounts for the selection: it contains every θ for which P(min ≤ m) and P(min ≥ m) are both at
    least (1 - level) / 2. The minimum of independent binomial shares has a closed-form distribution,

        P(min ≥ m) = Π_k P(X_k / n_k ≥ m),

    with ties counted half (mid-p). The class with the lowest Wilson bound has the share θ. The others have their
    measured shares after shrinkage, but at least θ: measured shares spread more than true ones because of noise, and
    without shrinkage too few classes would compete for the minimum.

    With these plug-in estimates the level is approximate: ``benchmarks/coverage.py`` measures a coverage of 94 to 98 %
    at a nominal 95 %. The interval is most conservative if several close classes compete for the minimum, because the
    same data determine m and the estimates.

    The corrected value is m minus the bias of the minimum under the shrunken shares, at most the mean of the classes.
    """
    count, total = np.asarray(correct, dtype=np.int64), np.asarray(n, dtype=np.int64)
    present = np.flatnonzero(total)
    if not present.size:
        return None
    count, total = count[present], total[present]
    share = count / total
    worst = int(share.argmin())
    lows, highs = wilson(count, total, level)
    lowest = int(lows.argmin())
    rates = _shrunken(share, total)

    # m as a count of each class, in integers: the smallest count that reaches m, the largest that does not exceed it.
    reaching = -(-count[worst] * total // total[worst])
    not_above = count[worst] * total // total[worst]

    def exceeded(theta: float) -> float:
        """Return P(min < m) + P(min = m) / 2 if the lowest true share is theta; decreasing in theta."""
        p = np.maximum(rates, theta)
        p[lowest] = theta
        at_least, above = bdtrc(reaching - 1.0, total, p), bdtrc(not_above + 0.0, total, p)
        return float(1 - (at_least.prod() + above.prod()) / 2)

    corrected = min(float(share[worst]) - _bias_of_minimum(rates, total), float(share.mean()))
    return WorstClass(
        label=int(present[worst]),
        value=float(share[worst]),
        low=float(lows[worst]),
        high=float(highs[worst]),
        corrected=corrected,
        corrected_low=min(_crossing(exceeded, 0.5 + level / 2), corrected),
        corrected_high=max(_crossing(exceeded, 0.5 - level / 2), corrected),
    )


def gap_interval(correct: ArrayLike, n: ArrayLike, *, level: float = 0.95) -> tuple[float, float] | None:
    """Return the interval of the true difference between best and worst class. None with fewer than two classes.

    Both classes are selected for being extreme, so the measured difference is too large on average. The interval
    combines the selection-corrected intervals of the lowest and the highest share (``worst_class``, for the highest of
    the errors) by the square-and-add rule for a difference of two independent estimates (Zou & Donner 2008; with
    Wilson's intervals it is Newcombe's method 10).
    """
    count, total = np.asarray(correct, dtype=np.int64), np.asarray(n, dtype=np.int64)
    lowest, errors = worst_class(count, total, level=level), worst_class(total - count, total, level=level)
    if lowest is None or errors is None or np.count_nonzero(total) < 2:
        return None
    gap = 1 - errors.corrected - lowest.corrected
    down = np.hypot(errors.corrected_high - errors.corrected, lowest.corrected_high - lowest.corrected)
    up = np.hypot(errors.corrected - errors.corrected_low, lowest.corrected - lowest.corrected_low)
    return float(np.clip(gap - down, 0, 1)), float(np.clip(gap + up, 0, 1))


def variance_interval(correct: ArrayLike, n: ArrayLike, *, level: float = 0.95) -> tuple[float, float] | None:
    """Return the interval of the variance of the true class shares. None with fewer than two classes.

    Measured shares vary more than true ones. With equal noise v in every class, the sum of their squared distances
    from the mean, divided by v, has the noncentral chi-squared distribution with K - 1 degrees of freedom and
    noncentrality K variance / v, which the interval inverts (scipy's ``chndtrinc`` is accurate to six digits only). v
    is the mean over the classes, from shares by Laplace's rule, which is positive if all examples of a class are right.
    For the upper end the sum is at least its expectation under noise alone: shares that agree by chance do not show
    that the true ones agree.

    A bootstrap of the measured shares fails: for small variances its error has another distribution, and the upper end
    is too low in up to 30 % of data sets.
    """
    count, total = np.asarray(correct, dtype=np.float64), np.asarray(n, dtype=np.float64)
    count, total = count[total > 0], total[total > 0]
    freedom = count.size - 1
    if freedom < 1:
        return None
    smooth = (count + 1) / (total + 2)
    noise = float(np.mean(smooth * (1 - smooth) / total))
    seen = float(np.var(count / total)) * count.size / noise

    def bound(total_squares: float, target: float) -> float:
        most = 4 * total_squares + 200  # above the bound at any level up to 99.9999 %
        found = _crossing(lambda noncentrality: float(chndtr(total_squares, freedom, noncentrality)), target, most)
        return found * noise / count.size

    return bound(seen, 0.5 + level / 2), bound(max(seen, freedom), 0.5 - level / 2)


def _shrunken(share: Floats, total: NDArray[np.int64]) -> Floats:
    """Shrink shares to the estimated spread of the true ones: measured variance minus noise variance."""
    noise = np.mean(share * (1 - share)) / total
    spread = max(0.0, float(np.var(share, ddof=1) - noise.mean())) if share.size > 1 else 0.0
    kept = np.sqrt(spread / (spread + noise)) if spread > 0 else np.zeros_like(share)
    return np.asarray(share.mean() + kept * (share - share.mean()))


def _bias_of_minimum(rates: Floats, total: NDArray[np.int64]) -> float:
    """Return E min_k X_k / n_k - min_k p_k, the integral over t of P(min > t) - P(X_w / n_w > t), w the worst class."""
    weakest = int(rates.argmin())
    reach = _REACH / np.sqrt(total.min())
    first, last = max(0.0, rates[weakest] - reach), min(1.0, rates[weakest] + reach)
    t = first + (last - first) * (np.arange(_CELLS) + 0.5) / _CELLS
    above = bdtrc(np.floor(t[:, None] * total), total, rates)
    return float(np.mean(above.prod(axis=1) - above[:, weakest]) * (last - first))


def _crossing(falling: Callable[[float], float], target: float, most: float = 1.0) -> float:
    """Return where a decreasing function on [0, most] crosses the target, by bisection; 0 or most if it does not."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle * most) > target else (low, middle)
    return round((low + high) / 2, _DECIMALS) * most
