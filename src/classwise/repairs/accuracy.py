"""Accuracy of every class as a function of class biases, computed from a margin matrix.

Under biases b an example of class y stays correct exactly if ``e = b_y + min_j (m_j - b_j) > 0``. The share of such
examples is a step function with the full noise of a count. The smooth estimate replaces each step by a normal kernel,

    A_c(b) = mean over class c of Phi(e_i / h_c),    h_c = bandwidth * n_c^(-1/5) * s_c,

where s_c is the spread of the class's effective margins without biases. A kernel widens the distribution it smooths,
which pulls every accuracy towards one half; so each example is first moved towards the median t_c of its class,

    m_ij <- m_ij + (f - 1) (e_i - t_c),    f = sqrt(1 - (h_c / s_c)^2),

which leaves the variance as it was (Jones 1991). Raising b_c raises A_c and lowers every other class, in the counted
and in the smooth form alike; a constant added to all biases changes nothing.
"""

# N examples, K classes

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from classwise.metrics.counts import Ints

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
BANDWIDTH = 1.5
"""Kernel width as a multiple of n^(-1/5) spreads."""
_QUARTILES = 1.349
"""Interquartile range of a standard normal."""
_LEAST_SPREAD = 1e-6
"""Minimum spread, for classes whose margins are all equal."""


@dataclass(frozen=True, slots=True)
class ClassAccuracy:
    """The margins of some examples, sorted for scoring many bias vectors."""

    margins: Matrix
    """(N, K), infinite in the column of the label."""
    label: Ints
    counts: Ints
    """(K,) examples of each class."""
    width: Vector
    """(N,) kernel width of each example; zero: count instead of smoothing."""
    spread: Vector
    """(K,) spread of the effective margins of each class without biases."""

    @classmethod
    def of(cls, margins: NDArray[np.floating], label: Ints, *, bandwidth: float = BANDWIDTH) -> ClassAccuracy:
        """Build from a margin matrix (N, K). With a ``bandwidth`` of zero, accuracies are counted, not smoothed."""
        num_classes = margins.shape[1]
        moved = np.asarray(margins, dtype=np.float64).copy()
        moved[np.arange(len(label)), label] = np.inf
        counts = np.bincount(label, minlength=num_classes).astype(np.int64)
        width, spread = np.zeros(len(label)), np.zeros(num_classes)
        nearest = moved.min(axis=1)
        for one in np.flatnonzero(counts):
            rows = np.flatnonzero(label == one)
            low, middle, high = np.percentile(nearest[rows], [25, 50, 75])
            spread[one] = max(float(high - low) / _QUARTILES, _LEAST_SPREAD)
            relative = min(bandwidth * len(rows) ** -0.2, 1.0)
            width[rows] = relative * spread[one]
            moved[rows] += ((math.sqrt(1 - relative**2) - 1) * (nearest[rows] - middle))[:, None]
        return cls(moved, label, counts, width, spread)

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.counts)

    def take(self, rows: NDArray[np.int64]) -> ClassAccuracy:
        """Return the margins of some of the examples."""
        counts = np.bincount(self.label[rows], minlength=self.num_classes).astype(np.int64)
        return ClassAccuracy(self.margins[rows], self.label[rows], counts, self.width[rows], self.spread)

    def effective(self, biases: Vector) -> tuple[Vector, Ints]:
        """(N,) effective margins under biases (K,), and the nearest wrong class of each example."""
        shifted = self.margins - biases
        nearest = shifted.argmin(axis=1)
        return shifted[np.arange(len(nearest)), nearest] + biases[self.label], nearest

    def kept(self, biases: Vector) -> Vector:
        """(N,) correctness of each example: 0 or 1 if counted, between 0 and 1 if smoothed."""
        effective, _ = self.effective(biases)
        return np.asarray(ndtr(effective / self.width) if self.width.any() else effective > 0, dtype=np.float64)

    def values(self, biases: Vector) -> Vector:
        """(K,) accuracy of each class; NaN for a class without examples."""
        return by_class(self.kept(biases), self.label, self.num_classes)

    def slopes(self, biases: Vector) -> tuple[Vector, Matrix]:
        """(K,) smooth accuracies and (K, K) their derivatives: row c holds those of A_c by every bias.

        The entry (c, j), j != c, is minus the density of class c at its boundary to class j.
        """
        effective, nearest = self.effective(biases)
        size = self.num_classes
        scaled = effective / self.width
        density = np.exp(-0.5 * scaled**2) / (self.width * math.sqrt(2 * math.pi)) / self.counts[self.label]
        exchange = np.bincount(self.label * size + nearest, density, size * size).reshape(size, size)
        return by_class(ndtr(scaled), self.label, size), np.diag(exchange.sum(axis=1)) - exchange


def by_class(kept: Vector, label: Ints, num_classes: int) -> Vector:
    """(K,) the mean of each class; NaN for a class without examples."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.bincount(label, kept, num_classes) / np.bincount(label, minlength=num_classes))


def tenth_of(num_classes: int) -> int:
    """Return the number of classes in the weakest tenth.

    >>> tenth_of(10), tenth_of(43), tenth_of(200)
    (1, 5, 20)
    """
    return math.ceil(num_classes / 10)
