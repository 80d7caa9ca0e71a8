"""Class biases fitted to one half of the images and judged on the other, with redraws of the images for intervals.

The images of each class are divided in two. Biases are fitted to the smooth class accuracies of one half and judged by
counting on the other, in both directions; all accuracies are those of the two held-out halves together.

Redraws are within each class and the same for all models; biases are not fitted again. A redraw adds sampling noise a
second time, which lowers every minimum and raises MCD and CV; the redrawn values of a quantity are therefore moved so
that their median is the estimate.
"""

# N images, K classes, P classes with images, R redraws

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from classwise.metrics.counts import Ints
from classwise.repairs.accuracy import ClassAccuracy, Matrix, Vector, tenth_of
from classwise.repairs.fit import assigned
from classwise.repairs.frontier import WEIGHTS, Objective, frontier
from classwise.reporting.part import Part
from classwise.storage.margins import Margins

REDRAWS = 200
_TAIL = 2.5
"""Percent of the redraws beyond either end of an interval."""
_HALVES = 2
_HALVINGS = 16
_PASSES = 100
Bools = NDArray[np.bool_]


class Measured(Part):
    """A number with its 95% interval from redraws of the images; null where it is not defined."""

    value: float | None
    low: float | None
    high: float | None


class Images:
    """The images that all models share: their halves, and redraws of them within each class."""

    def __init__(self, label: Ints, classes: list[str], seed: int) -> None:
        self.label, self.classes = label, classes
        self.counts = np.bincount(label, minlength=len(classes)).astype(np.int64)
        self.fold = assigned(label, _HALVES, seed)
        self.rows = [np.flatnonzero(label == one) for one in np.flatnonzero(self.counts)]
        random = np.random.default_rng([seed, 1])
        self.draws = [
            np.concatenate([np.ones((1, n)), random.multinomial(n, np.full(n, 1 / n), size=REDRAWS)])
            for n in map(len, self.rows)
        ]

    def values(self, kept: Bools) -> Matrix:
        """(1 + R, P) the mean of each class in percent: of the images, then of every redraw."""
        parts = [draws @ kept[rows] / len(rows) for draws, rows in zip(self.draws, self.rows, strict=True)]
        return 100 * np.stack(parts, axis=1)


@dataclass(frozen=True, slots=True)
class Judged:
    """What stays correct under some biases, each half of the images under those fitted to the other."""

    images: Images
    robust: Bools
    """(N,)"""
    natural: Bools
    values: Matrix
    """(1 + R, P) robust accuracies in percent: of the images, then of every redraw."""

    @property
    def quantities(self) -> dict[str, Vector]:
        """(1 + R,) what the class accuracies come to."""
        ranked = np.sort(self.values, axis=1)
        return {
            "average": ranked.mean(axis=1),
            "worst": ranked[:, 0],
            "tenth": ranked[:, : tenth_of(ranked.shape[1])].mean(axis=1),
            "mcd": ranked[:, -1] - ranked[:, 0],
            "cv": ranked.var(axis=1),
        }

    @property
    def average(self) -> float:
        """Of the images."""
        return float(self.values[0].mean())

    def squared(self, other: Judged) -> Vector:
        """(1 + R,) the mean squared difference of the class accuracies from another model's."""
        return np.asarray(((self.values - other.values) ** 2).mean(axis=1))

    def noise(self, other: Judged) -> float:
        """The standard error of the difference from another model, in points: root mean square over classes."""
        difference = self.robust.astype(np.float64) - other.robust
        return 100 * float(np.sqrt(np.mean([difference[rows].var() / (len(rows) - 1) for rows in self.images.rows])))


