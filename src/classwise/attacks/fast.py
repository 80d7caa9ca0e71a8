"""Made for the verdict of AutoAttack at a small part of its cost: the dear attacks only where there is reason to.

1. ``margin``: ten steps away from the label, on every example.
2. ``targets``: twelve steps towards each of the three nearest classes, on what is left.
3. ``near-misses``: the same again on the examples that came nearest to being broken, but twice a hundred steps, of
   which the first are longer and the last shorter.
4. ``audit-…``: all of AutoAttack on a sample of what is left: of every class some that came nearest and some at random.
5. ``ensemble-…``: all of AutoAttack on all that is left, if the audit or the probes for sanity say that gradients do
   not show what this model does: see ``classwise.evaluation.fast``.

An attack of one batch, called as ``Fast(eps=...)(model, x, y)``, has nobody to judge or to sample: it runs the first
three, the third on all that is left.

Why these: on robust CIFAR-10 models gradient attacks break what AutoAttack breaks, and of its passes through the model
FAB-T and Square take three quarters and break next to nothing. Where gradients are masked the opposite holds, so the
audit and the doubts decide.
"""

# B batch, K classes

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from classwise.attacks.autoattack import AutoAttack, in_turn
from classwise.attacks.base import BallAttack
from classwise.attacks.cosine_pgd import CosinePGD
from classwise.attacks.problem import Problem
from classwise.core.types import Whom

AUDIT, ENSEMBLE, NEAR = "audit-", "ensemble-", "near-misses"


@dataclass(frozen=True, kw_only=True)
class Fast(BallAttack):
    """A cascade as strong as AutoAttack, with an audit and a way back to AutoAttack itself."""

    exhaustive: bool = False
    """Run the whole ensemble on all that is left, whatever the audit says."""
    steps: int = 100
    """Of APGD and FAB, where they run."""
    queries: int = 5000
    """Of Square Attack, where it runs."""

    def stages(self, num_classes: int) -> Mapping[str, BallAttack]:
        """The cascade, the audit, and what follows on a doubt."""
        ensemble = AutoAttack(eps=self.eps, norm=self.norm, steps=self.steps, queries=self.queries).stages(num_classes)
        prefixes = (ENSEMBLE,) if self.exhaustive else (AUDIT, ENSEMBLE)
        rest = {f"{prefix}{name}": attack for prefix in prefixes for name, attack in ensemble.items()}
        return {**self.cascade(num_classes), **rest}

    def cascade(self, num_classes: int) -> dict[str, BallAttack]:
        """The attacks that run in any case."""
        ball: dict[str, Any] = {"eps": self.eps, "norm": self.norm}
        three: dict[str, Any] = {"target": "all", "num_targets": min(3, num_classes - 1)}
        return {
            "margin": CosinePGD(steps=10, **ball),
            "targets": CosinePGD(steps=12, **three, **ball),
            NEAR: CosinePGD(steps=100, restarts=2, first_step=2.0, last_step=0.005, **three, **ball),
        }

    def whom(self, stage: str) -> Whom:
        """Near misses for the third, a sample for the audit, and everybody in doubt for the ensemble."""
        if stage.startswith(ENSEMBLE):
            return "survivors" if self.exhaustive else "doubtful"
        return "sample" if stage.startswith(AUDIT) else "nearest" if stage == NEAR else "survivors"

    def perturb(self, problem: Problem) -> Tensor:
        """The cascade on one batch; an example the model gets wrong untouched stays as it is."""
        return in_turn(self.cascade, problem)
