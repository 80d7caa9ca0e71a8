"""Auto-PGD, APGD (Croce & Hein, ICML 2020): PGD with momentum and an adaptive step size.

    z = P(x_k + eta * sign of the gradient),   x_{k+1} = P(x_k + a * (z - x_k) + (1 - a) * (x_k - x_{k-1}))

with P the projection and a = 0.75. The step size eta starts at twice the radius. At the checkpoints w_j it is halved,
and the search returns to its best point, where (1) the loss rose in less than rho of the steps since w_{j-1}, or
(2) neither eta nor the best loss changed since then.

Deviations
* ``ce`` maximizes the log odds instead of the cross-entropy. Each is an increasing function of the other, so
  directions, best points and condition 1 are the same, but the log odds do not saturate on a confident model.
* A broken example keeps its first misclassified point; in the authors' code, the last. Targeted or not, any wrong class
  counts as a break, as in the authors' code.
* For an example that is not broken, the point of the highest loss is returned; in the authors' code, the image.
* Condition 1 is the paper's "less than rho", counted from the loss at the start. The authors' code uses "at most" and
  compares the first step with a loss of zero.
* With ``eot`` above one, losses and logits are averaged as the gradients are: the prediction of a randomized model is
  that of its mean logits. The authors' code takes the last pass.
* The random start is the authors': uniform numbers scaled to the faces of the Linf ball, or a uniform direction at the
  full L2 radius, clipped to the box. The L2 projection scales to the radius, then clips to the box.
"""

# B batch, K classes

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from classwise.attacks.gradient import GradientAttack
from classwise.attacks.losses import Loss, make_loss
from classwise.attacks.problem import WORTH_LEAVING, Problem, per_pixel
from classwise.core.model_calls import State, Step
from classwise.core.numbers import Count, Share
from classwise.core.threat import Ball, unit

MOMENTUM = 0.75
"""Weight a of the gradient step; the rest repeats the previous step."""
CHECK_EVERY = 5
"""Steps between checks for broken examples, each of which makes the host wait for the device."""


