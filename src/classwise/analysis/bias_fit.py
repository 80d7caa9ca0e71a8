"""Class biases fitted to one half of the images and scored on the other, with bootstrap intervals.

The images of each class are split into two halves. Biases are fitted to the smooth class accuracies of one half and
scored by counting on the other, in both directions; all accuracies are those of both held-out halves together.

Resamples are within each class and shared by all models; biases are not fitted again. A resample adds sampling noise a
second time, which lowers every minimum and raises MCD and CV, so the resampled values of a quantity are shifted to have
the estimate as their median.
"""

# N images, K classes, P classes with images, R resamples

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from classwise.analysis.bootstrap import Measured
from classwise.metrics import worst_class
from classwise.metrics.counts import Ints
from classwise.repairs.accuracy import ClassAccuracy, Matrix, Vector, tenth_of
from classwise.repairs.fit import REDRAWS, CrossFit
from classwise.repairs.frontier import WEIGHTS, Objective, frontier
from classwise.reporting.estimates import ClassEstimate, estimate
from classwise.storage.margins import Margins

_TAIL = 2.5
"""Percentage of the resamples beyond each end of an interval."""
_HALVES = 2
_HALVINGS = 16
_PASSES = 100
Bools = NDArray[np.bool_]


class Images:
    """The images that all models share, and resamples of them within each class."""

    def __init__(self, label: Ints, classes: list[str], seed: int) -> None:
        self.label, self.classes, self.seed = label, classes, seed
        self.counts = np.bincount(label, minlength=len(classes)).astype(np.int64)
        self.rows = [np.flatnonzero(label == one) for one in np.flatnonzero(self.counts)]
        random = np.random.default_rng([seed, 1])
        self.draws = [
            np.concatenate([np.ones((1, n)), random.multinomial(n, np.full(n, 1 / n), size=REDRAWS)])
            for n in map(len, self.rows)
        ]

    def values(self, kept: Bools) -> Matrix:
        """Return (1 + R, P) the mean of each class in percent: of the images, then of every resample."""
        parts = [draws @ kept[rows] / len(rows) for draws, rows in zip(self.draws, self.rows, strict=True)]
        return 100 * np.stack(parts, axis=1)


@dataclass(frozen=True)
class Scores:
    """Correctness of each image under biases that were fitted to the other half."""

    images: Images
    robust: Bools
    """(N,)"""
    natural: Bools
    values: Matrix
    """(1 + R, P) robust accuracies in percent: of the images, then of every resample."""

    @cached_property
    def by_class(self) -> list[ClassEstimate]:
        """Robust accuracy of each class."""
        counts = zip(self.images.classes, self._correct.tolist(), self.images.counts.tolist(), strict=True)
        return [
            ClassEstimate(label=label, name=name, **estimate(correct, n))
            for label, (name, correct, n) in enumerate(counts)
        ]

    @cached_property
    def worst(self) -> tuple[ClassEstimate, float]:
        """The worst class, and its selection-corrected accuracy in percent."""
        lowest = worst_class(self._correct, self.images.counts)
        assert lowest is not None
        return self.by_class[lowest.label], rounded(100 * lowest.corrected)

    @property
    def _correct(self) -> Ints:
        """(K,) correct images of each class."""
        return np.bincount(self.images.label[self.robust], minlength=len(self.images.classes)).astype(np.int64)

    @cached_property
    def quantities(self) -> dict[str, Vector]:
        """(1 + R,) average, worst class, weakest tenth, MCD and CV."""
        ranked = np.sort(self.values, axis=1)
        return {
            "average": ranked.mean(axis=1),
            "worst": ranked[:, 0],
            "tenth": ranked[:, : tenth_of(ranked.shape[1])].mean(axis=1),
            "mcd": ranked[:, -1] - ranked[:, 0],
            "cv": ranked.var(axis=1),
        }

    def number(self, quantity: str) -> float:
        """Return a quantity without resampling, rounded."""
        return rounded(self.quantities[quantity][0])

    @property
    def average(self) -> float:
        """Mean over classes, without resampling."""
        return float(self.values[0].mean())

    def squared_distance(self, other: Scores) -> Vector:
        """Return (1 + R,) the mean squared difference of the class accuracies from another model's."""
        return np.asarray(((self.values - other.values) ** 2).mean(axis=1))

    def noise(self, other: Scores) -> float:
        """Return the standard error of the difference from another model, in points: root mean square over classes."""
        difference = self.robust.astype(np.float64) - other.robust
        return 100 * float(np.sqrt(np.mean([difference[rows].var() / (len(rows) - 1) for rows in self.images.rows])))


