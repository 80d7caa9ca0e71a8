"""Which examples a stage of an attack is for, and when there is reason to doubt the stages before it.

A cascade of cheap gradient attacks is as strong as AutoAttack until gradients are masked. So it never has the last word
by itself: the whole ensemble audits a sample of what it left, half of it the examples that came nearest to being broken
and half drawn at random, class by class. The ensemble runs on everything as soon as
* it breaks an example of the random half, so that the cascade leaves what it should not,
* FAB-T or Square breaks any that APGD has left, so that something else than an ascent of the margin is stronger, or
* the probes for sanity warn: of no gradient, a misleading one, random answers, an attack without gradients ahead of one
  with them, and so on.
That APGD breaks one of the nearest is no reason: another random start does that on any model.
"""

# N examples, K classes

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from scipy.special import betaincinv

from classwise.core.streams import ExampleNoise
from classwise.core.types import MeasuredAttack, Selection
from classwise.metrics.comparison import Bools
from classwise.metrics.counts import Ints
from classwise.reporting.effort import AuditInfo
from classwise.storage.files import digest
from classwise.storage.verdicts import Floats, Verdicts

NEAREST = 0.025
"""The share of what is left, by margin, that counts as near misses."""
NEAREST_OF_CLASS = 5
"""At least so many of each class, for the worst class may be a small one."""
AUDITED, MOST_AUDITED = 0.02, 100
"""The share of what is left that an audit looks at, and the most; but of each class one near and one at random."""

Warnings = Callable[[], list[str]]
"""Asks the probes for sanity, if it comes to that."""


class Cascade:
    """The decisions about one attack that has stages, made as its verdicts come in."""

    def __init__(
        self, stages: Mapping[str, MeasuredAttack], whoms: Mapping[str, Selection], verdicts: Verdicts, seed: int
    ) -> None:
        self.stages, self.whoms, self.verdicts, self.seed = stages, whoms, verdicts, seed
        self.first = [name for name, whom in whoms.items() if whom in ("survivors", "nearest")]
        self.audits = [name for name, whom in whoms.items() if whom == "sample"]

    def whom(self, name: str, before: Ints, warnings: Warnings) -> Bools:
        """Which examples a stage attacks, of those that the stages before left."""
        left = np.asarray(before == self.verdicts.label)
        match self.whoms[name]:
            case "survivors":
                return left
            case "nearest":
                return nearest(left, self.verdicts.label, self.margins())
            case "sample":
                near, at_random = self.sample
                return left & (near | at_random)
            case "doubtful":
                return left if self.doubts(warnings) else np.zeros_like(left)

    def margins(self) -> Floats:
        """How near to the boundary each example came under any stage that attacked it."""
        ran = [self.verdicts.margins[name] for name in self.whoms if name in self.verdicts.margins]
        return np.asarray(np.max([np.where(np.isnan(part), -np.inf, part) for part in ran], axis=0), dtype=np.float32)

    @cached_property
    def sample(self) -> tuple[Bools, Bools]:
        """What the audit looks at, of what the cascade left."""
        left, margins = self.verdicts.survived(self.first[-1]), self.margins()
        return sample(left, self.verdicts.label, margins, self.verdicts.index, self.seed)

    def doubts(self, warnings: Warnings) -> list[str]:
        """Why the stages so far may have missed something: stages of the audit, then codes of the probes' warnings."""
        broken = ~self.verdicts.survived(self.audits[-1]) & self.sample[1]
        found = [f"random sample: {int(broken.sum())} broken"] if broken.any() else []
        for before, name in pairwise([self.first[-1], *self.audits]):
            hits = int(self.verdicts.survived(before).sum() - self.verdicts.survived(name).sum())
            if hits and not self.stages[name].resembles_cascade:
                found.append(f"{name.rpartition('/')[2]}: {hits} broken")
        return found + warnings()

    def audit(self, warnings: Warnings) -> AuditInfo | None:
        """What the audit saw and what followed; None for an attack without one."""
        if not self.audits:
            return None
        near, at_random = self.sample
        broken = ~self.verdicts.survived(self.audits[-1])
        return AuditInfo(
            left=int(self.verdicts.survived(self.first[-1]).sum()),
            nearest=int(near.sum()),
            random=int(at_random.sum()),
            broke=int((broken & near).sum()),
            broke_random=int((broken & at_random).sum()),
            at_most=at_most(int((broken & at_random).sum()), int(at_random.sum())),
            doubts=self.doubts(warnings),
        )


def nearest(left: Bools, labels: Ints, margins: Floats) -> Bools:
    """Of what is left, the examples whose margins came nearest to the boundary, and some of every class."""
    chosen = np.zeros(len(left), dtype=bool)
    chosen[_highest(left, margins, round(NEAREST * int(left.sum())))] = True
    for label in np.unique(labels[left]):
        chosen[_highest(left & (labels == label), margins, NEAREST_OF_CLASS)] = True
    return chosen


def sample(left: Bools, labels: Ints, margins: Floats, index: Ints, seed: int) -> tuple[Bools, Bools]:
    """The examples of an audit: of each class those nearest to the boundary, and as many others at random."""
    near, at_random = np.zeros(len(left), dtype=bool), np.zeros(len(left), dtype=bool)
    present = np.unique(labels[left])
    wanted = min(round(AUDITED * int(left.sum())), MOST_AUDITED)
    each = max(wanted // (2 * max(len(present), 1)), 1)
    noise = ExampleNoise(int(digest("audit", str(seed))[:15], 16), torch.from_numpy(index))
    draws = noise.uniform(torch.empty(len(index), 1)).squeeze(1).numpy()
    for label in present:
        near[_highest(left & (labels == label), margins, each)] = True
        at_random[_highest(left & ~near & (labels == label), draws, each)] = True
    return near, at_random


def at_most(broken: int, n: int, level: float = 0.95) -> float | None:
    """The largest share that so few hits in n random draws allow (Clopper-Pearson, one-sided), in percent.

    >>> round(at_most(0, 50), 2)
    5.82
    """
    return None if n == 0 else 100.0 if broken == n else 100 * float(betaincinv(broken + 1, n - broken, level))


def _highest(among: Bools, values: np.ndarray, count: int) -> Ints:
    """The rows of the largest values, the first of equals first."""
    rows = np.flatnonzero(among)
    return rows[np.argsort(-values[rows], kind="stable")[:count]]
