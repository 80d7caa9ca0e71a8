"""What the attacks of Carlini & Wagner (2017) share: Adam on the size of a perturbation and a penalty for failing.

Both minimise  size(δ) + c · f(x + δ)  where f, their f_6, is at its least once the model is fooled:

    f(x') = max(z_y - max over k ≠ y of z_k, -κ)    away from the label y
    f(x') = max(max over k ≠ t of z_k - z_t, -κ)    towards the target t

They are attacks without a radius, and ``closest`` runs them so. Called as an attack, an example is left alone as soon
as a point within its radius is found; where the nearest point found lies further out, it is projected into the ball.
There is no randomness in them.

Deviations
* The box is kept by clipping after every step, not by x' = (tanh w + 1) / 2. There a pixel at 0 or 1 has no gradient
  and needs hundreds of steps to come away from it: on digits, whose background is black, 200 clipped steps find the
  distances that 1000 steps on w find, and 200 on w remain a fifth above.
* Examples have their own c and stop on their own, where the authors' code stops a whole batch, so that the result of
  an example does not depend on its batch. An example stops early where a tenth of the steps lowered its objective by
  less than a ten-thousandth and found nothing nearer.
"""

# B batch, K classes

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from classwise.attacks.gradient import GradientAttack
from classwise.attacks.losses import Loss, margin
from classwise.attacks.problem import Problem
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.model_calls import frozen
from classwise.core.streams import Randomness

PAUSE = 10
"""Steps between two looks at which examples are done: each look makes the host wait for the device."""


@dataclass(frozen=True, slots=True)
class Nearest:
    """The nearest points found yet that fool the model, or the last points where there is none."""

    x: Tensor
    sizes: Tensor
    """(B,) their distances, infinite where nothing is found."""


@dataclass(frozen=True, kw_only=True)
class CarliniWagner(GradientAttack):
    """The smallest perturbation that fools, for a size that its subclass knows."""

    search_steps: int
    """Values of c that are tried."""
    steps: int
    """Of Adam, at most, for each c."""
    learning_rate: Number
    initial_c: Number
    confidence: Number = 0.0
    """κ: by how much the wrong class must lead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("search_steps", "steps"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "initial_c"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} must be positive, got {getattr(self, name)}")
        if self.confidence < 0:
            raise InputError(f"confidence must not be negative, got {self.confidence}")
        if self.restarts > 1:
            raise InputError(f"{type(self).__name__} has nothing random in it: a restart would only repeat it")

    def search(self, problem: Problem, aim: Tensor | None) -> Tensor:
        enough = problem.ball.radius.flatten()
        return problem.ball.project(self.minimise(replace(problem, targets=aim), enough).x)

    def closest(self, model: nn.Module, x: Tensor, y: Tensor, *, generator: Randomness = None) -> tuple[Tensor, Tensor]:
        """The nearest images found that fool the model and their distances (B,), whatever eps is.

        An image already misclassified is its own answer, at distance 0; where nothing is found, the image comes
        back with distance infinity, as do the images of a class that is itself the target.
        """
        whole = 1.0 if self.norms == ("Linf",) else math.sqrt(max(1, x[:1].numel()))
        everything = replace(self, eps=whole).pose(model, x, y, generator=generator)
        with torch.inference_mode(False), torch.enable_grad(), frozen(model):
            images = everything.ball.centre.clone()
            distances = images.new_full((len(images),), torch.inf)
            reachable = torch.arange(len(images), device=images.device)
            if isinstance(self.target, int):
                reachable = reachable[everything.y != self.target]
            problem = everything.take(reachable)
            for aim in self._aims(problem) if len(problem) else ():
                found = self.minimise(replace(problem, targets=aim), torch.zeros_like(distances[reachable]))
                nearer = found.sizes < distances[reachable]
                images[reachable[nearer]] = found.x[nearer]
                distances[reachable[nearer]] = found.sizes[nearer]
        return images.to(x.device), distances.to(x.device)

    @abstractmethod
    def minimise(self, problem: Problem, enough: Tensor) -> Nearest:
        """The search for c. An example whose distance is ``enough`` (B,) is searched no further."""

    @abstractmethod
    def size(self, delta: Tensor) -> Tensor:
        """(B,) the distance that counts."""

    @abstractmethod
    def cost(self, delta: Tensor, nearest: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
        """What stands for it in the objective (B,), and its gradient; the smallest size yet and what is enough (B,)."""

    def descend(self, problem: Problem, c: Tensor, x: Tensor, nearest: Nearest, enough: Tensor) -> Tensor:
        """Adam from ``x`` with a c (B,) for each example. Improves ``nearest``; returns who was fooled at all (B,)."""
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
            delta = x - problem.ball.centre
            size, smallest = self.size(delta), nearest.sizes[rows]
            nearer = fooled & (size < smallest)
            nearest.x[rows] = torch.where(_wide(nearer | smallest.isinf(), x), x, nearest.x[rows])
            smallest = torch.where(nearer, size, smallest)
            nearest.sizes[rows] = smallest

            cost, pull = self.cost(delta, smallest, enough)
            gradient = _wide(c, x) * gradient + pull
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
            if (step % tenth == 0 or step % PAUSE == 1) and not bool(stay.all()):
                if not bool(stay.any()):
                    break
                problem, rows, c, x, enough = problem.take(stay), rows[stay], c[stay], x[stay], enough[stay]
                mean, square, before = mean[stay], square[stay], before[stay]
        return fooled_once

    def _failing(self, problem: Problem) -> Loss:
        """f + κ, which is never negative."""
        lead = _lead(problem)
        return lambda logits: (self.confidence - lead(logits)).clamp_min(0)


def _lead(problem: Problem) -> Loss:
    """By how much the wanted class leads: any but the label, or the target."""
    if problem.targets is None:
        return margin(problem.y)
    behind = margin(problem.targets)
    return lambda logits: -behind(logits)


def _wide(values: Tensor, x: Tensor) -> Tensor:
    """One value an example, shaped to go with its pixels."""
    return values.view(-1, *[1] * (x.dim() - 1))
