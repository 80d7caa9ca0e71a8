"""From a margin matrix to class biases: the frontier, cross-fitted, and the choice of one of its points.

In-sample accuracies are optimistic. Therefore, every weight of the frontier is also fitted without each fold of the
images and scored on that fold. A point is chosen by these cross-validated accuracies, smoothed; reports give their
counts. The biases that are used come from all images.
"""

# N examples, K classes, W weights

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from classwise.core.choices import RepairRule
from classwise.core.errors import InputError, unknown
from classwise.metrics.counts import Ints
from classwise.repairs.accuracy import ClassAccuracy, Matrix, Vector, by_class, tenth_of
from classwise.repairs.frontier import WEIGHTS, Objective, best, frontier
from classwise.storage.margins import Margins

RULES: tuple[RepairRule, ...] = get_args(RepairRule)
FOLDS = 5
LEAST = 2 * FOLDS
"""Minimum number of images of each class."""
REDRAWS = 200
"""Number of bootstrap resamples of rho."""
LEVEL = 0.05
"""Significance level of a lower rho."""
_HALVINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary statistics of class accuracies, as fractions."""

    average: float
    """Over images."""
    worst: float
    tenth: float
    """Mean of the weakest tenth of the classes."""

    @classmethod
    def of(cls, values: Vector, counts: Ints) -> Summary:
        """Compute from the accuracies (K,) and the number of images (K,) of each class."""
        present = np.sort(values[counts > 0])
        return cls(
            average=float(np.nansum(values * counts) / counts.sum()),
            worst=float(present[0]),
            tenth=float(present[: tenth_of(len(present))].mean()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One weight of the frontier."""

    weight: float
    biases: Vector
    """(K,) fitted to all images."""
    fitted: Summary
    """On the images that were fitted."""
    held_out: Summary
    """On images that were not fitted, smoothed."""
    each: list[Vector]
    """(K,) fitted without each fold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A chosen bias vector, its frontier, and the survival of every image under biases fitted without it."""

    biases: Vector
    """(K,) with mean zero; all zero if the unchanged model is selected."""
    selected: Point
    points: list[Point]
    start: Point
    """The unchanged model, with weight 0."""
    held_out_robust: NDArray[np.bool_]
    """(N,) correct under attack with biases fitted on the other folds."""
    held_out_natural: NDArray[np.bool_]

    @property
    def weight(self) -> float:
        """Weight of the worst class at the selected point; 0 for the unchanged model."""
        return self.selected.weight


def fit(
    margins: Margins,
    *,
    rule: RepairRule = "rho",
    floor: float | None = None,
    folds: int = FOLDS,
    seed: int = 0,
) -> Fit:
    """Fit class biases to a margin matrix.

    ``floor`` is the minimum accuracy of the worst class as a fraction; it replaces the rule.
    """
    if rule not in RULES:
        raise unknown("rule", rule, RULES)
    if floor is not None and not 0 < floor < 1:
        raise InputError(f"floor must be a fraction between 0 and 1, got {floor:g}")
    _check_examples(margins)
    objective = Objective(weak="tenth" if rule == "tenth" and floor is None else "worst")
    fitting = CrossFit(margins, objective, folds, seed)
    points = fitting.points()
    start = fitting.start()
    chosen = _chosen(fitting, start, points, rule, floor)
    return Fit(
        biases=chosen.biases,
        selected=chosen,
        points=points,
        start=start,
        held_out_robust=fitting.held_out(fitting.counted, chosen.each) > 0,
        held_out_natural=fitting.held_out(fitting.natural, chosen.each) > 0,
    )


