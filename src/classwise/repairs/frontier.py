"""The frontier of the average against the weak classes, over all vectors of class biases.

A point of the frontier maximizes

    average(A(b)) + weight * weak(A(b)) - penalty / 2 * |b / s|^2,

where A_c are the smooth class accuracies, ``average`` is over images, ``weak`` is the worst class or the mean of the
weakest tenth, and s is the spread of the margins. A larger weight gives a higher weak value and a lower average. Two
terms limit overfitting with n examples in each of K classes: the penalty, 200 / (n K), shrinks biases towards zero,
and ``weak`` is softened over classes within four standard errors of the worst, any of which may be the worst on other
images:

    weak(A) = min over w of  w @ A + r / 2 * |w|^2,    sum w = 1,  0 <= w_c <= 1 / k,

with r = 4 k standard errors of a class accuracy, k = 1 for the worst class and ceil(K / 10) for the tenth. The
derivatives are known, so L-BFGS needs a few dozen passes over the matrix for a point, and each point starts from the
previous one.
"""

# N examples, K classes

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import minimize

from classwise.repairs.accuracy import ClassAccuracy, Vector, tenth_of

Weak = Literal["worst", "tenth"]
"""What to raise: the worst class, or the mean of the weakest tenth."""
WEIGHTS = tuple(float(weight) for weight in np.geomspace(0.05, 100.0, 22))
"""Weights of a frontier's points, from almost the average alone to almost the weak classes alone."""
PENALTY = 20.0
"""Penalty times images per class, for 10 classes."""
TYPICAL_CLASSES = 10
"""The penalty scales as 10 / K."""
SOFTNESS = 4.0
"""Width of the softening, in standard errors of a class accuracy."""
_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The objective of a frontier, with its regularization."""

    weak: Weak = "worst"
    penalty: float = PENALTY
    softness: float = SOFTNESS

    def tail(self, values: Vector, soft: float) -> tuple[float, Vector]:
        """The softened weak value of some class accuracies, and the weight of each class in it."""
        most = 1.0 if self.weak == "worst" else 1 / tenth_of(len(values))
        soft /= most  # distributed over the classes that share the weight
        weights = _simplex(-values / soft, most) if soft > 0 else _lowest(values, most)
        return float(weights @ values + soft / 2 * weights @ weights), weights


def best(
    accuracy: ClassAccuracy, weight: float, start: Vector | None = None, objective: Objective | None = None
) -> Vector:
    """The biases (K,), with mean zero, of one point of the frontier."""
    objective = objective or Objective()
    present = accuracy.counts > 0
    share = accuracy.counts / accuracy.counts.sum()
    typical = float(np.median(accuracy.counts[present]))
    scale = max(float(np.median(accuracy.spread[present])), 1e-9)
    penalty = objective.penalty / typical * TYPICAL_CLASSES / present.sum()
    start = np.zeros(len(present)) if start is None else start
    level = float(np.clip(accuracy.values(np.zeros(len(present)))[present].min(), 0.05, 0.5))
    soft = objective.softness * float(np.sqrt(level * (1 - level) / typical))

    def loss(scaled: Vector) -> tuple[float, Vector]:
        centered = np.where(present, scaled - scaled[present].mean(), 0.0)  # absent classes keep their bias
        values, slopes = accuracy.slopes(scale * centered)
        weak, weights = objective.tail(values[present], soft)
        force = share.copy()
        force[present] += weight * weights
        gained = share[present] @ values[present] + weight * weak
        downhill = -scale * (force[present] @ slopes[present]) + penalty * centered
        downhill = np.where(present, downhill - downhill[present].mean(), 0.0)
        return float(penalty / 2 * centered @ centered - gained), downhill

    found = minimize(loss, start / scale, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS})
    biases = np.where(present, scale * found.x, 0.0)
    return np.asarray(np.where(present, biases - biases[present].mean(), 0.0))


def frontier(
    accuracy: ClassAccuracy, weights: tuple[float, ...] = WEIGHTS, objective: Objective | None = None
) -> list[Vector]:
    """The biases of every weight, in order."""
    found: list[Vector] = []
    for weight in weights:
        found.append(best(accuracy, weight, found[-1] if found else None, objective))
    return found


def _simplex(values: Vector, most: float) -> Vector:
    """The nearest point to ``values`` with entries between 0 and ``most`` that sum to one."""
    # The sum of clip(values - t, 0, most) falls piecewise linearly in t; its corners are where an entry enters a bound.
    corners = np.sort(np.concatenate([values, values - most]))
    sums = np.clip(values[None, :] - corners[:, None], 0, most).sum(axis=1)
    after = int(np.searchsorted(-sums, -1.0, side="right"))
    after = min(max(after, 1), len(corners) - 1)
    high, low = sums[after - 1], sums[after]
    part = 0.0 if high == low else (high - 1.0) / (high - low)
    shift = corners[after - 1] + part * (corners[after] - corners[after - 1])
    return np.asarray(np.clip(values - shift, 0, most))


def _lowest(values: Vector, most: float) -> Vector:
    """All weight on the lowest values."""
    weights = np.zeros(len(values))
    weights[np.argsort(values, kind="stable")[: round(1 / most)]] = most
    return weights
