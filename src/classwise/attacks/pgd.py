"""Projected gradient descent (Madry et al. 2018): x' ← Π(x' + α · steepest ascent of the loss).

Deviations
* The step size defaults to 2.5 · eps / steps, so that the walk can cross the ball at any number of steps.
* Further restarts go only to examples the earlier ones did not break, and the last iterate is returned, as the
  other libraries do; an example broken on the way may therefore come back unbroken.
"""

# B batch, K classes

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from classwise.attacks.base import BallAttack, Forward
from classwise.attacks.losses import Loss, LossName, make_loss
from classwise.errors import InputError
from classwise.noise import Noise
from classwise.spec import Number
from classwise.threat import Ball, Start


@dataclass(frozen=True, kw_only=True)
class PGD(BallAttack):
    """Gradient ascent on a loss within the ball, from a random start."""

    steps: int = 20
    step_size: Number | None = None
    """In the units of eps; 2.5 · eps / steps if not given."""
    loss: LossName = "ce"
    start: Start = "uniform"
    restarts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise InputError(f"steps must be at least 1, got {self.steps}")
        if self.restarts < 1:
            raise InputError(f"restarts must be at least 1, got {self.restarts}")
        if self.step_size is not None and self.step_size <= 0:
            raise InputError(f"step_size must be positive, got {self.step_size}")
        if self.loss == "kl" and self.start == "zero":
            raise InputError("loss 'kl' needs a random start: its gradient is zero at the clean image")

    def perturb(self, forward: Forward, ball: Ball, y: Tensor, noise: Noise) -> Tensor:
        step_size = self.step_size if self.step_size is not None else 2.5 * self.threat.eps / self.steps
        result = ball.centre.clone()
        rows = torch.arange(len(y), device=y.device)
        for restart in range(self.restarts):
            loss = make_loss(self.loss, forward, ball.centre, y)
            x = climb(forward, loss, ball, ball.start(self.start, noise), self.steps, step_size)
            result[rows] = x
            if restart + 1 == self.restarts:
                break
            with torch.no_grad():
                survived = forward(x).argmax(1) == y
            rows, y, ball, noise = rows[survived], y[survived], ball.take(survived), noise.take(survived)
            if not len(rows):
                break
        return result


def climb(forward: Forward, loss: Loss, ball: Ball, x: Tensor, steps: int, step_size: float) -> Tensor:
    """Steepest ascent from ``x``, projected after every step."""
    for _ in range(steps):
        x = x.detach().requires_grad_()
        # The sum, not the mean: gradients of single examples must not shrink with the batch.
        (gradient,) = torch.autograd.grad(loss(forward(x)).sum(), x)
        x = ball.step(x.detach(), gradient, step_size)
    return x
