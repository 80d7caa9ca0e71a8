"""The fast gradient sign method, FGSM (Goodfellow et al. 2015): one step of size eps.

With ``start=uniform`` and ``step_size`` = 1.25 * eps it is the attack of fast adversarial training (Wong et al. 2020).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from classwise.attacks.gradient import GradientAttack
from classwise.attacks.losses import make_loss
from classwise.attacks.pgd import ascend
from classwise.attacks.problem import Problem
from classwise.core.numbers import Positive
from classwise.core.threat import Start


@dataclass(frozen=True, kw_only=True)
class FGSM(GradientAttack):
    """The fast gradient sign method (Goodfellow et al. 2015): one step on the cross-entropy."""

    step_size: Positive | None = None
    """Step size in the units of eps. Default: eps."""
    start: Start = "zero"

    def search(self, problem: Problem) -> Tensor:
        step_size = self.step_size if self.step_size is not None else self.threat.eps
        start = problem.ball.start(self.start, problem.noise)
        return ascend(problem, make_loss("ce", problem), start, 1, step_size)