class Fitted:
    """The frontier of one model on each half of the images, scored on the other half."""

    def __init__(self, margins: Margins, images: Images, objective: Objective) -> None:
        self.images = images
        self.fit = CrossFit(margins, objective, _HALVES, images.seed)
        zero = np.zeros(margins.num_classes)
        self.paths = [np.stack([zero, *frontier(half, WEIGHTS, objective)]) for half in self.fit.without]

    def scored(self, each: list[Vector]) -> Scores:
        """Count the correct images under the biases for each fold."""
        robust, natural = (self.fit.held_out(part, each) > 0 for part in (self.fit.counted, self.fit.natural))
        return Scores(self.images, robust, natural, self.images.values(robust))

    def at(self, place: float) -> Scores:
        """Return the scores of both halves at a point of their paths.

        0 is the model without biases, 1 the first weight.
        """
        return self.scored([_between(path, place) for path in self.paths])

    def within(self, loss: float | None) -> Scores:
        """Score the largest weight whose loss of the average on the fitting half is within a limit in points.

        Without a limit, the highest worst class of that half.
        """
        return self.scored([_within(half, path, loss) for half, path in zip(self.fit.without, self.paths, strict=True)])

    def keeping(self, average: float) -> Scores:
        """Score the largest weight that keeps an average on held-out images."""
        return self.at(_farthest(lambda place: self.at(place).average, average))

    def matched(self, method: Fitted) -> Scores:
        """Score the biases that bring the class accuracies closest to those of another model."""
        return self.scored([matching(*halves) for halves in zip(self.fit.without, method.fit.without, strict=True)])


def matching(base: ClassAccuracy, method: ClassAccuracy) -> Vector:
    """Return (K,) the biases, with mean zero, that bring the smooth class accuracies of one model closest to another's.

    A ridge of the variance of an accuracy, over the spread of the margins squared, keeps biases small where few images
    do not determine them.
    """
    present = np.flatnonzero(base.counts)
    scale = float(np.median(base.spread[present]))
    ridge = 0.5 / np.sqrt(np.median(base.counts[present]))
    target = method.values(np.zeros(method.num_classes))[present]

    def placed(scaled: Vector) -> Vector:
        biases = np.zeros(base.num_classes)
        biases[present] = scale * (scaled - scaled.mean())
        return biases

    def residuals(scaled: Vector) -> Vector:
        return np.concatenate([base.values(placed(scaled))[present] - target, ridge * scaled])

    def slopes(scaled: Vector) -> Matrix:
        by_bias = base.slopes(placed(scaled))[1][np.ix_(present, present)]  # rows sum to zero, so centering is free
        return np.concatenate([scale * by_bias, ridge * np.eye(len(present))])

    return placed(least_squares(residuals, np.zeros(len(present)), jac=slopes, max_nfev=_PASSES).x)


def _within(half: ClassAccuracy, path: Matrix, loss: float | None) -> Vector:
    if loss is None:
        return np.asarray(max(path, key=lambda biases: float(np.nanmin(half.values(biases)))))

    def average(place: float) -> float:
        return 100 * float(np.nanmean(half.values(_between(path, place))))

    return _between(path, _farthest(average, average(0.0) - loss))


def _farthest(value: Callable[[float], float], limit: float) -> float:
    """Return the farthest place of a path whose value is at or above a limit, by bisection; the start satisfies it."""
    low, high = 0.0, float(len(WEIGHTS))
    if value(high) >= limit - 1e-9:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) >= limit - 1e-9 else (low, middle)
    return low


def _between(path: Matrix, place: float) -> Vector:
    """Interpolate linearly between two neighboring points of a path."""
    low = min(int(place), len(path) - 2)
    return np.asarray(path[low] + (place - low) * (path[low + 1] - path[low]))


def measured(values: Vector) -> Measured:
    """Return the first of the values (1 + R,), with the middle 95% of the others as its interval."""
    low, high = np.percentile(_recentered(values), [_TAIL, 100 - _TAIL])
    return Measured(rounded(values[0]), rounded(low), rounded(high))


def ratio(part: Vector, whole: Vector) -> Measured:
    """Return a part in percent of the whole; without an interval if that of the whole contains zero."""
    if whole[0] <= 0:
        return Measured()
    value, recentered = 100 * part[0] / whole[0], _recentered(whole)
    if np.percentile(recentered, _TAIL) <= 0:
        return Measured(rounded(value))
    present = recentered > 0
    low, high = np.percentile(100 * _recentered(part)[present] / recentered[present], [_TAIL, 100 - _TAIL])
    return Measured(rounded(value), rounded(min(low, value)), rounded(max(high, value)))


def removed(before: Vector, after: Vector) -> Measured:
    """Return the relative reduction of a nonnegative quantity in percent."""
    found = ratio(before - after, before)
    return found if found.high is None else replace(found, high=min(found.high, 100.0))


def rounded(value: Any) -> float:
    """Round a number as in reports."""
    return round(float(value), 4)


def _recentered(values: Vector) -> Vector:
    """Return (R,) the resampled values, shifted to have the estimate as their median."""
    return np.asarray(values[1:] + (values[0] - np.median(values[1:])))
