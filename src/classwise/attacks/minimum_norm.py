"""The base of attacks that search for the smallest perturbation, whatever its size."""

# B batch

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from classwise.attacks.gradient import GradientAttack
from classwise.attacks.problem import Problem
from classwise.core.streams import Randomness
from classwise.core.types import AttackCall


@dataclass(frozen=True, kw_only=True)
class MinimumNormAttack(GradientAttack):
    """A search for the smallest perturbation. Called as an attack, it searches for one within the radius."""

    def closest(self, model: nn.Module, x: Tensor, y: Tensor, *, generator: Randomness = None) -> tuple[Tensor, Tensor]:
        """Return the nearest misclassified images found and their distances (B,), independent of eps.

        A misclassified natural image is returned with distance 0. An image for which nothing is found, or whose label
        is the target class, is returned with distance infinity.
        """
        diameter = 1.0 if (self.norm or self.norms[0]) == "Linf" else math.sqrt(max(1, x[:1].numel()))
        with replace(self, eps=diameter).searching(AttackCall(model, x, y, generator=generator)) as problem:
            images = problem.ball.center.clone()
            distances = images.new_full((len(images),), torch.inf)
            rows, problem = self.without_target_class(problem)
            if len(rows):
                images[rows], distances[rows] = self.smallest(problem)
        return images.to(x.device), distances.to(x.device)

    @abstractmethod
    def smallest(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Return the nearest images found over all targets, and their distances (B,)."""
