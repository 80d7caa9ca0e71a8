"""A cascade that reproduces AutoAttack's result at a fraction of its cost: expensive attacks run only where needed.

1. ``margin``: ten untargeted steps on every example.
2. ``targets``: twelve steps towards each of the three nearest classes, on the survivors.
3. ``near-misses``: two restarts of a hundred steps towards the same classes, with a wider range of step sizes, on the
   survivors nearest to the decision boundary.
4. ``audit-*``: AutoAttack on a sample of the survivors: of each class some nearest to the boundary and some at random.
5. ``ensemble-*``, the fallback: AutoAttack on all survivors, if the audit or the trust checks suggest that gradients
   are unreliable for this model; see ``classwise.evaluation.parts``.

A call on one batch, ``Fast(eps=...)(model, x, y)``, cannot sample or audit: it runs the first three stages, the third
on all survivors.

Rationale: on robust CIFAR-10 models, gradient attacks find almost all adversarial examples that AutoAttack finds, while
FAB-T and Square take three quarters of its passes and find almost none. Where gradients are masked, the opposite holds;
the audit and the trust checks detect this.
"""

# B batch, K classes

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from classwise.attacks.autoattack import AutoAttack, in_turn
from classwise.attacks.base import BallAttack
from classwise.attacks.cosine_pgd import CosinePGD
from classwise.attacks.problem import Problem
from classwise.core.numbers import Count
from classwise.core.types import Selection

AUDIT, ENSEMBLE, NEAR = "audit-", "ensemble-", "near-misses"


@dataclass(frozen=True, kw_only=True)
class Fast(BallAttack):
    """A cascade that reproduces AutoAttack's result at a fraction of its cost, audited, with AutoAttack as fallback."""

    has_audit: ClassVar[bool] = True

    exhaustive: bool = False
    """Run AutoAttack on all survivors, whatever the audit finds."""
    steps: Count = 100
    """Steps of APGD and FAB, where they run."""
    queries: Count = 5000
    """Queries of Square Attack, where it runs."""

    def stages(self, num_classes: int) -> Mapping[str, BallAttack]:
        """Return the cascade, the audit and the fallback."""
        ensemble = AutoAttack(eps=self.eps, norm=self.norm, steps=self.steps, queries=self.queries).stages(num_classes)
        prefixes = (ENSEMBLE,) if self.exhaustive else (AUDIT, ENSEMBLE)
        rest = {f"{prefix}{name}": attack for prefix in prefixes for name, attack in ensemble.items()}
        return {**self.cascade(num_classes), **rest}

    def cascade(self, num_classes: int) -> dict[str, BallAttack]:
        """Return the attacks that always run."""
        ball: dict[str, Any] = {"eps": self.eps, "norm": self.norm}
        three: dict[str, Any] = {"target": "all", "num_targets": min(3, num_classes - 1)}
        return {
            "margin": CosinePGD(steps=10, **ball),
            "targets": CosinePGD(steps=12, **three, **ball),
            NEAR: CosinePGD(steps=100, restarts=2, first_step=2.0, last_step=0.005, **three, **ball),
        }

    def selects(self, stage: str) -> Selection:
        """Return which survivors a stage attacks: near misses, a sample for the audit, or all."""
        if stage.startswith(ENSEMBLE):
            return "survivors" if self.exhaustive else "doubtful"
        return "sample" if stage.startswith(AUDIT) else "nearest" if stage == NEAR else "survivors"

    def perturb(self, problem: Problem) -> Tensor:
        """Run the cascade on one batch. Examples that are misclassified naturally are not attacked."""
        return in_turn(self.cascade, problem)
