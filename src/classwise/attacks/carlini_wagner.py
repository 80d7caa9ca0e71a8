"""The base of the attacks of Carlini & Wagner (2017): Adam on the size of the perturbation and a penalty.

Both minimize size(d) + c * f(x + d), where f, their f_6, is smallest once the model is fooled:

    f(x') = max(z_y - max_{k != y} z_k, -kappa)   untargeted, label y
    f(x') = max(max_{k != t} z_k - z_t, -kappa)   target t

The attacks have no radius, and ``closest`` runs them so. Called as an attack, an example is finished as soon as a point
within the radius is found; if the nearest point found lies further out, it is projected into the ball. The search is
deterministic.

Deviations
* The box is kept by clipping after every step, not by x' = (tanh w + 1) / 2, under which a pixel at 0 or 1 has no
  gradient and needs hundreds of steps to move. On digits, whose background is black, 200 clipped steps find the
  distances that 1000 steps on w find; 200 steps on w find distances a fifth larger.
* Each example has its own c and its own early stop, so that its result does not depend on its batch. The authors' code
  stops whole batches. An example stops early if a tenth of the steps lowered its objective by less than a
  ten-thousandth and found nothing nearer.
"""

# B batch, K classes

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from classwise.attacks.losses import Loss, margin
from classwise.attacks.minimum_norm import MinimumNormAttack
from classwise.attacks.problem import Problem, per_pixel
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.numbers import Count, Positive
from classwise.core.threat import size_in

CHECK_EVERY = 10
"""Steps between checks for finished examples, each of which makes the host wait for the device."""


@dataclass(frozen=True, slots=True)
class Nearest:
    """The nearest misclassified points so far, or the last iterates where there is none."""

    x: Tensor
    sizes: Tensor
    """(B,) their distances; infinite where nothing is found."""


@dataclass(frozen=True, kw_only=True)
class CarliniWagner(MinimumNormAttack):
    """The search of Carlini & Wagner (2017). Subclasses define the norm and the schedule of c."""

    search_steps: Count
    """Number of values of c to try."""
    steps: Count
    """Maximum number of Adam steps for each c."""
    learning_rate: Positive
    """Learning rate of Adam."""
    initial_c: Positive
    """First value of c."""
    confidence: Annotated[Number, Field(ge=0)] = 0.0
    """Margin kappa by which the wrong class must lead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restarts > 1:
            raise InputError(f"restarts must be 1, as {self.name} is deterministic, got {self.restarts}")

    def search(self, problem: Problem) -> Tensor:
        return problem.ball.project(self.minimize(problem, problem.ball.radius.flatten()).x)

    def smallest(self, problem: Problem) -> tuple[Tensor, Tensor]:
        images = problem.ball.center.clone()
        distances = images.new_full((len(images),), torch.inf)
        for targets in self.targets_in_turn(problem):
            found = self.minimize(replace(problem, targets=targets), torch.zeros_like(distances))
            nearer = found.sizes < distances
            images[nearer], distances[nearer] = found.x[nearer], found.sizes[nearer]
        return images, distances

    @abstractmethod
    def minimize(self, problem: Problem, enough: Tensor) -> Nearest:
        """Search over c. An example is finished once its distance is ``enough`` (B,)."""

    @abstractmethod
    def cost(self, delta: Tensor, nearest: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cost of perturbations (B,) in the objective and its gradient.

        Args:
            nearest: (B,) smallest norm found so far.
            enough: (B,) norm that needs no further reduction.
        """

    def descend(self, problem: Problem, c: Tensor, x: Tensor, nearest: Nearest, enough: Tensor) -> Tensor:
        """Run Adam from ``x`` with c (B,) and update ``nearest``; return which examples were ever misclassified."""
        fooled_once = torch.zeros_like(enough, dtype=torch.bool)
        rows = (nearest.sizes > enough).nonzero().squeeze(1)
        if not len(rows):
            return fooled_once
        problem, c, x, enough = problem.take(rows), c[rows], x[rows], enough[rows]
        mean, square = torch.zeros_like(x), torch.zeros_like(x)
        before = torch.full_like(enough, torch.inf)
        tenth = math.ceil(self.steps / 10)
        for step in range(1, self.steps + 1):
            gradient, failing, logits = problem.gradient(x, self._failing(problem))
            fooled = _lead(problem)(logits) > self.confidence
            fooled_once[rows] |= fooled
            delta = x - problem.ball.center
            size, smallest = size_in(problem.ball.norm, delta), nearest.sizes[rows]
            nearer = fooled & (size < smallest)
            nearest.x[rows] = torch.where(per_pixel(nearer | smallest.isinf(), x), x, nearest.x[rows])
            smallest = torch.where(nearer, size, smallest)
            nearest.sizes[rows] = smallest

            cost, pull = self.cost(delta, smallest, enough)
            gradient = per_pixel(c, x) * gradient + pull
            mean = torch.lerp(gradient, mean, 0.9)
            square = torch.lerp(gradient.square(), square, 0.999)
            speed = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
            x = (x - self.learning_rate * speed).clamp(0, 1)

            before = torch.where(nearer, torch.inf, before)
            stay = smallest > enough
            if step % tenth == 0:
                objective = c * failing + cost
                stay &= objective < 0.9999 * before
                before = objective
            if (step % tenth == 0 or step % CHECK_EVERY == 1) and not bool(stay.all()):
                if not bool(stay.any()):
                    break
                problem, rows, c, x, enough = problem.take(stay), rows[stay], c[stay], x[stay], enough[stay]
                mean, square, before = mean[stay], square[stay], before[stay]
        return fooled_once

    def _failing(self, problem: Problem) -> Loss:
        """The term f + kappa, which is never negative."""
        lead = _lead(problem)
        return lambda logits: (self.confidence - lead(logits)).clamp_min(0)


def _lead(problem: Problem) -> Loss:
    """The margin of the target class, or of the best wrong class if there are no targets."""
    if problem.targets is None:
        return margin(problem.y)
    behind = margin(problem.targets)
    return lambda logits: -behind(logits)
