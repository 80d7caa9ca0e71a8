"""How far a measured accuracy may lie from the true one. Shares are fractions here, not percent."""

# K classes

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtrc, chndtr, ndtri

Floats = NDArray[np.float64]
_HALVINGS, _DECIMALS = 32, 8
"""Bounds are found to eight decimals, so that 0 and 1 come out as such."""
_CELLS, _REACH = 256, 4.0
"""Of an integral over shares: in so many cells, as far as eight standard deviations of the smallest class."""


def wilson(correct: ArrayLike, n: ArrayLike, level: float = 0.95) -> tuple[Floats, Floats]:
    """Wilson's score interval of a share, elementwise; NaN where n is 0.

    >>> low, high = wilson(645, 1000)
    >>> round(float(low), 3), round(float(high), 3)
    (0.615, 0.674)
    """
    count, total = np.asarray(correct, dtype=np.float64), np.asarray(n, dtype=np.float64)
    z = ndtri(0.5 + level / 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = count / total
        centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
        half = z / (1 + z**2 / total) * np.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    # At the ends the two terms cancel only up to rounding; the bound there is exact.
    return np.where(count == 0, centre - centre, centre - half), np.where(
        count == total, centre / centre, centre + half
    )


@dataclass(frozen=True, slots=True)
class WorstClass:
    """The weakest class, as measured and corrected for having been picked as the weakest."""

    label: int
    value: float
    low: float
    high: float
    """Wilson's interval of that class, as if it had been named beforehand."""
    corrected: float
    corrected_low: float
    corrected_high: float
    """The lowest true class accuracy, with the selection bias removed."""


def worst_class(correct: ArrayLike, n: ArrayLike, *, level: float = 0.95) -> WorstClass | None:
    """The class with the lowest share, and the lowest true share of any class. None where no class has examples.

    The smallest m of K noisy shares lies below the smallest true share θ on average. The corrected interval inverts
    a test on m that knows of the selection: it holds every θ at which a minimum as low as m, and one as high, each has
    at least the probability (1 - level) / 2. The minimum of independent binomial shares has a closed distribution,

        P(min ≥ m) = Π_k P(X_k / n_k ≥ m),

    and ties count half (mid-p). One class is put at θ, that with the lowest bound of its own; the others at their
    measured shares, but none below θ, and drawn together first: measured shares are more spread out than true ones,
    because they carry noise, and would promise too little competition for the lowest place.

    A test with such estimates put in keeps its level approximately: ``benchmarks/coverage.py`` measures 94 to 98 % at a
    nominal 95 %. It is widest of the mark, and then too wide, where several classes close to one another compete for
    the lowest place, because the same classes decide m and what is assumed of them.

    The corrected value is m less its bias where the true shares are those drawn together: by how much the expected
    minimum lies below the lowest of them. It is not let above the mean of the classes.
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
    rates = _drawn_together(share, total)

    # m as a number of examples of each class, in integers: the fewest that reach it, the most that do not exceed it.
    reaching = -(-count[worst] * total // total[worst])
    not_above = count[worst] * total // total[worst]

    def exceeded(theta: float) -> float:
        """P(min < m) + P(min = m) / 2 where the lowest true share is theta. Falls as theta rises."""
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
    """The interval of the true distance between the best and the weakest class. None with fewer than two classes.

    Both ends are picked for being extreme, so the measured distance is too large on average. The interval joins those
    of the lowest and of the highest true share, each corrected for having been picked (``worst_class``, for the
    highest of the errors), by the square-and-add rule for a difference of two independent estimates (Zou & Donner
    2008; with Wilson's intervals it is Newcombe's method 10).
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
    """The interval of the variance of the true class shares. None with fewer than two classes.

    Measured shares vary more than true ones. With equal noise v in every class, the sum of their squared distances
    from the mean, over v, has the noncentral chi-squared distribution with K - 1 degrees of freedom and noncentrality
    K variance / v. The interval inverts it; v is the mean over the classes, from shares by Laplace's rule, which is
    positive where all examples of a class are right. For the upper end the sum is taken as no smaller than noise alone
    makes it on average: shares that agree by chance do not show that true ones do.

    A bootstrap from the measured shares would not do: where the variance is small, the error of the measured variance
    is not that of the redrawn one, and the upper end comes out too low in up to 30 % of data sets.
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
        most = 4 * total_squares + 200  # beyond the bound at any level up to 99.9999 %
        found = _crossing(lambda noncentrality: float(chndtr(total_squares, freedom, noncentrality)), target, most)
        return found * noise / count.size

    return bound(seen, 0.5 + level / 2), bound(max(seen, freedom), 0.5 - level / 2)


def _drawn_together(share: Floats, total: NDArray[np.int64]) -> Floats:
    """Shares with the spread that true ones have, by moments: what noise explains of the variance is taken away."""
    noise = np.mean(share * (1 - share)) / total
    spread = max(0.0, float(np.var(share, ddof=1) - noise.mean())) if share.size > 1 else 0.0
    kept = np.sqrt(spread / (spread + noise)) if spread > 0 else np.zeros_like(share)
    return np.asarray(share.mean() + kept * (share - share.mean()))


def _bias_of_minimum(rates: Floats, total: NDArray[np.int64]) -> float:
    """E min_k X_k / n_k - min_k p_k, as the integral over t of P(min > t) - P(X_w / n_w > t), w the weakest class."""
    weakest = int(rates.argmin())
    reach = _REACH / np.sqrt(total.min())
    first, last = max(0.0, rates[weakest] - reach), min(1.0, rates[weakest] + reach)
    t = first + (last - first) * (np.arange(_CELLS) + 0.5) / _CELLS
    above = bdtrc(np.floor(t[:, None] * total), total, rates)
    return float(np.mean(above.prod(axis=1) - above[:, weakest]) * (last - first))


def _crossing(falling: Callable[[float], float], target: float, most: float = 1.0) -> float:
    """Where between 0 and the most a falling function passes the target; one of these two where it does not."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle * most) > target else (low, middle)
    return round((low + high) / 2, _DECIMALS) * most
