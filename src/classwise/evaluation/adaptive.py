"""Adaptive evaluation: attack in rounds until the worst class is known, see ``classwise.evaluation.allocation``."""

# K classes, N examples

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from classwise.evaluation.allocation import first_round, next_round, overall, summary
from classwise.metrics.comparison import Bools
from classwise.metrics.counts import Ints
from classwise.reporting.allocation import AllocationInfo
from classwise.reporting.estimates import Estimate, percent
from classwise.storage.verdicts import Verdicts


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

    def info(self, rows: Bools, rounds: int, verdicts: Verdicts) -> AllocationInfo:
        """Return the result after the last round."""
        done = np.bincount(self.label[rows], minlength=len(self.available))
        found = summary(self._survivors(rows, verdicts), done, self.available, self.half_width)
        assert found is not None
        return AllocationInfo(
            asked=round(100 * self.half_width, 4),
            reached=found.reached,
            rounds=rounds,
            label=found.label,
            value=percent(found.value),
            low=percent(found.low),
            high=percent(found.high),
            contenders=list(found.contenders),
            attacked=done.tolist(),
            available=self.available.tolist(),
        )

    def overall(self, verdicts: Verdicts, key: str) -> Estimate:
        """Return the accuracy over all examples, estimated from the first round, whose size is fixed."""
        done = first_round(self.available)
        correct = np.bincount(
            self.label[(self.rank < done[self.label]) & verdicts.survived(key)], minlength=len(self.available)
        )
        value, low, high = overall(correct, done, self.available)
        return Estimate(value=percent(value), low=percent(low), high=percent(high), n=int(done.sum()))

    def _survivors(self, rows: Bools, verdicts: Verdicts) -> Ints:
        return np.bincount(self.label[rows & verdicts.survived()], minlength=len(self.available))
