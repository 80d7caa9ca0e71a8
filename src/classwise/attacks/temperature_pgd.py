"""Temperature-PGD (Tian et al., KDD 2021, Eq. 3-4): PGD on CE(softmax(z / T), y).

A temperature T below 1, applied in the loss of the attack only, sharpens the output of models with smooth
probabilities, on which plain cross-entropy has small gradients. The model itself is unchanged.

The paper tries a grid of temperatures and reports the best. ``inv_t=2+5+10+50`` runs each value; an evaluation reports
all of them and the strongest for the whole data set. A call on one batch returns the strongest for that batch.
"""

# B batch, K classes

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import BeforeValidator, Field
from torch import Tensor

from classwise.attacks.base import BallAttack
from classwise.attacks.gradient import GradientAttack
from classwise.attacks.losses import make_loss
from classwise.attacks.pgd import ascend, default_step
from classwise.attacks.problem import Problem
from classwise.config.spec import split_list
from classwise.core.errors import InputError
from classwise.core.numbers import Count, Positive
from classwise.core.threat import Start

Temperatures = Annotated[tuple[Annotated[Positive, Field(le=1e6)], ...], BeforeValidator(split_list)]
"""One or several values of 1/T, joined by ``+`` in a spec."""


@dataclass(frozen=True, kw_only=True)
class TemperaturePGD(GradientAttack):
    """PGD on logits multiplied by 1/T, a temperature or a grid of them (Tian et al. 2021)."""

    inv_t: Temperatures = (5.0,)
    """1/T, one or several values; the paper tries 2, 5, 10 and 50."""
    steps: Count = 20
    step_size: Positive | None = None
    """Step size in the units of eps. Default: 2.5 * eps / steps."""
    start: Start = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.inv_t or len(set(self.inv_t)) < len(self.inv_t):
            raise InputError(f"inv_t must be one or more distinct numbers, got {self.inv_t}")

    def variants(self) -> Mapping[str, BallAttack]:
        if len(self.inv_t) == 1:
            return {}
        return {f"inv_t={inv_t:g}": replace(self, inv_t=(inv_t,)) for inv_t in self.inv_t}

    def search(self, problem: Problem) -> Tensor:
        found = [self._ascend(problem, inv_t) for inv_t in self.inv_t]
        if len(found) == 1:
            return found[0]
        survivors = [int(problem.survives(x).sum()) for x in found]
        return found[survivors.index(min(survivors))]

    def _ascend(self, problem: Problem, inv_t: float) -> Tensor:
        step_size = default_step(self.step_size, self.threat.eps, self.steps)
        loss = make_loss("ce", problem)
        start = problem.ball.start(self.start, problem.noise)
        return ascend(problem, lambda logits: loss(inv_t * logits), start, self.steps, step_size)
