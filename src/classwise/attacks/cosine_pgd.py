"""PGD on the margin with steps that shrink like half a cosine: much of APGD's strength in a fifth of its passes.

Step i of S goes η_i = η_S + (η_1 - η_S) · (1 + cos(π (i - 1) / (S - 1))) / 2 along the sign of the gradient. The point
of the largest margin counts, whatever class it belongs to. The margin and few, well-chosen targets are those of MM3
(Gao et al. 2022); the targets are tried in the order of the distance to their boundary in the image's linear model,

    (z_y - z_k) / ‖∇z_y - ∇z_k‖ in the dual norm,

which finds the right one among the first three where the logits alone do not (MALT, Melamed et al. 2024).

Deviations
* MALT ranks by the Euclidean norm and takes the nine best classes of a hundred; here the norm is that of the threat.
* A broken example keeps the first point that broke it.
"""

# B batch, K classes

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from classwise.attacks.gradient import GradientAttack
from classwise.attacks.losses import Loss, make_loss, margin, targeted_margin
from classwise.attacks.problem import Problem
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.model_calls import State

CANDIDATES = 9
"""Classes, the likeliest first, whose boundaries are measured."""


@dataclass(frozen=True, kw_only=True)
class CosinePGD(GradientAttack):
    """Gradient ascent whose steps shrink from the whole radius to a fiftieth of it."""

    steps: int = 20
    loss: Literal["margin", "ce", "dlr"] = "margin"
    first_step: Number = 1.0
    last_step: Number = 0.02
    """Relative to eps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise InputError(f"steps must be at least 1, got {self.steps}")
        if not 0 < self.last_step <= self.first_step:
            raise InputError(
                f"steps must shrink towards a last one above 0, not from {self.first_step} to {self.last_step}"
            )

    def search(self, problem: Problem, aim: Tensor | None) -> Tensor:
        return self.highest(problem, make_loss(self.loss, problem, aim), margin(problem.y), stop=True)

    @final
    def highest(self, problem: Problem, loss: Loss, score: Loss, *, stop: bool) -> Tensor:
        """The visited point of the highest score on an ascent of the loss. ``stop``: the first with a positive one."""
        sizes = problem.ball.radius.new_tensor([self.step_size(step) for step in range(self.steps)])

        def ascend(x: Tensor, best: Tensor, highest: Tensor, number: Tensor) -> State:
            gradient, _, logits = problem.gradient(x, loss)
            best, highest = _higher(x, score(logits), best, highest, stop)
            return problem.ball.step(x, gradient, sizes.index_select(0, number)), best, highest, number + 1

        start = problem.ball.start("uniform", problem.noise)
        highest = torch.full_like(problem.ball.radius.flatten(), -torch.inf)
        number = torch.zeros(1, dtype=torch.int64, device=start.device)
        x, best, highest, _ = problem.repeat(ascend, (start, start, highest, number), self.steps)
        best, _ = _higher(x, score(problem.logits(x)), best, highest, stop)
        return best

    def step_size(self, step: int) -> float:
        """Of this step, counted from 0."""
        share = (1 + math.cos(math.pi * step / max(self.steps - 1, 1))) / 2
        return self.threat.eps * (self.last_step + (self.first_step - self.last_step) * share)

    def order(self, problem: Problem, clean: Tensor) -> Tensor:
        """The likeliest classes in the order of their boundaries' distances, then the others by their logits."""
        order = super().order(problem, clean)
        if self.target != "all" or (self.num_targets or order.shape[1]) == order.shape[1] == 1:
            return order
        some = order[:, : max(CANDIDATES, self.num_targets or 0)]

        def gaps(logits: Tensor) -> Tensor:
            return logits.gather(1, problem.y[:, None]) - logits.gather(1, some)

        gradients, gap, _ = problem.gradients(problem.ball.centre, gaps)
        flat = gradients.flatten(2)
        slope = flat.abs().sum(2) if problem.ball.norm == "Linf" else flat.norm(dim=2)
        distance = gap / slope.clamp_min(torch.finfo(slope.dtype).tiny)
        return torch.cat([some.gather(1, distance.argsort(dim=1, stable=True)), order[:, some.shape[1] :]], 1)


@dataclass(frozen=True, kw_only=True)
class MarginSearch(CosinePGD):
    """Minimize the margin z_y - z_t over given targets t. Keeps the smallest margin found, broken or not."""

    def search(self, problem: Problem, aim: Tensor | None) -> Tensor:
        assert aim is not None
        loss = targeted_margin(problem.y, aim)
        return self.highest(problem, loss, loss, stop=False)


def _higher(x: Tensor, scores: Tensor, best: Tensor, highest: Tensor, stop: bool) -> tuple[Tensor, Tensor]:
    """Keep the points of higher scores; with ``stop`` a point with a positive score is final."""
    better = (scores > highest) & (highest <= 0) if stop else scores > highest
    return torch.where(better.view(-1, *[1] * (x.dim() - 1)), x, best), torch.where(better, scores, highest)
