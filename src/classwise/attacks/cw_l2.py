"""The L2 attack of Carlini & Wagner (2017, §V-A): minimise ‖δ‖² + c · f(x + δ).

c is searched for each example: ten times as large while nothing fools the model, then bisected towards the smallest
that does. Every c starts anew at the image.

Deviations, besides those of both attacks (``carlini_wagner.py``)
* At most 1000 steps for each c, where the paper takes 10,000; the early stop ends most well before.
"""

# B batch

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from classwise.attacks.carlini_wagner import CarliniWagner, Nearest
from classwise.attacks.problem import Problem
from classwise.config.spec import Number
from classwise.core.threat import Norm, length


@dataclass(frozen=True, kw_only=True)
class CWL2(CarliniWagner):
    """Carlini & Wagner's search for the smallest L2 perturbation."""

    norms: ClassVar[tuple[Norm, ...]] = ("L2",)
    instead: ClassVar[str] = "cw-linf"

    norm: Norm | None = "L2"
    search_steps: int = 9
    steps: int = 1000
    learning_rate: Number = 0.01
    initial_c: Number = 0.001

    def minimise(self, problem: Problem, enough: Tensor) -> Nearest:
        centre = problem.ball.centre
        nearest = Nearest(centre.clone(), torch.full_like(enough, torch.inf))
        c = torch.full_like(enough, self.initial_c)
        low, high = torch.zeros_like(c), torch.full_like(c, torch.inf)
        for _ in range(self.search_steps):
            fooled = self.descend(problem, c, centre, nearest, enough)
            low, high = torch.where(fooled, low, c), torch.where(fooled, c, high)
            c = torch.where(high.isinf(), 10 * c, (low + high) / 2)
        return nearest

    def size(self, delta: Tensor) -> Tensor:
        return length(delta).flatten()

    def cost(self, delta: Tensor, nearest: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
        return delta.flatten(1).square().sum(1), 2 * delta
