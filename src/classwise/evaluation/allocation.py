"""Choose which examples to attack next if only the accuracy of the worst class is needed, to within ± H.

The goal is a 95% interval of half-width H for the lowest true class accuracy, min p_k, with as few attacked examples as
possible. Examples are attacked in rounds; after each, every class has Wilson bounds l_k and h_k.

**The interval.** A class is a contender while its lower bound is below the lowest upper bound of all classes. The
interval is [min l_k, min h_k] over the contenders. Its lower end is valid if the bound of the truly worst class is
valid, regardless of the number of classes. Its upper end is valid only if no contender's accuracy is underestimated, so
its error rate, 2.5%, is divided by the number of contenders (Bonferroni). Testing after every round affects the lower
end: a class whose measured accuracy is high enough gets no more examples, so the truly worst class may be dropped by
chance in any round. An error rate of 1.25% at the lower end compensates for this, because there are only a few rounds,
each a multiple of the one before, and therefore nearly independent. In simulations with 2, 10 and 100 classes (one
clearly worst, two tied, all equal, one just below all others, as on CIFAR-10) and H from 1 to 5 points, the interval
contains the lowest true accuracy in at least 94% of runs. With 2.5% at the lower end it is 91% for one class just below
99 others, and for Wilson's interval of the class with the lowest measured accuracy 81% with ten equal classes. If
classes are nearly tied, the interval is that of the lowest accuracy, whichever class has it.

**The plan.** Wilson's bounds invert the score test: for an accuracy p, the bound b is reached with
n = z² b (1 - b) / (p - b)² examples. For any placement (b, b + 2H) of the target interval this gives the number of
examples needed if the accuracies do not change: every contender needs a lower bound above b, and one of them an upper
bound below b + 2H. The cheapest placement is the plan. If there are not enough examples for any, the plan is the
narrowest interval that they allow. A round gives a class at most a fixed multiple of its examples, which limits the
influence of early estimates.

**Bias.** Classes with a high accuracy by chance get no more examples and remain overestimated, so the class accuracies
and their average are too high after such a run (by two points with ten equal classes). ``overall`` should therefore be
computed from the first round, the only one whose size does not depend on results.
"""

# K classes, C contenders, G splits

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from classwise.core.errors import InputError
from classwise.metrics.counts import Ints
from classwise.metrics.intervals import Floats, wilson

