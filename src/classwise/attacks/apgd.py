"""Auto-PGD (Croce & Hein, ICML 2020, Algorithm 1): projected gradient ascent that finds its step size by itself.

A step goes along the gradient and a little along the last step, with α = 0.75 (Eq. 1-2):

    z   = Π(x_k + η · steepest ascent)
    x_k+1 = Π(x_k + α (z - x_k) + (1 - α) (x_k - x_k-1))

The step size η starts at twice the radius. At the checkpoints w_j it is halved, and the walk goes back to the best
point so far, where (1) the loss rose in less than ρ of the steps since w_j-1, or (2) neither η nor the best loss
changed since then.

Deviations
* ``ce`` climbs the log odds instead of cross-entropy. They rise and fall together example by example, so directions,
  best points and condition 1 are those of cross-entropy, but the log odds never go flat on a confident model.
* A broken example keeps the first misclassified point; the authors' code keeps the last. It leaves the batch within
  some steps, so it costs no more passes. With a target too, any wrong class is a break, as in the authors' code.
* An example that is not broken comes back at the point of its highest loss; the authors' code gives back the image.
* Condition 1 is the paper's "less than ρ", counted from the loss at the start. The authors' code says "at most", and
  compares the first step with a loss of zero.
* With ``eot`` above one, losses and logits are averaged as the gradients are: the verdict on a random model is that of
  its mean logits, where the authors' code takes the last pass.
* The random start is the authors': uniform numbers scaled to the faces of the Linf ball, a uniform direction at the
  full L2 radius, both then cut to the box. The L2 projection is the ball's: to the radius, then to the box.
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
from classwise.attacks.problem import WORTH_LEAVING, Problem
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.model_calls import State, Step
from classwise.core.threat import Ball, unit

MOMENTUM = 0.75
"""α, the share of the gradient step; the rest goes to repeating the last one."""
LOOK = 5
"""Steps between two looks at how many examples are broken: the host waits for the device only then."""


@dataclass(frozen=True, kw_only=True)
class APGD(GradientAttack):
    """PGD with momentum and a step size that is halved where the loss stops rising."""

    resembles_cascade: ClassVar[bool] = True

    steps: int = 100
    loss: Literal["ce", "dlr", "margin"] = "ce"
    rho: Number = 0.75
    """The share of steps that must raise the loss for the step size to stay."""
    eot: int = 1
    """Passes to average every gradient over, for models that answer at random."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise InputError(f"steps must be at least 1, got {self.steps}")
        if not 0 < self.rho < 1:
            raise InputError(f"rho must lie between 0 and 1, got {self.rho}")
        if self.eot < 1:
            raise InputError(f"eot must be at least 1, got {self.eot}")

    def search(self, problem: Problem, aim: Tensor | None) -> Tensor:
        result = problem.ball.centre.clone()
        rows = torch.arange(len(problem), device=result.device)
        walk, climb = self._begin(problem, aim), self._climb(problem, aim)
        reviews = checkpoints(self.steps)
        stops = sorted({1, *reviews, *range(LOOK, self.steps, LOOK), self.steps})
        for done, stop in pairwise([1, *stops]):
            walk = _Walk(*problem.repeat(climb, walk.state, stop - done))
            if stop in reviews:
                walk.review(self.rho * reviews[stop])
            if stop % LOOK:
                continue
            broken = int(walk.broken.sum())
            if broken == len(rows):
                break
            if broken >= WORTH_LEAVING * len(rows):
                result[rows] = walk.best
                alive = ~walk.broken
                rows, problem, walk = rows[alive], problem.take(alive), walk.take(alive)
                aim = None if aim is None else aim[alive]
                climb = self._climb(problem, aim)
        result[rows] = walk.best
        return result

    def _begin(self, problem: Problem, aim: Tensor | None) -> _Walk:
        """At a random point, and one step from there, which has no momentum."""
        loss, x = make_loss(self.loss, problem, aim), random_start(problem)
        walk = _Walk.begin(x, *self._ask(problem, x, loss), problem)
        x = walk.propose(problem.ball, 1.0)
        walk.move(x, *self._ask(problem, x, loss), problem.y)
        return walk

    def _climb(self, problem: Problem, aim: Tensor | None) -> Step:
        """What a further step is."""
        loss = make_loss(self.loss, problem, aim)

        def climb(*state: Tensor) -> State:
            walk = _Walk(*state)
            x = walk.propose(problem.ball, MOMENTUM)
            walk.move(x, *self._ask(problem, x, loss), problem.y)
            return walk.state

        return climb

    def _ask(self, problem: Problem, x: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient, the losses and the logits, each averaged over the passes."""
        if self.eot == 1:
            return problem.gradient(x, loss)
        passes = [problem.gradient(x, loss) for _ in range(self.eot)]
        gradient, losses, logits = (torch.stack(parts).mean(0) for parts in zip(*passes, strict=True))
        return gradient, losses, logits


@dataclass(slots=True)
class _Walk:
    """Where every example is, where it was, and the best it has seen. All (B, …)."""

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
    """How often the loss rose since the last checkpoint."""
    halved: Tensor
    """Whether the last checkpoint halved the step size."""
    best_loss_before: Tensor
    """The best loss at the last checkpoint."""

    @classmethod
    def begin(cls, x: Tensor, gradient: Tensor, loss: Tensor, logits: Tensor, problem: Problem) -> _Walk:
        """At the starting point."""
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
        """Its parts, in their order."""
        return tuple(getattr(self, part.name) for part in fields(self))

    def take(self, rows: Tensor) -> _Walk:
        """The walks of some examples."""
        return _Walk(*(part[rows] for part in self.state))

    def propose(self, ball: Ball, momentum: float) -> Tensor:
        """The next points (Eq. 1-2)."""
        direction = self.gradient.sign() if ball.norm == "Linf" else unit(self.gradient)
        z = ball.project(torch.addcmul(self.x, self.step_size, direction))
        return ball.project(self.x + momentum * (z - self.x) + (1 - momentum) * (self.x - self.x_before))

    def move(self, x: Tensor, gradient: Tensor, loss: Tensor, logits: Tensor, y: Tensor) -> None:
        """Go there, and remember it where it is the best so far. What is broken keeps the point that broke it."""
        wrong = _misclassified(logits, y)
        better = ~self.broken & (wrong | (loss > self.best_loss))
        self.best = torch.where(_as_image(better), x, self.best)
        self.best_gradient = torch.where(_as_image(better), gradient, self.best_gradient)
        self.best_loss = torch.where(better, loss, self.best_loss)
        self.broken = self.broken | wrong
        self.rises = self.rises + (loss > self.loss)
        self.x_before, self.x, self.gradient, self.loss = self.x, x, gradient, loss

    def review(self, enough: float) -> None:
        """Halve the step size and go back to the best point where conditions 1 or 2 hold."""
        stuck = ~self.halved & (self.best_loss == self.best_loss_before)
        self.halved = (self.rises < enough) | stuck
        halved = _as_image(self.halved)
        self.step_size = torch.where(halved, self.step_size / 2, self.step_size)
        self.x = torch.where(halved, self.best, self.x)
        self.gradient = torch.where(halved, self.best_gradient, self.gradient)
        self.loss = torch.where(self.halved, self.best_loss, self.loss)
        self.rises = torch.zeros_like(self.rises)
        self.best_loss_before = self.best_loss


def random_start(problem: Problem) -> Tensor:
    """A random point on the surface of the ball, cut to the box."""
    ball = problem.ball
    if ball.norm == "L2":
        direction = unit(problem.noise.normal(ball.centre))
    else:
        draw = 2 * problem.noise.uniform(ball.centre) - 1
        direction = draw / _as_image(draw.flatten(1).abs().amax(1).clamp_min(torch.finfo(draw.dtype).tiny))
    return ball.project(ball.centre + ball.radius * direction)


def checkpoints(steps: int) -> dict[int, int]:
    """The steps w_j = ⌈p_j · steps⌉ at which η is reviewed, each with its distance from the one before (§3.1).

    p_1 = 0.22 and p_j+1 = p_j + max(p_j - p_j-1 - 0.03, 0.06), here in whole hundredths, which do not round.

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
    # The argmax of NaN is a class too, and an example gone astray must not pass for a broken one.
    return (logits.argmax(1) != y) & ~logits.isnan().any(1)


def _as_image(values: Tensor) -> Tensor:
    """(B,) shaped to go with images (B, C, H, W)."""
    return values.view(-1, 1, 1, 1)
