"""A weight for each class, fixed for the whole training (Li & Liu 2023, Fig. 3, sweep that of one class).

Deviations
* The paper's weights sum to one over the classes. Here they are relative to the others and brought to a mean of one, so
  that the scale of the loss, and with it the learning rate, keeps its meaning.
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
    """Gives each class a weight of its own, from the first epoch to the last."""

    paper: ClassVar[str] = "Li & Liu 2023"
    turns: ClassVar[tuple[str, ...]] = ("weight_nat", "weight_adv")

    weights: Numbers | dict[str, Number] | None = None
    """A number for every class, or a table of classes by name or number; the others have 1."""

    def __post_init__(self) -> None:
        if not self.weights:
            raise InputError("fixed-weights needs weights: a number for every class, or a table like { cat = 2 }")
        for value in self.weights.values() if isinstance(self.weights, Mapping) else self.weights:
            if not 0 <= value < math.inf:
                raise InputError(f"weights must be finite and not negative, got {value}")

    def start(self, task: Task) -> ClassControls:
        assert self.weights is not None
        weights = torch.tensor(by_class("weights", self.weights, task, 1.0), dtype=torch.float64)
        if not weights.any():
            raise InputError("weights are zero for every class")
        even = (weights / weights.mean()).float()
        return replace(ClassControls.uniform(task.num_classes), weight_nat=even, weight_adv=even)
