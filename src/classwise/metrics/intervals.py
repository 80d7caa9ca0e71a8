"""How far a measured accuracy may lie from the true one. Shares are fractions here, not percent."""

# K classes

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm

Floats = NDArray[np.float64]


def wilson(correct: ArrayLike, n: ArrayLike, level: float = 0.95) -> tuple[Floats, Floats]:
    """Wilson's score interval of a share, elementwise; NaN where n is 0.

    >>> low, high = wilson(645, 1000)
    >>> round(float(low), 3), round(float(high), 3)
    (0.615, 0.674)
    """
    count, total = np.asarray(correct, dtype=np.float64), np.asarray(n, dtype=np.float64)
    z = norm.ppf(0.5 + level / 2)
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


def worst_class(
    correct: ArrayLike, n: ArrayLike, *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> WorstClass | None:
    """The class with the lowest share, and a bias-corrected estimate of the lowest true share.

    The smallest of K noisy values lies below the smallest true value on average. A parametric bootstrap tells by
    how much: redraw every class from a binomial, compare the redrawn minimum with the minimum redrawn from. The
    measured rates are too spread out to redraw from, because they carry the noise once already, so their spread
    is first shrunk by the share of variance that noise explains. The estimate moves up by the bias, though not
    above the mean of the classes, and so does the upper end of Wilson's interval; its lower end stays, because
    near zero the bias is known worse than the value. None where no class has examples.
    """
    count, total = np.asarray(correct, dtype=np.int64), np.asarray(n, dtype=np.int64)
    present = np.flatnonzero(total)
    if not present.size:
        return None
    count, total = count[present], total[present]
    share = count / total
    worst = int(share.argmin())
    low, high = wilson(count[worst], total[worst], level)

    noise = float(np.mean(share * (1 - share) / total))
    spread = float(np.var(share, ddof=1)) if share.size > 1 else 0.0
    shrink = np.sqrt(max(0.0, 1 - noise / spread)) if spread > 0 else 0.0
    rates = share.mean() + shrink * (share - share.mean())
    redrawn = np.random.default_rng(seed).binomial(total, rates, size=(draws, rates.size)) / total
    # Against the redrawn value of the weakest class, not its rate: the same on average, with far less noise.
    bias = float(np.mean(redrawn.min(axis=1) - redrawn[:, rates.argmin()]))
    corrected = min(float(share[worst]) - bias, float(share.mean()))
    return WorstClass(
        label=int(present[worst]),
        value=float(share[worst]),
        low=float(low),
        high=float(high),
        corrected=corrected,
        corrected_low=float(low),
        corrected_high=min(float(high) - bias, 1.0),
    )
