"""An evaluation in rounds: more examples for the classes that decide how weak the weakest is, until that is known."""

# K classes, N examples

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from classwise.core.errors import InputError
from classwise.evaluation.allocation import Allocation, first_round, next_round, overall, summary
from classwise.metrics.comparison import Bools
from classwise.metrics.counts import Ints
from classwise.reporting.allocation import AllocationInfo
from classwise.reporting.estimates import Estimate, percent
from classwise.storage.verdicts import Verdicts


class Rounds:
    """Which examples are open in each round, and what is known after the last."""

    def __init__(self, labels: Ints, num_classes: int, half_width: float, seed: int) -> None:
        """``half_width`` in percentage points. Within a class the order is drawn by the seed, whatever the data's."""
        if not 0 < half_width < 50:
            raise InputError(f"until_worst_ci is in percentage points, above 0 and below 50, got {half_width}")
        self.labels, self.half_width = labels, half_width / 100
        self.available = np.bincount(labels, minlength=num_classes)
        draws = np.random.default_rng(seed).permutation(len(labels))
        self.rank = np.empty(len(labels), dtype=np.int64)
        for label in range(num_classes):
            rows = np.flatnonzero(labels == label)
            self.rank[rows[np.argsort(draws[rows])]] = np.arange(len(rows))
        self.done = self.first = first_round(self.available)
        self.count = 1

    def run(self, decide: Callable[[Bools], Bools]) -> None:
        """Open examples until it is enough; ``decide`` reaches the verdicts of those and says which survived."""
        while True:
            self.survived = decide(self.open)
            more = next_round(self._counts(self.done), self.done, self.available, self.half_width)
            if more is None:
                return
            self.done = self.done + more
            self.count += 1

    @property
    def open(self) -> Bools:
        """(N,) bool: to be decided so far."""
        return np.asarray(self.rank < self.done[self.labels])

    def info(self) -> AllocationInfo:
        """What became of it."""
        found: Allocation | None = summary(self._counts(self.done), self.done, self.available, self.half_width)
        assert found is not None
        return AllocationInfo(
            asked=round(100 * self.half_width, 4),
            reached=found.reached,
            rounds=self.count,
            label=found.label,
            value=percent(found.value),
            low=percent(found.low),
            high=percent(found.high),
            contenders=list(found.contenders),
            attacked=self.done.tolist(),
            available=self.available.tolist(),
        )

    def overall(self, verdicts: Verdicts, key: str) -> Estimate:
        """The accuracy of all classes by their size, from the first round, whose size no verdict has decided."""
        first = self.rank < self.first[self.labels]
        correct = np.bincount(self.labels[first & verdicts.survived(key)], minlength=len(self.first))
        value, low, high = overall(correct, self.first, self.available)
        return Estimate(value=percent(value), low=percent(low), high=percent(high), n=int(self.first.sum()))

    def _counts(self, done: Ints) -> Ints:
        among = self.survived & (self.rank < done[self.labels])
        return np.asarray(np.bincount(self.labels[among], minlength=len(done)))
