"""From a margin matrix to class biases: the frontier, cross-fitted, and the choice of one of its points.

What a fit reports of the images it was fitted to is too good. So every weight of the frontier is fitted once more
without each fold of the images and judged on that fold; the choice, and what a repair promises, rest on these held-out
accuracies. The biases that are used come from all images.
"""

# N examples, K classes, W weights

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from classwise.errors import InputError, unknown
from classwise.metrics.counts import Ints
from classwise.repairs.accuracy import ClassAccuracy, Matrix, Vector, tenth_of
from classwise.repairs.frontier import WEIGHTS, Objective, best, frontier
from classwise.storage.margins import Margins

Rule = Literal["rho", "worst", "tenth"]
"""``rho``: gain of the worst class less loss of the average, both relative; of the points within a standard error of
the largest, the one of the highest average. ``worst``: the highest worst class. ``tenth``: the highest mean of the
weakest tenth of the classes."""
RULES: tuple[Rule, ...] = get_args(Rule)
FOLDS = 5
LEAST = 2 * FOLDS
"""Images of a class that a fit needs."""
REDRAWS = 200
"""Bootstrap samples for the standard error of rho."""
_HALVINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What some class accuracies come to, as shares."""

    average: float
    worst: float
    tenth: float

    @classmethod
    def of(cls, values: Vector) -> Summary:
        """From the accuracies (K,), NaN for absent classes."""
        present = np.sort(values[~np.isnan(values)])
        return cls(
            average=float(present.mean()),
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
    """On images that were not, smoothed."""
    each: list[Vector]
    """(K,) fitted without each fold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A chosen bias vector, its frontier, and the survival of every image under biases fitted without it."""

    biases: Vector
    """(K,) mean zero; all zero where no choice is better than the model as it is."""
    weight: float
    """Of the chosen point; 0 for the model as it is."""
    points: list[Point]
    start: Point
    """The model as it is."""
    held_out_robust: NDArray[np.bool_]
    """(N,) correct under attack with biases fitted on the other folds."""
    held_out_natural: NDArray[np.bool_]


def fit(
    margins: Margins,
    *,
    rule: Rule = "rho",
    floor: float | None = None,
    folds: int = FOLDS,
    seed: int = 0,
) -> Fit:
    """Fit class biases to a margin matrix.

    ``floor`` (a share) asks for the largest average with the worst class at or above it and replaces the rule.
    """
    if rule not in RULES:
        raise unknown("rule", rule, RULES)
    if floor is not None and not 0 < floor < 1:
        raise InputError(f"the floor is a percentage above 0 and below 100, got {100 * floor:g}")
    _check_examples(margins)
    objective = Objective(weak="tenth" if rule == "tenth" and floor is None else "worst")
    fitting = _Fitting(margins, objective, folds, seed)
    points = fitting.points()
    start = fitting.start()
    weight = _chosen(fitting, start, points, rule, floor)
    biases = fitting.biases(weight) if weight else np.zeros(margins.num_classes)
    each = fitting.of_folds(weight) if weight else [np.zeros(margins.num_classes)] * folds
    return Fit(
        biases=biases,
        weight=weight,
        points=points,
        start=start,
        held_out_robust=fitting.held_out(fitting.counted, each) > 0,
        held_out_natural=fitting.held_out(fitting.natural, each) > 0,
    )


class _Fitting:
    """The images, all of them and without each fold."""

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
        """The model as it is."""
        zero = np.zeros(self.num_classes)
        return self._point(0.0, zero, [zero] * self.folds)

    def biases(self, weight: float) -> Vector:
        """Fitted to all images."""
        return best(self.whole, weight, None, self.objective)

    def of_folds(self, weight: float) -> list[Vector]:
        """Fitted without each fold."""
        return [best(part, weight, None, self.objective) for part in self.without]

    def held_out(self, accuracy: ClassAccuracy, each: list[Vector]) -> Vector:
        """(N,) how far each image stays correct under the biases that were fitted without it."""
        kept = np.zeros(len(self.label))
        for one, biases in enumerate(each):
            rows = np.flatnonzero(self.fold == one)
            kept[rows] = accuracy.take(rows).kept(biases)
        return kept

    def worst_at(self, weight: float) -> float:
        """The worst class on held-out images."""
        return self._summary(self.of_folds(weight)).worst

    def cheapest(self, points: list[Point]) -> int:
        """The point of the highest average among those whose rho is within a standard error of the largest."""
        rhos, redrawn = self._rhos(points)
        top = int(np.argmax(rhos))
        error = (redrawn[top] - redrawn).std(axis=1)
        within = np.flatnonzero(rhos >= rhos[top] - error)
        return int(within[np.argmax([points[number].held_out.average for number in within])])

    def _rhos(self, points: list[Point]) -> tuple[Vector, Matrix]:
        """(W,) rho of every point against the first on held-out images, and (W, R) under redraws of the images."""
        random = np.random.default_rng(self.seed)
        kept = np.stack([self.held_out(self.whole, point.each) for point in points])
        shares = []
        for one in np.flatnonzero(self.whole.counts):
            rows = np.flatnonzero(self.label == one)
            times = random.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), REDRAWS)
            shares.append(kept[:, rows] @ np.vstack([np.ones(len(rows)), times]).T / len(rows))
        values = np.stack(shares)  # (K, W, 1 + R)
        average, worst = values.mean(axis=0), np.maximum(values.min(axis=0), 1e-9)
        found = worst / worst[0] + average / average[0] - 2
        return found[:, 0], found[:, 1:]

    def _point(self, weight: float, biases: Vector, each: list[Vector]) -> Point:
        fitted = Summary.of(self.whole.values(biases))
        return Point(weight=weight, biases=biases, fitted=fitted, held_out=self._summary(each), each=each)

    def _summary(self, each: list[Vector]) -> Summary:
        return Summary.of(by_class(self.held_out(self.whole, each), self.label, self.num_classes))


def _chosen(fitting: _Fitting, start: Point, points: list[Point], rule: Rule, floor: float | None) -> float:
    """The weight that the rule or the floor picks; 0 for the model as it is."""
    if floor is not None:
        return _reaching(fitting, start, points, floor)
    if rule == "rho":
        number = fitting.cheapest([start, *points])
        return points[number - 1].weight if number else 0.0
    values = [getattr(point.held_out, rule) for point in points]
    number = int(np.argmax(values))
    return points[number].weight if values[number] > getattr(start.held_out, rule) else 0.0


def _reaching(fitting: _Fitting, start: Point, points: list[Point], floor: float) -> float:
    """The smallest weight whose held-out worst class keeps the floor."""
    if start.held_out.worst >= floor:
        return 0.0
    above = [number for number, point in enumerate(points) if point.held_out.worst >= floor]
    if not above:
        top = max(points, key=lambda point: point.held_out.worst).held_out
        raise InputError(
            f"no class biases lift the worst class to {100 * floor:g}: the best reachable is {100 * top.worst:.1f}, "
            f"with an average of {100 * top.average:.1f} (held-out estimates)"
        )
    high = points[above[0]].weight
    low = points[above[0] - 1].weight if above[0] else 0.0
    if not low:
        return high
    for _ in range(_HALVINGS):
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if fitting.worst_at(middle) >= floor else (middle, high)
    return high


def assigned(label: Ints, folds: int, seed: int) -> Ints:
    """(N,) the fold of each image; every class is divided evenly, at random."""
    found = np.empty(len(label), dtype=np.int64)
    for one in np.unique(label):
        rows = np.flatnonzero(label == one)
        found[np.random.default_rng([seed, int(one)]).permutation(rows)] = np.arange(len(rows)) % folds
    return found


def by_class(kept: Matrix | Vector, label: Ints, num_classes: int) -> Vector:
    """(K,) the mean of each class; NaN for a class without examples."""
    counts = np.bincount(label, minlength=num_classes)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.bincount(label, kept, num_classes) / counts)


def _check_examples(margins: Margins) -> None:
    """Refuse a single class, and too few images of any."""
    counts = np.bincount(margins.label, minlength=margins.num_classes)
    present = np.flatnonzero(counts)
    if len(present) < 2:
        raise InputError("a repair needs images of two classes or more: with one there is nothing to exchange")
    short = present[counts[present].argmin()]
    if counts[short] < LEAST:
        raise InputError(
            f"class {short} has {counts[short]} images to fit: {LEAST} of each class are the least, and it takes 100 "
            "to know a class accuracy to about 5 points"
        )
