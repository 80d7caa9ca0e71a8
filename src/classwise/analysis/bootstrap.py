"""Bootstrap intervals, and the percentile bootstrap of means over images."""

# N examples

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from classwise.reporting.estimates import Estimate

Floats = NDArray[np.float64]
RESAMPLES = 2000
AT_ONCE = 2**20
"""Maximum number of values drawn at once, which bounds the memory."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A number with its 95% bootstrap interval; null if it is not defined."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


def resampled_means(values: Floats, random: np.random.Generator) -> Floats:
    """Return the means of ``RESAMPLES`` resamples of (N,) values."""
    rows = max(1, AT_ONCE // len(values))
    counts = [min(rows, RESAMPLES - start) for start in range(0, RESAMPLES, rows)]
    return np.concatenate([values[random.integers(len(values), size=(some, len(values)))].mean(1) for some in counts])


def mean_interval(values: Floats, random: np.random.Generator, digits: int) -> Estimate:
    """Return the mean of (N,) values with its 95% interval; without an interval for one value, null for none."""
    if not len(values):
        return Estimate(value=None, low=None, high=None, n=0)
    value = round(float(values.mean()), digits)
    if len(values) == 1:
        return Estimate(value=value, low=None, high=None, n=1)
    low, high = np.quantile(resampled_means(values, random), [0.025, 0.975])
    return Estimate(value=value, low=round(float(low), digits), high=round(float(high), digits), n=len(values))
