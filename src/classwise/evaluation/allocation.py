"""Adaptive evaluation: attack examples in rounds until the accuracy of the worst class is known to within ± H.

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

# K classes, N examples, C contenders, G splits

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from classwise.metrics.comparison import Bools
from classwise.metrics.counts import Ints
from classwise.metrics.intervals import Floats, wilson
from classwise.reporting.allocation import AllocationInfo
from classwise.reporting.estimates import Estimate, percent
from classwise.storage.verdicts import WORST_CASE, Verdicts

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Contenders:
    """The classes that may be the worst, their counts and their bounds; each array is (C,)."""

    labels: Ints
    share: Floats
    done: Ints
    available: Ints
    lower: Floats
    upper: Floats
    z_low: float
    z_high: float
    half_width: float
    """Target half-width of the interval."""

    @classmethod
    def of(cls, survived: Ints, done: Ints, available: Ints, half_width: float) -> Contenders:
        """Select the contenders; at least one class must have examples, and each of those an attacked one."""
        present = np.flatnonzero(available)
        lower, upper = wilson(survived[present], done[present], 1 - 2 * TAIL_LOW)
        near = lower < upper.min()
        labels = present[near]
        tail_high = TAIL_HIGH / labels.size
        return cls(
            labels=labels,
            share=survived[labels] / done[labels],
            done=done[labels],
            available=available[labels],
            lower=lower[near],
            upper=wilson(survived[labels], done[labels], 1 - 2 * tail_high)[1],
            z_low=NormalDist().inv_cdf(1 - TAIL_LOW),
            z_high=NormalDist().inv_cdf(1 - tail_high),
            half_width=half_width,
        )

    @property
    def leader(self) -> int:
        """Position of the contender with the lowest upper bound."""
        return int(self.upper.argmin())

    @property
    def low(self) -> float:
        """Lower end of the 95% interval of the lowest true class accuracy."""
        return float(self.lower.min())

    @property
    def high(self) -> float:
        """Its upper end."""
        return float(self.upper.min())

    @property
    def reached(self) -> bool:
        """Whether the interval is narrow enough."""
        return self.high - self.low <= 2 * self.half_width * (1 + 2 * ROUNDING)

    def targets(self) -> Floats:
        """Return the examples that each contender should have in the end, if accuracies do not change (C,)."""
        split = self.share.min() - 2 * self.half_width * np.arange(SPLITS + 1) / SPLITS
        wanted, cost = self._plans(split, split + 2 * self.half_width)
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


def first_round(available: Ints) -> Ints:
    """Return the examples of each class in the first round (K,): ``MINIMUM``, or all.

    >>> first_round(np.array([1000, 20, 0])).tolist()
    [50, 20, 0]
    """
    return np.minimum(available, MINIMUM)


def next_round(survived: Ints, done: Ints, available: Ints, half_width: float) -> Ints | None:
    """Return the number of further examples of each class to attack (K,); None after the last round.

    ``available`` counts all examples of each class, ``done`` those attacked so far, ``survived`` their survivors.

    >>> available = np.array([1000, 1000, 0])
    >>> next_round(np.array([0, 0, 0]), np.array([0, 0, 0]), available, 0.02).tolist()
    [50, 50, 0]
    >>> next_round(np.array([10, 40, 0]), np.array([50, 50, 0]), available, 0.02).tolist()
    [150, 0, 0]
    """
    begun: Ints = np.maximum(first_round(available) - done, 0)
    if begun.any():
        return begun
    if not available.any() or (contenders := Contenders.of(survived, done, available, half_width)).reached:
        return None
    missing = contenders.targets() - contenders.done
    most = np.minimum((GROWTH - 1) * contenders.done, contenders.available - contenders.done)
    size = np.minimum(np.maximum(missing, np.ceil(LEAST * contenders.done)), most)
    further = np.zeros_like(done)
    further[contenders.labels] = np.where(missing > 0, size, 0)
    return further if further.any() else None


def overall(survived: Ints, done: Ints, available: Ints) -> tuple[float, float, float]:
    """Return the accuracy over all available examples, from samples of the classes, and its 95% interval.

    Each class is weighted by its size: p = sum w_k p_k with w_k = N_k / sum N. The variance is
    V = sum w_k² q_k (1 - q_k) / n_k with q_k = (s_k + 1) / (n_k + 2), which is positive also for p_k = 0 or 1. The
    interval is Wilson's for the accuracy p of n = q (1 - q) / V examples, with q = sum w_k q_k. For a single class, and
    for classes with equal sizes and counts, this is Wilson's interval of all examples.

    Pass the counts of the first round, since those of later rounds are biased. NaN without examples.

    >>> found = overall(np.array([10, 40]), np.array([50, 50]), np.array([1000, 3000]))
    >>> [round(part, 3) for part in found]
    [0.65, 0.557, 0.733]
    """
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
    low, high = wilson(value * n, n)
    return value, float(low), float(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The order in which examples are attacked, and the goal."""

    label: Ints
    rank: Ints
    """(N,) position of each example in the order of its class."""
    available: Ints
    """(K,) examples of each class."""
    half_width: float
    """Target half-width of the 95% interval of the worst class, as a fraction."""

    @classmethod
    def of(cls, label: Ints, num_classes: int, half_width: float, seed: int) -> Rounds:
        """Draw the order. ``half_width`` is in percentage points."""
        draws = np.random.default_rng(seed).permutation(len(label))
        rank = np.empty(len(label), dtype=np.int64)
        for one in range(num_classes):
            rows = np.flatnonzero(label == one)
            rank[rows[np.argsort(draws[rows])]] = np.arange(len(rows))
        available = np.bincount(label, minlength=num_classes)
        return cls(label=label, rank=rank, available=available, half_width=half_width / 100)

    def run(self, verdicts: Verdicts) -> Iterator[Bools]:
        """Yield masks (N,) of the examples to attack, each a superset of the previous one, until the goal is reached.

        Before the next step, the caller fills the verdicts on these examples.
        """
        done = first_round(self.available)
        while True:
            rows = self.rank < done[self.label]
            yield rows
            more = next_round(self._survivors(rows, verdicts), done, self.available, self.half_width)
            if more is None:
                return
            done = done + more

    def results(self, rows: Bools, rounds: int, verdicts: Verdicts) -> dict[str, Any]:
        """Return the allocation and the overall accuracies of the report, after the last round."""
        overall = {key: self._overall(verdicts, key) for key in (*verdicts.keys, WORST_CASE)}
        return {"allocation": self._info(rows, rounds, verdicts), "overall": overall}

    def _info(self, rows: Bools, rounds: int, verdicts: Verdicts) -> AllocationInfo:
        done = np.bincount(self.label[rows], minlength=len(self.available))
        found = Contenders.of(self._survivors(rows, verdicts), done, self.available, self.half_width)
        return AllocationInfo(
            asked=round(100 * self.half_width, 4),
            reached=found.reached,
            rounds=rounds,
            label=int(found.labels[found.leader]),
            value=percent(float(found.share[found.leader])),
            low=percent(found.low),
            high=percent(found.high),
            contenders=found.labels.tolist(),
            attacked=done.tolist(),
            available=self.available.tolist(),
        )

    def _overall(self, verdicts: Verdicts, key: str) -> Estimate:
        """Return the accuracy over all examples, estimated from the first round, whose size is fixed."""
        done = first_round(self.available)
        value, low, high = overall(self._survivors(self.rank < done[self.label], verdicts, key), done, self.available)
        return Estimate(value=percent(value), low=percent(low), high=percent(high), n=int(done.sum()))

    def _survivors(self, rows: Bools, verdicts: Verdicts, key: str = WORST_CASE) -> Ints:
        return np.bincount(self.label[rows & verdicts.survived(key)], minlength=len(self.available))
