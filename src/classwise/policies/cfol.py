"""Class focused online learning (Pethick et al., TMLR 2023): an adversary picks the classes, by EXP3.

q = softmax(w), and classes are drawn by p = gamma / K + (1 - gamma) · q. Every error under attack of class k raises w_k
by eta / p_k: divided by the chance of being asked, it estimates the error of a class without favour for those asked
often. With ``mode=reweighting`` all classes are drawn alike and p goes into the loss instead.

Deviations
* The authors update w after every batch; here the errors of an epoch, all drawn by one p, are added at its end.
* The first epoch takes every example once. On balanced data that is p = 1/K, and it tells which classes there are:
  later a class might be missing by chance.
* A class without training examples has share zero, and the others share what is left.
* Re-weighting counts an example of class k by p_k over the share of its class in the data. That is the authors' K · p_k
  where classes are balanced, and where they are not, the mean weight is still one.
"""

# K classes

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from classwise.config.spec import Number
from classwise.core.errors import InputError, unknown
from classwise.core.types import ClassControls, ClassStats, Policy, Task

Mode = Literal["sampling", "reweighting"]
"""Whether classes are drawn by the adversary's distribution, or weighted by it."""


@dataclass(kw_only=True)
class CFOL(Policy):
    """Draws classes more often the more often they are misclassified under attack."""

    paper: ClassVar[str] = "Pethick et al. 2023"
    turns: ClassVar[tuple[str, ...]] = ("sampling", "weight_nat", "weight_adv")
    uses: ClassVar[tuple[str, ...]] = ("train.robust",)

    eta: Number = 5e-6
    """An error of class k adds eta / p_k to its score. The authors' choice for 40000 training images of CIFAR-10."""
    gamma: Number = 0.5
    """Share of the draws that go to all classes alike."""
    mode: Mode = "sampling"
    scores: Tensor = field(default_factory=lambda: torch.zeros(0), init=False)
    """(K,) the adversary's w."""
    drawn: Tensor | None = field(default=None, init=False)
    """(K,) the p by which the examples of this epoch are drawn; None takes every example once."""

    def __post_init__(self) -> None:
        if self.eta <= 0:
            raise InputError(f"eta must be positive, got {self.eta}")
        if not 0 < self.gamma <= 1:
            raise InputError(f"gamma must lie above 0 and not above 1, got {self.gamma}")
        if self.mode not in get_args(Mode):
            raise unknown("mode", str(self.mode), get_args(Mode))

    def start(self, task: Task) -> ClassControls:
        self.scores, self.drawn = torch.zeros(task.num_classes, dtype=torch.float64), None
        return ClassControls.uniform(task.num_classes)

    def on_epoch_end(self, train: ClassStats, val: ClassStats, epoch: int) -> ClassControls:
        share = train.n.double() / train.n.sum()
        chance = share if self.drawn is None else self.drawn
        present = chance > 0
        wrong = train.n_adv - train.correct_adv
        self.scores = self.scores + self.eta * (wrong / chance).masked_fill(~present, 0)
        q = torch.softmax(self.scores.masked_fill(~present, -torch.inf), 0)
        p = self.gamma * present / present.sum() + (1 - self.gamma) * q
        even = ClassControls.uniform(len(share))
        if self.mode == "sampling":
            self.drawn = p
            return replace(even, sampling=p.float())
        weights = (p / share).masked_fill(~present, 0).float()
        return replace(even, weight_nat=weights, weight_adv=weights)

    def state_dict(self) -> dict[str, Any]:
        return {"scores": self.scores, "drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scores, self.drawn = state["scores"], state["drawn"]