@dataclass(frozen=True, kw_only=True)
class APGD(GradientAttack):
    """Auto-PGD (Croce & Hein 2020): PGD with momentum that halves its step size where progress stalls."""

    resembles_cascade: ClassVar[bool] = True

    steps: Count = 100
    loss: Literal["ce", "dlr", "margin"] = "ce"
    rho: Share = 0.75
    """Share of steps that must raise the loss for the step size to stay."""
    eot: Count = 1
    """Passes over which each gradient is averaged (expectation over transformation), for randomized models."""

    def search(self, problem: Problem) -> Tensor:
        result = problem.ball.center.clone()
        rows = torch.arange(len(problem), device=result.device)
        walk, step = self._begin(problem), self._step(problem)
        reviews = checkpoints(self.steps)
        stops = sorted({1, *reviews, *range(CHECK_EVERY, self.steps, CHECK_EVERY), self.steps})
        for done, stop in pairwise([1, *stops]):
            walk = _Walk(*problem.repeat(step, walk.state, stop - done))
            if stop in reviews:
                walk.review(self.rho * reviews[stop])
            if stop % CHECK_EVERY:
                continue
            broken = int(walk.broken.sum())
            if broken == len(rows):
                break
            if broken >= WORTH_LEAVING * len(rows):
                result[rows] = walk.best
                alive = ~walk.broken
                rows, problem, walk = rows[alive], problem.take(alive), walk.take(alive)
                step = self._step(problem)
        result[rows] = walk.best
        return result

    def _begin(self, problem: Problem) -> _Walk:
        """Start at a random point and take the first step, which has no momentum."""
        loss, x = make_loss(self.loss, problem), random_start(problem)
        walk = _Walk.begin(x, *self._gradient(problem, x, loss), problem)
        x = walk.propose(problem.ball, 1.0)
        walk.move(x, *self._gradient(problem, x, loss), problem.y)
        return walk

    def _step(self, problem: Problem) -> Step:
        """Return the function that takes a further step."""
        loss = make_loss(self.loss, problem)

        def step(*state: Tensor) -> State:
            walk = _Walk(*state)
            x = walk.propose(problem.ball, MOMENTUM)
            walk.move(x, *self._gradient(problem, x, loss), problem.y)
            return walk.state

        return step

    def _gradient(self, problem: Problem, x: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient, the losses and the logits, each averaged over the passes."""
        if self.eot == 1:
            return problem.gradient(x, loss)
        passes = [problem.gradient(x, loss) for _ in range(self.eot)]
        gradient, losses, logits = (torch.stack(parts).mean(0) for parts in zip(*passes, strict=True))
        return gradient, losses, logits


@dataclass(slots=True)
class _Walk:
    """The state of the search for every example. All tensors are (B, ...)."""

    x: Tensor
    x_before: Tensor
    gradient: Tensor
    loss: Tensor
    best: Tensor
    """The first misclassified point, else the point of the highest loss."""
    best_gradient: Tensor
    best_loss: Tensor
    broken: Tensor
    step_size: Tensor
    rises: Tensor
    """Number of steps since the last checkpoint that raised the loss."""
    halved: Tensor
    """Whether the last checkpoint halved the step size."""
    best_loss_before: Tensor
    """The best loss at the last checkpoint."""

    @classmethod
    def begin(cls, x: Tensor, gradient: Tensor, loss: Tensor, logits: Tensor, problem: Problem) -> _Walk:
        """Return the state at the starting point."""
        return cls(
            x=x,
            x_before=x,
            gradient=gradient,
            loss=loss,
            best=x,
            best_gradient=gradient,
            best_loss=loss,
            broken=_misclassified(logits, problem.y),
            step_size=2 * problem.ball.radius,
            rises=torch.zeros_like(problem.y),
            halved=torch.zeros_like(problem.y, dtype=torch.bool),
            best_loss_before=loss,
        )

    @property
    def state(self) -> State:
        """State of the search as a tuple of tensors, in field order."""
        return tuple(getattr(self, part.name) for part in fields(self))

    def take(self, rows: Tensor) -> _Walk:
        """Return the state of some examples."""
        return _Walk(*(part[rows] for part in self.state))

    def propose(self, ball: Ball, momentum: float) -> Tensor:
        """Return the next points (Eq. 1-2)."""
        direction = self.gradient.sign() if ball.norm == "Linf" else unit(self.gradient)
        z = ball.project(torch.addcmul(self.x, self.step_size, direction))
        return ball.project(self.x + momentum * (z - self.x) + (1 - momentum) * (self.x - self.x_before))

    def move(self, x: Tensor, gradient: Tensor, loss: Tensor, logits: Tensor, y: Tensor) -> None:
        """Move to new points and keep those that are the best so far. A misclassified example keeps its first one."""
        wrong = _misclassified(logits, y)
        better = ~self.broken & (wrong | (loss > self.best_loss))
        self.best = torch.where(per_pixel(better, x), x, self.best)
        self.best_gradient = torch.where(per_pixel(better, x), gradient, self.best_gradient)
        self.best_loss = torch.where(better, loss, self.best_loss)
        self.broken = self.broken | wrong
        self.rises = self.rises + (loss > self.loss)
        self.x_before, self.x, self.gradient, self.loss = self.x, x, gradient, loss

    def review(self, enough: float) -> None:
        """Where conditions 1 or 2 hold, halve the step size and return to the best point."""
        stuck = ~self.halved & (self.best_loss == self.best_loss_before)
        self.halved = (self.rises < enough) | stuck
        halved = per_pixel(self.halved, self.x)
        self.step_size = torch.where(halved, self.step_size / 2, self.step_size)
        self.x = torch.where(halved, self.best, self.x)
        self.gradient = torch.where(halved, self.best_gradient, self.gradient)
        self.loss = torch.where(self.halved, self.best_loss, self.loss)
        self.rises = torch.zeros_like(self.rises)
        self.best_loss_before = self.best_loss


def random_start(problem: Problem) -> Tensor:
    """Return a random point on the surface of the ball, clipped to the box."""
    ball = problem.ball
    return ball.project(ball.center + ball.radius * ball.direction(problem.noise))


def checkpoints(steps: int) -> dict[int, int]:
    """Return the checkpoints w_j = ceil(p_j * steps), each with its distance from the one before (Section 3.1).

    p_1 = 0.22 and p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06), computed in whole percent to avoid rounding.

    >>> checkpoints(100)
    {22: 22, 41: 19, 57: 16, 70: 13, 80: 10, 87: 7, 93: 6, 99: 6}
    """
    found, last = {}, 0
    percent = width = 22
    while percent <= 100:
        step = -(-percent * steps // 100)
        if step > last:
            found[step] = step - last
            last = step
        width = max(width - 3, 6)
        percent += width
    return found


def _misclassified(logits: Tensor, y: Tensor) -> Tensor:
    # NaN has an argmax too, but logits that are not finite must not count as a misclassification.
    return (logits.argmax(1) != y) & ~logits.isnan().any(1)