TAIL_LOW = 0.0125
TAIL_HIGH = 0.025
"""Error rate of either end of the interval: of the lower end per round, of the upper end in total."""
MINIMUM = 50
"""Examples of each class in the first round."""
GROWTH = 4
"""Maximum ratio of the examples of a class after and before a round."""
LEAST = 0.25
"""Minimum increase of a class, relative to its examples, since many small rounds cost more than they save."""
SPLITS = 64
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Allocation:
    """The estimate of the lowest class accuracy, in fractions."""

    label: int
    """The contender with the lowest upper bound."""
    value: float
    low: float
    high: float
    """The 95% interval of the lowest true class accuracy."""
    contenders: tuple[int, ...]
    """Classes that may be the worst."""
    reached: bool
    """Whether the interval is narrow enough."""

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True, slots=True)
class Contenders:
    """The contenders, their counts and their bounds; each array is (C,)."""

    labels: Ints
    share: Floats
    done: Ints
    available: Ints
    low: Floats
    high: Floats
    z_low: float
    z_high: float

    @classmethod
    def of(cls, survived: Ints, done: Ints, available: Ints) -> Contenders:
        present = np.flatnonzero(available)
        low, high = wilson(survived[present], done[present], 1 - 2 * TAIL_LOW)
        near = low < high.min()
        labels = present[near]
        tail_high = TAIL_HIGH / labels.size
        return cls(
            labels=labels,
            share=survived[labels] / done[labels],
            done=done[labels],
            available=available[labels],
            low=low[near],
            high=wilson(survived[labels], done[labels], 1 - 2 * tail_high)[1],
            z_low=NormalDist().inv_cdf(1 - TAIL_LOW),
            z_high=NormalDist().inv_cdf(1 - tail_high),
        )

    @property
    def width(self) -> float:
        return float(self.high.min() - self.low.min())

    def reached(self, half_width: float) -> bool:
        return self.width <= 2 * half_width * (1 + 2 * ROUNDING)

    def targets(self, half_width: float) -> Floats:
        """Return the examples that each contender should have in the end, if accuracies do not change (C,)."""
        split = self.share.min() - 2 * half_width * np.arange(SPLITS + 1) / SPLITS
        wanted, cost = self._plans(split, split + 2 * half_width)
        if not np.isfinite(cost).any():
            counts = self.share * self.available
            low, _ = wilson(counts, self.available, 1 - 2 * TAIL_LOW)
            _, high = wilson(counts, self.available, 1 - 2 * TAIL_HIGH / self.labels.size)
            wanted, cost = self._plans(low.min(keepdims=True), high.min(keepdims=True))
        best: Floats = wanted[cost.argmin()]
        return best

    def _plans(self, low: Floats, high: Floats) -> tuple[Floats, Floats]:
        """Return the examples (G, C) for an interval within [low, high], and their sums (G,), inf if too few exist."""
        low, high = low[:, None], high[:, None]
        for_low = np.where(low <= 0, 0.0, _needed(self.share - low, low, self.z_low))
        for_low = np.maximum(for_low, self.done)
        for_high = np.where(high >= 1, 0.0, _needed(high - self.share, high, self.z_high))
        further = np.where(for_high <= self.available, np.maximum(for_high - for_low, 0), np.inf)
        least = further.min(axis=1)
        # Classes with equal counts are treated equally, so the result does not depend on the order of classes.
        leads = further == least[:, None]
        cost = np.where((for_low <= self.available).all(axis=1), for_low.sum(axis=1) + least, np.inf)
        return np.where(leads, for_low + further, for_low), cost


def _needed(distance: Floats, bound: Floats, z: float) -> Floats:
    """Return the number of examples at which Wilson's bound equals ``bound``, ``distance`` away from the accuracy."""
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = z**2 * bound * (1 - bound) / distance**2
    return np.where(distance > 0, np.ceil(exact * (1 - ROUNDING)), np.inf)


def first_round(available: ArrayLike, *, minimum: int = MINIMUM) -> Ints:
    """Return the examples of each class in the first round (K,): ``minimum``, or all.

    >>> first_round([1000, 20, 0]).tolist()
    [50, 20, 0]
    """
    if minimum < 1:
        raise InputError(f"minimum must be at least 1, got {minimum}")
    return np.minimum(np.asarray(available, dtype=np.int64), minimum)


def next_round(
    survived: ArrayLike, done: ArrayLike, available: ArrayLike, half_width: float, *, minimum: int = MINIMUM
) -> Ints | None:
    """Return the number of further examples of each class to attack (K,); None after the last round.

    ``available`` counts all examples of each class, ``done`` those attacked so far, ``survived`` their survivors.

    >>> next_round([0, 0, 0], [0, 0, 0], [1000, 1000, 0], 0.02).tolist()
    [50, 50, 0]
    >>> next_round([10, 40, 0], [50, 50, 0], [1000, 1000, 0], 0.02).tolist()
    [150, 0, 0]
    """
    survived, done, available = _counts(survived, done, available)
    _check_goal(half_width)
    begun: Ints = np.maximum(first_round(available, minimum=minimum) - done, 0)
    if begun.any():
        return begun
    if not available.any() or (contenders := Contenders.of(survived, done, available)).reached(half_width):
        return None
    missing = contenders.targets(half_width) - contenders.done
    most = np.minimum((GROWTH - 1) * contenders.done, contenders.available - contenders.done)
    size = np.minimum(np.maximum(missing, np.ceil(LEAST * contenders.done)), most)
    further = np.zeros_like(done)
    further[contenders.labels] = np.where(missing > 0, size, 0)
    return further if further.any() else None