class CrossFit:
    """Margin matrices of all images and of those outside each fold, for fits that are scored on held-out images."""

    def __init__(self, margins: Margins, objective: Objective, folds: int, seed: int) -> None:
        self.objective = objective
        self.label, self.num_classes = margins.label, margins.num_classes
        self.whole = ClassAccuracy.of(margins.attacked, margins.label)
        self.counted = ClassAccuracy.of(margins.attacked, margins.label, bandwidth=0)
        self.natural = ClassAccuracy.of(margins.without_attack, margins.label, bandwidth=0)
        self.seed = seed
        self.fold = assigned(margins.label, folds, seed)
        self.folds = folds
        self.without = [
            ClassAccuracy.of(margins.attacked[self.fold != one], margins.label[self.fold != one])
            for one in range(folds)
        ]

    def points(self) -> list[Point]:
        """The frontier."""
        whole = frontier(self.whole, WEIGHTS, self.objective)
        each = [frontier(part, WEIGHTS, self.objective) for part in self.without]
        return [
            self._point(weight, biases, [part[number] for part in each])
            for number, (weight, biases) in enumerate(zip(WEIGHTS, whole, strict=True))
        ]

    def start(self) -> Point:
        """The unchanged model."""
        zero = np.zeros(self.num_classes)
        return self._point(0.0, zero, [zero] * self.folds)

    def point(self, weight: float, near: Point) -> Point:
        """The point of another weight; the optimizer starts from a nearby one."""
        each = [best(part, weight, start, self.objective) for part, start in zip(self.without, near.each, strict=True)]
        return self._point(weight, best(self.whole, weight, near.biases, self.objective), each)

    def held_out(self, accuracy: ClassAccuracy, each: list[Vector]) -> Vector:
        """(N,) correctness of each image under the biases that were fitted without it."""
        kept = np.zeros(len(self.label))
        for one, biases in enumerate(each):
            rows = np.flatnonzero(self.fold == one)
            kept[rows] = accuracy.take(rows).kept(biases)
        return kept

    def highest_average_near_best(self, points: list[Point]) -> Point:
        """The point of the highest average among those whose rho is not significantly below the largest."""
        rhos, redrawn = self._rhos(points)
        top = int(np.argmax(rhos))
        within = np.flatnonzero(np.quantile(redrawn[top] - redrawn, LEVEL, axis=1) <= 0)
        return max((points[number] for number in within), key=lambda point: point.held_out.average)

    def _rhos(self, points: list[Point]) -> tuple[Vector, Matrix]:
        """(W,) rho of every point against the first on held-out images, and (W, R) for resampled images."""
        random = np.random.default_rng(self.seed)
        kept = np.stack([self.held_out(self.whole, point.each) for point in points])
        shares = []
        for one in np.flatnonzero(self.whole.counts):
            rows = np.flatnonzero(self.label == one)
            times = random.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), REDRAWS)
            shares.append(kept[:, rows] @ np.vstack([np.ones(len(rows)), times]).T / len(rows))
        values = np.stack(shares)  # (K, W, 1 + R)
        counts = self.whole.counts[self.whole.counts > 0]
        average = np.tensordot(counts / counts.sum(), values, 1)
        worst = np.maximum(values.min(axis=0), 1e-9)
        found = worst / worst[0] + average / average[0] - 2
        return found[:, 0], found[:, 1:]

    def _point(self, weight: float, biases: Vector, each: list[Vector]) -> Point:
        fitted = Summary.of(self.whole.values(biases), self.whole.counts)
        return Point(weight=weight, biases=biases, fitted=fitted, held_out=self._summary(each), each=each)

    def _summary(self, each: list[Vector]) -> Summary:
        values = by_class(self.held_out(self.whole, each), self.label, self.num_classes)
        return Summary.of(values, self.whole.counts)


def _chosen(fitting: CrossFit, start: Point, points: list[Point], rule: RepairRule, floor: float | None) -> Point:
    """The point that the rule or the floor selects; the start if none is better."""
    if floor is not None:
        return _reaching(fitting, start, points, floor)
    if rule == "rho":
        return fitting.highest_average_near_best([start, *points])
    return max([start, *points], key=lambda point: getattr(point.held_out, rule))


def _reaching(fitting: CrossFit, start: Point, points: list[Point], floor: float) -> Point:
    """The point of the smallest weight whose held-out worst class is at or above the floor."""
    if start.held_out.worst >= floor:
        return start
    above = [number for number, point in enumerate(points) if point.held_out.worst >= floor]
    if not above:
        top = max([start, *points], key=lambda point: point.held_out.worst).held_out
        if top.worst < 0.0005:  # 0.0% as printed; held-out accuracies are smoothed
            raise InputError("class biases cannot raise the worst class of this model above 0%")
        raise InputError(
            f"a floor of {100 * floor:g}% is not reachable by class biases: the highest worst class is "
            f"{100 * top.worst:.1f}%, with an average of {100 * top.average:.1f}% (cross-validated); pass a lower floor"
        )
    high = points[above[0]]
    if not above[0]:
        return high
    low = points[above[0] - 1]
    for _ in range(_HALVINGS):
        middle = fitting.point(float(np.sqrt(low.weight * high.weight)), low)
        low, high = (low, middle) if middle.held_out.worst >= floor else (middle, high)
    return high


def assigned(label: Ints, folds: int, seed: int) -> Ints:
    """(N,) the fold of each image; every class is divided evenly, at random."""
    found = np.empty(len(label), dtype=np.int64)
    for one in np.unique(label):
        rows = np.flatnonzero(label == one)
        found[np.random.default_rng([seed, int(one)]).permutation(rows)] = np.arange(len(rows)) % folds
    return found


def _check_examples(margins: Margins) -> None:
    """Refuse a single class, and too few images of any."""
    counts = np.bincount(margins.label, minlength=margins.num_classes)
    present = np.flatnonzero(counts)
    if len(present) < 2:
        raise InputError(f"class biases need images of at least 2 classes, got {len(present)}")
    short = present[counts[present].argmin()]
    if counts[short] < LEAST:
        raise InputError(
            f"class {short} has {counts[short]} fitting images: at least {LEAST} of each class are required, 100 are "
            "recommended (standard error 5 points)"
        )
