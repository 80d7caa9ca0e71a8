"""Adversarial training with targeted attacks (Benz et al. 2021, Section 3.3): aim at the class that is to gain.

The training attack tries to have every image taken for the vulnerable class, or for a class that matters most, which
so learns to be told from all others.

Deviations
* The paper proposes the experiment and leaves the rest open. Images of the aimed class itself are attacked towards
  all other classes alike.
* The vulnerable class is the one with the lowest robust accuracy on validation, over all epochs so far: that of one
  epoch changes by chance. Classes that share the lowest are aimed at alike. The first epoch aims at all classes alike.
"""

# K classes

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from classwise.core.types import ClassControls, ClassStats, Policy, Task


@dataclass(kw_only=True)
class Targeted(Policy):
    """Aims the training attack at the vulnerable class, or at one class."""

    paper: ClassVar[str] = "Benz et al. 2021"
    turns: ClassVar[tuple[str, ...]] = ("targets",)
    uses: ClassVar[tuple[str, ...]] = ("val.robust",)

    aim: str | int = "vulnerable"
    """A class by its name or its number, or ``vulnerable``."""
    correct: Tensor = field(default_factory=lambda: torch.zeros(0), init=False)
    n: Tensor = field(default_factory=lambda: torch.zeros(0), init=False)
    """(K,) images classified correctly under attack, and images, over the validations so far."""

    def start(self, task: Task) -> ClassControls:
        self.correct, self.n = torch.zeros(2, task.num_classes, dtype=torch.int64)
        aimed = torch.zeros(task.num_classes, dtype=torch.bool)
        if self.aim != "vulnerable":
            aimed[task.label(self.aim)] = True
        return replace(ClassControls.uniform(task.num_classes), targets=rows_towards(aimed))

    def on_epoch_end(self, train: ClassStats, val: ClassStats, epoch: int) -> ClassControls | None:
        if self.aim != "vulnerable":
            return None
        self.correct, self.n = self.correct + val.correct_adv, self.n + val.n_adv
        robust = (self.correct / self.n).nan_to_num(torch.inf)
        aimed = (robust == robust.min()) & (self.n > 0)
        return replace(ClassControls.uniform(len(aimed)), targets=rows_towards(aimed))

    def state_dict(self) -> dict[str, Any]:
        return {"correct": self.correct, "n": self.n}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.correct, self.n = state["correct"], state["n"]


def rows_towards(aimed: Tensor) -> Tensor:
    """(K, K) each class aims at the aimed ones (K,) alike; where there is none but itself, at all others alike."""
    others = 1 - torch.eye(len(aimed))
    rows = others * aimed
    rows = torch.where(rows.sum(1, keepdim=True) > 0, rows, others)
    return rows / rows.sum(1, keepdim=True)