def summary(survived: ArrayLike, done: ArrayLike, available: ArrayLike, half_width: float) -> Allocation | None:
    """Return the estimate of the worst class; None if no class has examples.

    If ``reached`` is False after the last round, all examples of the contenders were used before the interval was
    narrow enough.

    >>> found = summary([310, 800], [1500, 1000], [5000, 5000], 0.03)
    >>> found.label, round(found.low, 3), round(found.high, 3), found.contenders, found.reached
    (0, 0.184, 0.228, (0,), True)
    """
    survived, done, available = _counts(survived, done, available)
    _check_goal(half_width)
    if not available.any():
        return None
    if label := np.flatnonzero((done == 0) & (available > 0)).tolist():
        raise InputError(f"no example of class {label[0]} has been attacked yet")
    contenders = Contenders.of(survived, done, available)
    leader = int(contenders.high.argmin())
    return Allocation(
        label=int(contenders.labels[leader]),
        value=float(contenders.share[leader]),
        low=float(contenders.low.min()),
        high=float(contenders.high[leader]),
        contenders=tuple(contenders.labels.tolist()),
        reached=contenders.reached(half_width),
    )


def overall(
    survived: ArrayLike, done: ArrayLike, available: ArrayLike, *, level: float = 0.95
) -> tuple[float, float, float]:
    """Return the accuracy over all available examples, from samples of the classes, and its interval.

    Each class is weighted by its size: p = sum w_k p_k with w_k = N_k / sum N. The variance is
    V = sum w_k² q_k (1 - q_k) / n_k with q_k = (s_k + 1) / (n_k + 2), which is positive also for p_k = 0 or 1. The
    interval is Wilson's for the accuracy p of n = q (1 - q) / V examples, with q = sum w_k q_k. For a single class, and
    for classes with equal sizes and counts, this is Wilson's interval of all examples.

    Pass the counts of the first round, since those of later rounds are biased. NaN without examples.

    >>> [round(part, 3) for part in overall([10, 40], [50, 50], [1000, 3000])]
    [0.65, 0.557, 0.733]
    """
    survived, done, available = _counts(survived, done, available)
    if ((done == 0) & (available > 0)).any():
        raise InputError("the overall accuracy needs an attacked example of every class with examples")
    present = np.flatnonzero(available)
    if not present.size:
        return np.nan, np.nan, np.nan
    survived, done, available = survived[present], done[present], available[present]
    # Dividing last gives exactly 1 for accuracies of 1.
    value = float(available @ (survived / done) / available.sum())
    weight = available / available.sum()
    guarded = (survived + 1) / (done + 2)
    center = weight @ guarded
    n = center * (1 - center) / (weight**2 @ (guarded * (1 - guarded) / done))
    low, high = wilson(value * n, n, level)
    return value, float(low), float(high)


def _check_goal(half_width: float) -> None:
    if not 0 < half_width < 0.5:
        raise InputError(f"half_width must be between 0 and 0.5 (0.02 for 2 points), got {half_width}")


def _counts(survived: ArrayLike, done: ArrayLike, available: ArrayLike) -> tuple[Ints, Ints, Ints]:
    """Return the three counts as arrays, checked for consistency."""
    parts = [np.asarray(part, dtype=np.int64) for part in (survived, done, available)]
    if len({part.shape for part in parts}) > 1 or parts[0].ndim != 1:
        raise InputError(f"expected three counts for each class, got shapes {[part.shape for part in parts]}")
    ordered = (np.diff([np.zeros_like(parts[0]), *parts], axis=0) >= 0).all(axis=0)
    if not ordered.all():
        label = int(ordered.argmin())
        got = ", ".join(str(part[label]) for part in parts)
        raise InputError(f"class {label}: expected 0 <= survived <= done <= available, got {got}")
    return parts[0], parts[1], parts[2]