class Fitted:
    """One model: its frontier on each half of the images, judged on the other half."""

    def __init__(self, margins: Margins, images: Images, objective: Objective) -> None:
        self.images, self.attacked, self.natural = images, margins.attacked, margins.without_attack
        self.whole = ClassAccuracy.of(margins.attacked, margins.label)
        others = [images.fold != one for one in range(_HALVES)]
        self.halves = [ClassAccuracy.of(margins.attacked[rows], margins.label[rows]) for rows in others]
        """Each without the images of one fold, for which it is fitted."""
        zero = np.zeros(margins.num_classes)
        self.paths = [np.stack([zero, *frontier(half, WEIGHTS, objective)]) for half in self.halves]

    def judged(self, each: list[Vector]) -> Judged:
        """Count what stays correct under the biases for the images of each fold."""
        robust, natural = (self._kept(margins, each) for margins in (self.attacked, self.natural))
        return Judged(self.images, robust, natural, self.images.values(robust))

    def at(self, place: float) -> Judged:
        """The same place of both paths: 0 is the model as it is, 1 the first weight."""
        return self.judged([_between(path, place) for path in self.paths])

    def within(self, loss: float | None) -> Judged:
        """The largest weight whose loss of the average on the fitting half is within a limit in points.

        Without a limit, the highest worst class of that half.
        """
        return self.judged([_within(half, path, loss) for half, path in zip(self.halves, self.paths, strict=True)])

    def keeping(self, average: float) -> Judged:
        """The largest weight that keeps an average on held-out images."""
        return self.at(_farthest(lambda place: self.at(place).average, average))

    def matched(self, method: Fitted) -> Judged:
        """The biases that bring the class accuracies closest to those of another model."""
        return self.judged([matching(one, other) for one, other in zip(self.halves, method.halves, strict=True)])

    def _kept(self, margins: NDArray[np.float32], each: list[Vector]) -> Bools:
        label, kept = self.images.label, np.empty(len(margins), dtype=bool)
        for one, biases in enumerate(each):
            rows = self.images.fold == one
            kept[rows] = (margins[rows] - biases).min(axis=1) + biases[label[rows]] > 0
        return kept


def matching(base: ClassAccuracy, method: ClassAccuracy) -> Vector:
    """(K,) the biases, with mean zero, under which the smooth class accuracies of one model come closest to another's.

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
    """The farthest place of a path that keeps a value at or above its limit, as the start does, by halving."""
    low, high = 0.0, float(len(WEIGHTS))
    if value(high) >= limit - 1e-9:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) >= limit - 1e-9 else (low, middle)
    return low


def _between(path: Matrix, place: float) -> Vector:
    """A place between two points of a path."""
    low = min(int(place), len(path) - 2)
    return np.asarray(path[low] + (place - low) * (path[low + 1] - path[low]))


def measured(values: Vector) -> Measured:
    """The first of the values (1 + R,), with the middle 95% of the others."""
    low, high = np.percentile(_moved(values), [_TAIL, 100 - _TAIL])
    return Measured(value=rounded(values[0]), low=rounded(low), high=rounded(high))


def ratio(part: Vector, whole: Vector) -> Measured:
    """A part in percent of the whole; without an interval where that of the whole holds zero."""
    if whole[0] <= 0:
        return Measured(value=None, low=None, high=None)
    value, moved = 100 * part[0] / whole[0], _moved(whole)
    if np.percentile(moved, _TAIL) <= 0:
        return Measured(value=rounded(value), low=None, high=None)
    present = moved > 0
    low, high = np.percentile(100 * _moved(part)[present] / moved[present], [_TAIL, 100 - _TAIL])
    return Measured(value=rounded(value), low=rounded(min(low, value)), high=rounded(max(high, value)))


def removed(before: Vector, after: Vector) -> Measured:
    """By how many percent something not negative became smaller."""
    found = ratio(before - after, before)
    return found if found.high is None else found.model_copy(update={"high": min(found.high, 100.0)})


def rounded(value: Any) -> float:
    """A number as it stands in reports."""
    return round(float(value), 4)


def _moved(values: Vector) -> Vector:
    """(R,) redrawn values whose median is the estimate."""
    return np.asarray(values[1:] + (values[0] - np.median(values[1:])))
