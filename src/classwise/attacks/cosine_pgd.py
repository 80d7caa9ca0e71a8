"""PGD on the margin with a cosine schedule of step sizes, comparable to APGD at a fifth of its passes.

Step i of S has the size

    eta_i = eta_S + (eta_1 - eta_S) * (1 + cos(pi * (i - 1) / (S - 1))) / 2

along the sign of the gradient (Linf) or the gradient (L2). The visited point of the highest margin is returned. The
margin loss and few, well-chosen targets follow MM3 (Gao et al. 2022). Targets are tried by the distance to their
decision boundary in a linear model of the image,

    (z_y - z_k) / ||grad z_y - grad z_k|| in the dual norm,

which ranks the best target among the first three where the logits alone do not (MALT, Melamed et al. 2024).

Deviations
* MALT ranks by the Euclidean norm and takes the nine best of a hundred classes; here the norm is that of the threat.
* An example that is misclassified keeps the first such point.
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
from classwise.attacks.problem import Problem, per_pixel
from classwise.core.errors import InputError
from classwise.core.model_calls import State
from classwise.core.numbers import Count, Positive

CANDIDATES = 9
"""Number of most likely classes whose boundary distances are computed."""


@dataclass(frozen=True, kw_only=True)
class CosinePGD(GradientAttack):
    """PGD on the margin with step sizes that fall along a cosine, nearest target classes first."""

    steps: Count = 20
    loss: Literal["margin", "ce", "dlr"] = "margin"
    first_step: Positive = 1.0
    """First step size, relative to eps."""
    last_step: Positive = 0.02
    """Last step size, relative to eps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.last_step > self.first_step:
            raise InputError(f"last_step = {self.last_step} must not exceed first_step = {self.first_step}")

    def search(self, problem: Problem) -> Tensor:
        return self.highest(problem, make_loss(self.loss, problem), margin(problem.y), stop=True)

    @final
    def highest(self, problem: Problem, loss: Loss, score: Loss, *, stop: bool) -> Tensor:
        """Ascend a loss and return the visited point of the highest score; ``stop``: the first with a positive one."""
        sizes = problem.ball.radius.new_tensor([self.size_of(step) for step in range(self.steps)])

        def step(x: Tensor, best: Tensor, highest: Tensor, number: Tensor) -> State:
            gradient, _, logits = problem.gradient(x, loss)
            best, highest = _higher(x, score(logits), best, highest, stop)
            return problem.ball.step(x, gradient, sizes.index_select(0, number)), best, highest, number + 1

        start = problem.ball.start("uniform", problem.noise)
        highest = torch.full_like(problem.ball.radius.flatten(), -torch.inf)
        number = torch.zeros(1, dtype=torch.int64, device=start.device)
        x, best, highest, _ = problem.repeat(step, (start, start, highest, number), self.steps)
        best, _ = _higher(x, score(problem.logits(x)), best, highest, stop)
        return best

    def size_of(self, step: int) -> float:
        """Return the size of a step, counted from 0."""
        share = (1 + math.cos(math.pi * step / max(self.steps - 1, 1))) / 2
        return self.threat.eps * (self.last_step + (self.first_step - self.last_step) * share)

    def target_order(self, problem: Problem, natural: Tensor) -> Tensor:
        """Return the most likely classes by the distance to their boundaries, then the others by their logits."""
        order = super().target_order(problem, natural)
        if self.target != "all" or (self.num_targets or order.shape[1]) == order.shape[1] == 1:
            return order
        nearest = order[:, : max(CANDIDATES, self.num_targets or 0)]

        def gaps(logits: Tensor) -> Tensor:
            return logits.gather(1, problem.y[:, None]) - logits.gather(1, nearest)

        gradients, gap, _ = problem.gradients(problem.ball.center, gaps)
        flat = gradients.flatten(2)
        slope = flat.abs().sum(2) if problem.ball.norm == "Linf" else flat.norm(dim=2)
        distance = gap / slope.clamp_min(torch.finfo(slope.dtype).tiny)
        ranked = nearest.gather(1, distance.argsort(dim=1, stable=True))
        return torch.cat([ranked, order[:, nearest.shape[1] :]], 1)


@dataclass(frozen=True, kw_only=True)
class MarginSearch(CosinePGD):
    """Minimize the margin z_y - z_t over given targets t and return the smallest found, also if it is positive."""

    def search(self, problem: Problem) -> Tensor:
        assert problem.targets is not None
        loss = targeted_margin(problem.y, problem.targets)
        return self.highest(problem, loss, loss, stop=False)


def _higher(x: Tensor, scores: Tensor, best: Tensor, highest: Tensor, stop: bool) -> tuple[Tensor, Tensor]:
    """Return the points of the higher scores, and these scores; with ``stop`` a point with a positive one is final."""
    better = (scores > highest) & (highest <= 0) if stop else scores > highest
    return torch.where(per_pixel(better, x), x, best), torch.where(better, scores, highest)
