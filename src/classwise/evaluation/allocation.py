"""Which examples to attack next, where only the accuracy of the worst class is wanted, and only to within ± H.

Wanted is the lowest true accuracy of a class, min p_k, with a 95 % interval of half-width H, for as few attacked
examples as possible. Examples are attacked in rounds; after each, every class has Wilson bounds l_k and h_k.

**The interval.** A class is a contender while its lower bound lies below the lowest upper bound of all classes; the
others are clearly above and decide nothing. The interval is [min l_k, min h_k] over the contenders. Its two ends
are not alike. The lower end holds as soon as the bound of the one truly worst class holds, however many classes
there are. The upper end holds only if no class that may be the worst is underrated, so what is allowed to go wrong
there, 2.5 %, is divided by the number of contenders (Bonferroni). Looking after every round does harm below: a class
is left alone once it looks good enough, and the truly worst class gets a new chance to look too good at each look.
Halving what is allowed to go wrong at the lower end, to 1.25 %, makes up for it, because only a few looks, each at a
multiple of the examples of the one before, are nearly independent. Simulated with 2, 10 and 100 classes (one clearly
worst, two tied, all equal, one just below all others, as on CIFAR-10) and H from 1 to 5 points, the interval holds the
lowest true accuracy in 94 % of all runs or more. With 2.5 % at the lower end it is 91 % for a class just below 99
others, and Wilson's plain interval of the class measured lowest comes to 81 % with ten equal classes. Near ties the
class that looks worst is one of several that may be: the interval is that of the lowest accuracy, whoever has it.

**The plan.** Wilson's bounds invert the score test: at a share p, the bound b is reached with
n = z² b (1 - b) / (p - b)² examples. So for any split (b, b + 2H) of the goal it is known what it takes, if the
shares stay as they are: every contender needs its lower bound above b, and one of them, no more, its upper bound
below b + 2H. The cheapest split is the plan, which spends on the leader what it saves on many others. Where the
examples at hand allow no split, the plan is the narrowest interval they do allow. A round takes no class beyond a
fixed multiple of what it has, so that no early guess is followed far.

**What it costs.** Classes that look good by chance are left alone and stay too good: their accuracies, and the average
of all classes, come out too high after such a run (by two points with ten equal classes). ``overall`` is therefore
meant for the first round alone, whose size no result has decided.
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
"""How often either end of the interval may be wrong: at the lower end in each look, at the upper end in all."""
MINIMUM = 50
"""Examples of each class in the first round."""
GROWTH = 4
"""A round leaves a class with at most so many times the examples it had."""
LEAST = 0.25
"""A class that gets more gets at least this share of what it has: many small rounds cost more than they save."""
SPLITS = 64
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Allocation:
    """What is known of the lowest class accuracy. Shares are fractions here, not percent."""

    label: int
    """The contender with the lowest upper bound: the class best known to be low."""
    value: float
    low: float
    high: float
    """Between these lies the lowest true accuracy of a class, in 95 % of all runs."""
    contenders: tuple[int, ...]
    """Every class that may be the worst."""
    reached: bool
    """Whether the interval is as narrow as wanted."""

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True, slots=True)
class Contest:
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
    def of(cls, survived: Ints, done: Ints, available: Ints) -> Contest:
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
        """(C,) examples each contender should have in the end, if all shares stay as they are."""
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
        """(G, C) examples that bring the interval within [low, high], and their (G,) sums, infinite where too many."""
        low, high = low[:, None], high[:, None]
        for_low = np.where(low <= 0, 0.0, _needed(self.share - low, low, self.z_low))
        for_low = np.maximum(for_low, self.done)
        for_high = np.where(high >= 1, 0.0, _needed(high - self.share, high, self.z_high))
        further = np.where(for_high <= self.available, np.maximum(for_high - for_low, 0), np.inf)
        least = further.min(axis=1)
        # Classes that are alike in every count are treated alike, so that no order of the classes matters.
        leads = further == least[:, None]
        cost = np.where((for_low <= self.available).all(axis=1), for_low.sum(axis=1) + least, np.inf)
        return np.where(leads, for_low + further, for_low), cost


def _needed(distance: Floats, bound: Floats, z: float) -> Floats:
    """Examples that bring Wilson's bound of a share, ``distance`` away from it, to ``bound``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = z**2 * bound * (1 - bound) / distance**2
    return np.where(distance > 0, np.ceil(exact * (1 - ROUNDING)), np.inf)


