"""The L2 attack of Carlini & Wagner (2017, Section V-A): minimize ||d||^2 + c * f(x + d).

c is searched per example: multiplied by ten while nothing fools the model, then bisected towards the smallest value
that does. Every c starts at the natural image.

Deviations, besides those of the base (``carlini_wagner.py``)
* At most 1000 steps for each c; the paper takes 10,000. Most examples stop well before.
"""

# B batch

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from classwise.attacks.carlini_wagner import CarliniWagner, Nearest
from classwise.attacks.problem import Problem
from classwise.core.numbers import Count, Positive
from classwise.core.threat import Norm


@dataclass(frozen=True, kw_only=True)
class CWL2(CarliniWagner):
    """The L2 attack of Carlini & Wagner (2017): search for the smallest perturbation."""

    norms: ClassVar[tuple[Norm, ...]] = ("L2",)
    alternative: ClassVar[str] = "cw-linf"

    norm: Norm | None = "L2"
    search_steps: Count = 9
    steps: Count = 1000
    learning_rate: Positive = 0.01
    initial_c: Positive = 0.001

    def minimize(self, problem: Problem, enough: Tensor) -> Nearest:
        center = problem.ball.center
        nearest = Nearest(center.clone(), torch.full_like(enough, torch.inf))
        c = torch.full_like(enough, self.initial_c)
        low, high = torch.zeros_like(c), torch.full_like(c, torch.inf)
        for _ in range(self.search_steps):
            fooled = self.descend(problem, c, center, nearest, enough)
            low, high = torch.where(fooled, low, c), torch.where(fooled, c, high)
            c = torch.where(high.isinf(), 10 * c, (low + high) / 2)
        return nearest

    def cost(self, delta: Tensor, nearest: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
        return delta.flatten(1).square().sum(1), 2 * delta
