"""The parts of an attack: the examples that each stage is run on, and whether the fallback of ``fast`` is needed.

Unless gradients are masked, a cascade of cheap gradient attacks is as strong as AutoAttack. The cascade is therefore
always audited: AutoAttack is run on a sample of the examples that survive it, in each class half of them the nearest to
the decision boundary and half drawn at random. The fallback, AutoAttack on all survivors, is triggered if

* it breaks an example of the random half,
* FAB-T or Square breaks an example of the sample that APGD did not, or
* a trust check warns, for example of a gradient that is zero or misleading.

It is not triggered if APGD breaks one of the nearest examples, because another random start does so on any model.
"""

# N examples, K classes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from scipy.special import betaincinv

from classwise.core.streams import ExampleNoise
from classwise.core.types import Attack, Selection
from classwise.metrics.comparison import Bools
from classwise.metrics.counts import Ints
from classwise.reporting.effort import AuditInfo
from classwise.storage.files import digest
from classwise.storage.verdicts import NATURAL, Floats, Verdicts

NEAREST = 0.025
"""Fraction of the survivors that count as near misses."""
NEAREST_OF_CLASS = 5
"""Minimum number of near misses of each class, because the worst class may be small."""
AUDITED, MAX_AUDITED = 0.02, 100
"""Fraction of the survivors that are audited, and the maximum number. Each class has at least one of each half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackParts:
    """An attack and its parts, by the names of their columns."""

    key: str
    spec: str
    attack: Attack
    variants: Mapping[str, Attack]
    """Attacks of a grid, of which the strongest counts; empty for a single attack."""
    stages: Mapping[str, Attack]
    """Attacks of an ensemble, in order; empty for a single attack."""
    selects: Mapping[str, Selection]
    """The survivors that each stage attacks."""

    @classmethod
    def of(cls, key: str, spec: str, attack: Attack, num_classes: int) -> AttackParts:
        """Split an attack into its parts."""
        name, stages = key.partition(":")[0], attack.stages(num_classes)
        return cls(
            key=key,
            spec=spec,
            attack=attack,
            variants={f"{name}:{variant}": one for variant, one in attack.variants().items()},
            stages={f"{key}/{stage}": one for stage, one in stages.items()},
            selects={f"{key}/{stage}": attack.selects(stage) for stage in stages},
        )

    @property
    def units(self) -> Mapping[str, Attack]:
        """The attacks to run: the variants, the stages, or the attack itself."""
        return self.variants or self.stages or {self.key: self.attack}

    @property
    def audits(self) -> list[str]:
        """The stages that audit the others."""
        return [name for name, selects in self.selects.items() if selects == "sample"]

    def strongest(self, verdicts: Verdicts) -> str:
        """Return the variant with the fewest survivors; of tied ones the first."""
        return min(self.variants, key=lambda name: int(verdicts.survived(name).sum()))

    def select(self, name: str, verdicts: Verdicts, seed: int, warnings: Sequence[str]) -> Bools:
        """Return which examples a stage is run on (N,). ``warnings`` are the codes of the trust checks' warnings."""
        names = list(self.selects)
        earlier = names[: names.index(name)]
        survived = verdicts.survived(earlier[-1] if earlier else NATURAL)
        match self.selects[name]:
            case "survivors":
                return survived
            case "nearest":
                return nearest(survived, verdicts.label, _largest_margins(verdicts, earlier))
            case "sample":
                near, at_random = self.sample(verdicts, seed)
                return survived & (near | at_random)
            case "doubtful":
                return survived if self.reasons(verdicts, seed, warnings) else np.zeros_like(survived)

    def sample(self, verdicts: Verdicts, seed: int) -> tuple[Bools, Bools]:
        """Return two masks (N,): the audit examples nearest to the decision boundary, and those drawn at random."""
        survived, margins = verdicts.survived(self._audited[-1]), _largest_margins(verdicts, self._audited)
        return draw_sample(survived, verdicts.label, margins, verdicts.index, seed)

    def reasons(self, verdicts: Verdicts, seed: int, warnings: Sequence[str]) -> list[str]:
        """Return the reasons for the fallback: audit results, then ``warnings``. Empty if it is not needed."""
        _, at_random = self.sample(verdicts, seed)
        broken = ~verdicts.survived(self.audits[-1]) & at_random
        found = [f"random sample: {int(broken.sum())} broken"] if broken.any() else []
        for before, name in pairwise([self._audited[-1], *self.audits]):
            hits = int(verdicts.survived(before).sum() - verdicts.survived(name).sum())
            if hits and not self.stages[name].resembles_cascade:
                found.append(f"{name.rpartition('/')[2]}: {hits} broken")
        return [*found, *warnings]

    def audit(self, verdicts: Verdicts, seed: int, warnings: Sequence[str]) -> AuditInfo | None:
        """Return what the audit found; None for an attack without one."""
        if not self.audits:
            return None
        near, at_random = self.sample(verdicts, seed)
        broken = ~verdicts.survived(self.audits[-1])
        return AuditInfo(
            left=int(verdicts.survived(self._audited[-1]).sum()),
            nearest=int(near.sum()),
            random=int(at_random.sum()),
            broke=int((broken & near).sum()),
            broke_random=int((broken & at_random).sum()),
            at_most=at_most(int((broken & at_random).sum()), int(at_random.sum())),
            doubts=self.reasons(verdicts, seed, warnings),
        )

    @property
    def _audited(self) -> list[str]:
        """The stages that the audit checks."""
        return [name for name, selects in self.selects.items() if selects in ("survivors", "nearest")]


