"""Projected gradient descent, PGD (Madry et al. 2018).

    x' <- P(x' + a * d(x')),   d the direction of steepest ascent of the loss in the norm, P the projection to the ball

The search starts at a random point of the ball. With ``loss=margin`` it is the attack that the WAT paper and many
others call CW (``cw-pgd``).

Deviations
* The step size a defaults to 2.5 * eps / steps, so that any number of steps can cross the ball.
* Restarts attack only the examples that survived the previous attempts. For an example that survives all of them, the
  image of the highest margin is returned.
* An attempt ends at its last iterate, as in other libraries, so an example that is misclassified on the way may be
  classified correctly in the end.
"""

# B batch, K classes

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from classwise.attacks.gradient import GradientAttack
from classwise.attacks.losses import Loss, LossName, make_loss
from classwise.attacks.problem import Problem
from classwise.core.errors import InputError
from classwise.core.model_calls import State
from classwise.core.numbers import Count, Positive
from classwise.core.threat import Start


@dataclass(frozen=True, kw_only=True)
class PGD(GradientAttack):
    """Projected gradient descent (Madry et al. 2018)."""

    steps: Count = 20
    step_size: Positive | None = None
    """Step size in the units of eps. Default: 2.5 * eps / steps."""
    loss: LossName = "ce"
    start: Start = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss == "kl" and self.start == "zero":
            raise InputError("loss 'kl' needs start=uniform or gaussian: its gradient is zero at the natural image")

    @property
    def supports_targets(self) -> bool:
        return self.loss != "kl"

    @property
    def step_length(self) -> float:
        """Step size in use."""
        return default_step(self.step_size, self.threat.eps, self.steps)

    def search(self, problem: Problem) -> Tensor:
        return self.ascend(problem, make_loss(self.loss, problem))

    def ascend(self, problem: Problem, loss: Loss) -> Tensor:
        """Return the last iterate of projected steepest ascent of a loss."""
        return ascend(problem, loss, problem.ball.start(self.start, problem.noise), self.steps, self.step_length)


def default_step(step_size: float | None, eps: float, steps: int) -> float:
    """Return the step size of PGD: as given, else 2.5 * eps / steps."""
    return 2.5 * eps / steps if step_size is None else step_size


def ascend(problem: Problem, loss: Loss, x: Tensor, steps: int, step_size: float) -> Tensor:
    """Return the last iterate of steepest ascent of a loss from ``x``, projected after every step."""

    def step(x: Tensor) -> State:
        gradient, _, _ = problem.gradient(x, loss)
        return (problem.ball.step(x, gradient, step_size),)

    (x,) = problem.repeat(step, (x,), steps)
    return x
