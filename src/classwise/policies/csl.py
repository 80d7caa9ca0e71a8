"""Cost-sensitive learning (Benz et al. 2021, section 3.3): a higher loss weight for the vulnerable classes.

The paper describes two scenarios. In the first all classes matter alike, and their spread is to shrink; after each
epoch, with a_c the robust accuracy of class c on validation,

    w_c ← w_c + gamma · (mean a − a_c) / mean a,   then all w are divided by their mean.

In the second one class is critical: only its weight is moved, by gamma · (max a − a_c) / max a, which is positive as
long as another class is more robust, and the division lowers the others evenly.

Deviations
* The paper fixes no update. The first rule is ours, with the rate 0.05 of Li & Liu 2023; so is the second.
* A weight does not fall below 0.01 before the division, where the rule alone would make it negative.
* Means are over the classes that are in training and in validation; a class that is not in both keeps its weight.
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


@dataclass(kw_only=True)
class CSL(Policy):
    """Moves weight towards classes below the mean robust accuracy, or towards one critical class."""

    paper: ClassVar[str] = "Benz et al. 2021"
    turns: ClassVar[tuple[str, ...]] = ("weight_nat", "weight_adv")
    uses: ClassVar[tuple[str, ...]] = ("val.robust",)

    gamma: Number = 0.05
    """Rate of the weights."""
    critical: str | int | None = None
    """The one class to lift, by name or number; None shrinks the spread of all."""
    weights: Tensor = field(default_factory=lambda: torch.ones(0), init=False, repr=False)
    label: int | None = field(default=None, init=False, repr=False)
    """The critical class in this task."""

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

    def lag(self, robust: Tensor, judged: Tensor) -> Tensor:
        """(K,) how far each class is behind what it is measured by, as a share of that; 0 where it is not to move."""
        if self.label is None:
            aim, moved = robust[judged].mean(), judged
        else:
            aim, moved = robust.where(judged, 0).amax(), judged & (torch.arange(len(robust)) == self.label)
        # Without any robustness yet, or any class to judge by, there is no difference to act on.
        return torch.where(moved & (aim > 0), (aim - robust) / aim, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights = state["weights"]