def _largest_margins(verdicts: Verdicts, names: Sequence[str]) -> Floats:
    """Return the largest margin (N,) that any of these stages reached; -inf where none was run."""
    reached = [verdicts.margins[name] for name in names]
    return np.asarray(np.max([np.where(np.isnan(one), -np.inf, one) for one in reached], axis=0), dtype=np.float32)


def nearest(survived: Bools, labels: Ints, margins: Floats) -> Bools:
    """Return the survivors nearest to the decision boundary (N,), at least some of every class."""
    chosen = np.zeros(len(survived), dtype=bool)
    chosen[_highest(survived, margins, round(NEAREST * int(survived.sum())))] = True
    for label in np.unique(labels[survived]):
        chosen[_highest(survived & (labels == label), margins, NEAREST_OF_CLASS)] = True
    return chosen


def draw_sample(survived: Bools, labels: Ints, margins: Floats, index: Ints, seed: int) -> tuple[Bools, Bools]:
    """Return the survivors to audit: of each class those nearest to the boundary, and as many others at random."""
    near, at_random = np.zeros(len(survived), dtype=bool), np.zeros(len(survived), dtype=bool)
    present = np.unique(labels[survived])
    wanted = min(round(AUDITED * int(survived.sum())), MAX_AUDITED)
    each = max(wanted // (2 * max(len(present), 1)), 1)
    noise = ExampleNoise(int(digest("audit", str(seed))[:15], 16), torch.from_numpy(index))
    draws = noise.uniform(torch.empty(len(index), 1)).squeeze(1).numpy()
    for label in present:
        near[_highest(survived & (labels == label), margins, each)] = True
        at_random[_highest(survived & ~near & (labels == label), draws, each)] = True
    return near, at_random


def at_most(broken: int, n: int, level: float = 0.95) -> float | None:
    """Return the one-sided Clopper-Pearson upper bound, in percent, for ``broken`` of ``n`` random draws.

    >>> round(at_most(0, 50), 2)
    5.82
    """
    return None if n == 0 else 100.0 if broken == n else 100 * float(betaincinv(broken + 1, n - broken, level))


def _highest(among: Bools, values: np.ndarray, count: int) -> Ints:
    """Return the rows of the highest values; ties are in row order."""
    rows = np.flatnonzero(among)
    return rows[np.argsort(-values[rows], kind="stable")[:count]]