def first_round(available: ArrayLike, *, minimum: int = MINIMUM) -> Ints:
    """(K,) examples to begin with: ``minimum`` of every class, or all it has.

    >>> first_round([1000, 20, 0]).tolist()
    [50, 20, 0]
    """
    if minimum < 1:
        raise InputError(f"minimum must be at least 1, got {minimum}")
    return np.minimum(np.asarray(available, dtype=np.int64), minimum)


def next_round(
    survived: ArrayLike, done: ArrayLike, available: ArrayLike, half_width: float, *, minimum: int = MINIMUM
) -> Ints | None:
    """(K,) further examples to attack, or None where there is nothing left to do; ``summary`` then says why.

    ``available`` counts all examples of a class, ``done`` those attacked so far, ``survived`` those that held.

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
    if not available.any() or (contest := Contest.of(survived, done, available)).reached(half_width):
        return None
    missing = contest.targets(half_width) - contest.done
    most = np.minimum((GROWTH - 1) * contest.done, contest.available - contest.done)
    size = np.minimum(np.maximum(missing, np.ceil(LEAST * contest.done)), most)
    further = np.zeros_like(done)
    further[contest.labels] = np.where(missing > 0, size, 0)
    return further if further.any() else None


def summary(survived: ArrayLike, done: ArrayLike, available: ArrayLike, half_width: float) -> Allocation | None:
    """What is known of the worst class; None where no class has examples.

    After the last round, ``reached`` tells the two ends apart: the interval is as narrow as wanted, or the examples
    of the classes that decide it are used up and its half-width is what remains.

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
    contest = Contest.of(survived, done, available)
    leader = int(contest.high.argmin())
    return Allocation(
        label=int(contest.labels[leader]),
        value=float(contest.share[leader]),
        low=float(contest.low.min()),
        high=float(contest.high[leader]),
        contenders=tuple(contest.labels.tolist()),
        reached=contest.reached(half_width),
    )


def overall(
    survived: ArrayLike, done: ArrayLike, available: ArrayLike, *, level: float = 0.95
) -> tuple[float, float, float]:
    """The accuracy over all available examples, from classes attacked in unequal parts, and its interval.

    Each class counts by its size, not by how much of it was attacked: p = sum w_k p_k with w_k = N_k / sum N. Its
    variance is V = sum w_k² q_k (1 - q_k) / n_k with q_k = (s_k + 1) / (n_k + 2), which no class escapes by a share
    of 0 or 1. As many examples of one kind as have this variance, n = q (1 - q) / V with q = sum w_k q_k, give the
    interval: Wilson's for a share p of n. A single class, and classes alike in size and in counts, have exactly
    Wilson's interval of all their examples.

    Give it counts whose sizes no result has decided: those of ``first_round``, not those at the end of the rounds,
    whose average comes out too high. NaN without examples.

    >>> [round(part, 3) for part in overall([10, 40], [50, 50], [1000, 3000])]
    [0.65, 0.557, 0.733]
    """
    survived, done, available = _counts(survived, done, available)
    if ((done == 0) & (available > 0)).any():
        raise InputError("the overall accuracy needs an attacked example of every class that has any")
    present = np.flatnonzero(available)
    if not present.size:
        return np.nan, np.nan, np.nan
    survived, done, available = survived[present], done[present], available[present]
    # Divided last, so that shares of 1 make exactly 1.
    value = float(available @ (survived / done) / available.sum())
    weight = available / available.sum()
    guarded = (survived + 1) / (done + 2)
    centre = weight @ guarded
    n = centre * (1 - centre) / (weight**2 @ (guarded * (1 - guarded) / done))
    low, high = wilson(value * n, n, level)
    return value, float(low), float(high)


def _check_goal(half_width: float) -> None:
    if not 0 < half_width < 0.5:
        raise InputError(f"half_width is a share between 0 and 0.5 (0.02 for 2 points), got {half_width}")


def _counts(survived: ArrayLike, done: ArrayLike, available: ArrayLike) -> tuple[Ints, Ints, Ints]:
    """The three counts as arrays, after a look at whether they go together."""
    parts = [np.asarray(part, dtype=np.int64) for part in (survived, done, available)]
    if len({part.shape for part in parts}) > 1 or parts[0].ndim != 1:
        raise InputError(f"expected three counts for each class, got shapes {[part.shape for part in parts]}")
    ordered = (np.diff([np.zeros_like(parts[0]), *parts], axis=0) >= 0).all(axis=0)
    if not ordered.all():
        label = int(ordered.argmin())
        got = ", ".join(str(part[label]) for part in parts)
        raise InputError(f"class {label}: expected 0 <= survived <= done <= available, got {got}")
    return parts[0], parts[1], parts[2]
