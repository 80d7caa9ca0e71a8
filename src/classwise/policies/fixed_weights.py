"""Constant class weights (Li & Liu 2023, Fig. 3, vary the weight of one class).

Deviations
* The paper's weights sum to one over the classes. Here they are relative and scaled to a mean of one, so that the scale
  of the loss, and with it the learning rate, keeps its meaning.
"""

# K classes

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from classwise.config.spec import Number, Numbers
from classwise.core.errors import InputError
from classwise.core.types import ClassControls, Policy, Task
from classwise.policies.by_class import by_class


@dataclass(kw_only=True)
class FixedWeights(Policy):
    """Weight the loss of each class by a constant."""

    paper: ClassVar[str] = "Li & Liu 2023"
    turns: ClassVar[tuple[str, ...]] = ("weight_nat", "weight_adv")

    weights: Numbers | dict[str, Number] | None = None
    """One number per class, or a table from class names or numbers to values. Default: 1."""

    def __post_init__(self) -> None:
        if not self.weights:
            raise InputError("fixed-weights needs weights: one number per class, or a table like { cat = 2 }")
        for value in self.weights.values() if isinstance(self.weights, Mapping) else self.weights:
            if not 0 <= value < math.inf:
                raise InputError(f"weights must be finite and not negative, got {value}")

    def start(self, task: Task) -> ClassControls:
        assert self.weights is not None
        weights = torch.tensor(by_class("weights", self.weights, task, 1.0), dtype=torch.float64)
        if not weights.any():
            raise InputError("weights must be positive for at least one class")
        even = (weights / weights.mean()).float()
        return replace(ClassControls.uniform(task.num_classes), weight_nat=even, weight_adv=even)
