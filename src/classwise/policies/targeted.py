"""Adversarial training with targeted attacks (Benz et al. 2021, Section 3.3): target the class to be improved.

The training attack targets the vulnerable class, or a chosen one, in every image, so that the model learns to separate
it from all others.

Deviations
* The paper proposes the experiment without details. Here images of the target class itself are attacked towards all
  other classes uniformly.
* The vulnerable class is the one of the lowest robust accuracy on validation data over all epochs so far, as that of a
  single epoch is noisy. Classes that tie are targeted uniformly. The first epoch targets all classes uniformly.
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
    """Target the training attack at the most vulnerable class, or at a chosen one."""

    paper: ClassVar[str] = "Benz et al. 2021"
    turns: ClassVar[tuple[str, ...]] = ("targets",)
    uses: ClassVar[tuple[str, ...]] = ("val.robust",)

    aim: str | int = "vulnerable"
    """Target class: a name, a number, or ``vulnerable``."""
    correct: Tensor = field(default_factory=lambda: torch.zeros(0), init=False)
    n: Tensor = field(default_factory=lambda: torch.zeros(0), init=False)
    """(K,) numbers of correctly classified adversarial validation images and of all, over the epochs so far."""

    def start(self, task: Task) -> ClassControls:
        self.correct, self.n = torch.zeros(2, task.num_classes, dtype=torch.int64)
        chosen = torch.zeros(task.num_classes, dtype=torch.bool)
        if self.aim != "vulnerable":
            chosen[task.label(self.aim)] = True
        return replace(ClassControls.uniform(task.num_classes), targets=target_distributions(chosen))

    def on_epoch_end(self, train: ClassStats, val: ClassStats, epoch: int) -> ClassControls | None:
        if self.aim != "vulnerable":
            return None
        self.correct, self.n = self.correct + val.correct_adv, self.n + val.n_adv
        robust = (self.correct / self.n).nan_to_num(torch.inf)
        chosen = (robust == robust.min()) & (self.n > 0)
        return replace(ClassControls.uniform(len(chosen)), targets=target_distributions(chosen))

    def state_dict(self) -> dict[str, Any]:
        return {"correct": self.correct, "n": self.n}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.correct, self.n = state["correct"], state["n"]


def target_distributions(chosen: Tensor) -> Tensor:
    """Return target distributions (K, K), uniform over the chosen classes (K,) other than the true class.

    If there is none, the distribution is uniform over all other classes.
    """
    others = 1 - torch.eye(len(chosen))
    rows = others * chosen
    rows = torch.where(rows.sum(1, keepdim=True) > 0, rows, others)
    return rows / rows.sum(1, keepdim=True)
