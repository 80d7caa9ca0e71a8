"""Projected gradient descent (Madry et al. 2018): x' ← Π(x' + α · steepest ascent of the loss).

With ``loss=margin`` it is the attack that the WAT paper and much of the field call CW (``cw-pgd`` in the registry).

Deviations
* The step size defaults to 2.5 · eps / steps, so that the walk can cross the ball at any number of steps.
* Further restarts go only to examples the earlier ones did not break, and of what none breaks the nearest to it comes
  back. Each ends at its last iterate, as in the other libraries; an example broken on the way may therefore come back
  unbroken.
"""

# B batch, K classes

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from classwise.attacks.gradient import GradientAttack
from classwise.attacks.losses import Loss, LossName, make_loss
from classwise.attacks.problem import Problem
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.model_calls import State
from classwise.core.threat import Start


@dataclass(frozen=True, kw_only=True)
class PGD(GradientAttack):
    """Gradient ascent on a loss within the ball, from a random start."""

    steps: int = 20
    step_size: Number | None = None
    """In the units of eps; 2.5 · eps / steps if not given."""
    loss: LossName = "ce"
    start: Start = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise InputError(f"steps must be at least 1, got {self.steps}")
        if self.step_size is not None and self.step_size <= 0:
            raise InputError(f"step_size must be positive, got {self.step_size}")
        if self.loss == "kl" and self.start == "zero":
            raise InputError("loss 'kl' needs a random start: its gradient is zero at the clean image")

    def search(self, problem: Problem, aim: Tensor | None) -> Tensor:
        step_size = self.step_size if self.step_size is not None else 2.5 * self.threat.eps / self.steps
        loss = make_loss(self.loss, problem, aim)
        return climb(problem, loss, problem.ball.start(self.start, problem.noise), self.steps, step_size)


def climb(problem: Problem, loss: Loss, x: Tensor, steps: int, step_size: float) -> Tensor:
    """Steepest ascent from ``x``, projected after every step."""

    def ascend(x: Tensor) -> State:
        gradient, _, _ = problem.gradient(x, loss)
        return (problem.ball.step(x, gradient, step_size),)

    (x,) = problem.repeat(ascend, (x,), steps)
    return x
