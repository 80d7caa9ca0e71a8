"""CSL, cost-sensitive learning (Benz et al. 2021, Section 3.3): a higher loss weight for vulnerable classes.

The paper describes two scenarios. In the first, all classes are equally important and their spread is reduced: after
each epoch, with a_c the robust accuracy of class c on validation data,

    w_c <- w_c + gamma * (mean a - a_c) / mean a,   then all w are divided by their mean.

In the second, one class is critical: only its weight changes, by gamma * (max a - a_c) / max a, which is positive while
another class is more robust; the division lowers the others evenly.

Deviations
* The paper specifies no update. Both rules are ours, with the rate 0.05 of Li & Liu 2023.
* Before the division a weight is at least 0.01, as the rule alone may make it negative.
* Means are over the classes present in training and validation; other classes keep their weight.
"""

# K classes

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.types import ClassControls, ClassStats, Policy, Task

FLOOR = 0.01
"""Smallest weight before normalization."""


@dataclass(kw_only=True)
class CSL(Policy):
    """Raise the loss weight of classes below the mean robust accuracy, or of one critical class."""

    paper: ClassVar[str] = "Benz et al. 2021"
    turns: ClassVar[tuple[str, ...]] = ("weight_nat", "weight_adv")
    uses: ClassVar[tuple[str, ...]] = ("val.robust",)

    gamma: Number = 0.05
    """Learning rate of the weights."""
    critical: str | int | None = None
    """Class to improve, by name or number. Default: reduce the spread of all classes."""
    weights: Tensor = field(default_factory=lambda: torch.ones(0), init=False, repr=False)
    label: int | None = field(default=None, init=False, repr=False)
    """The number of the critical class."""

    def __post_init__(self) -> None:
        if self.gamma <= 0:
            raise InputError(f"gamma must be positive, got {self.gamma}")

    def start(self, task: Task) -> ClassControls:
        self.label = None if self.critical is None else task.label(self.critical)
        self.weights = torch.ones(task.num_classes, dtype=torch.float64)
        return ClassControls.uniform(task.num_classes)

    def on_epoch_end(self, train: ClassStats, val: ClassStats, epoch: int) -> ClassControls:
        trained = train.n > 0
        lag = self.lag(val.robust.double(), trained & (val.n_adv > 0))
        weights = (self.weights + self.gamma * lag).clamp_min(FLOOR)
        self.weights = torch.where(trained, weights / weights[trained].mean(), 1.0)
        by_class = self.weights.float()
        return replace(ClassControls.uniform(len(by_class)), weight_nat=by_class, weight_adv=by_class)

    def lag(self, robust: Tensor, measured: Tensor) -> Tensor:
        """Return the relative deficit of each class (K,) below its reference; 0 for classes that keep their weight."""
        if self.label is None:
            reference, updated = robust[measured].mean(), measured
        else:
            reference = robust.where(measured, 0).amax()
            updated = measured & (torch.arange(len(robust)) == self.label)
        # Weights do not change while the reference is 0 or there is no class to compare.
        return torch.where(updated & (reference > 0), (reference - robust) / reference, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights = state["weights"]
