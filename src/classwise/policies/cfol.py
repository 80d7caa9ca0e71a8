"""CFOL, class focused online learning (Pethick et al., TMLR 2023): an adversary chooses the class distribution by EXP3.

With q = softmax(w), classes are sampled from p = gamma / K + (1 - gamma) * q. Every misclassification of class k under
attack adds eta / p_k to w_k; dividing by the sampling probability makes this an unbiased estimate of the class error.
With ``mode=reweighting`` classes are sampled uniformly and p weights the loss.

Deviations
* The authors update w after every batch; here the errors of an epoch, all sampled from one p, are added at its end.
* The first epoch uses every example once. On balanced data this is p = 1/K. It also determines which classes are
  present, because in later epochs a class might be missing by chance.
* A class without training examples has share zero; the others share the rest.
* Reweighting weights an example of class k by p_k over the share of the class in the data. That is the authors' K * p_k
  for balanced classes, and otherwise keeps the mean weight at one.
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
"""Whether classes are sampled from the adversary's distribution or weighted by it."""


@dataclass(kw_only=True)
class CFOL(Policy):
    """Sample classes more often the more often they are misclassified under attack."""

    paper: ClassVar[str] = "Pethick et al. 2023"
    turns: ClassVar[tuple[str, ...]] = ("sampling", "weight_nat", "weight_adv")
    uses: ClassVar[tuple[str, ...]] = ("train.robust",)

    eta: Number = 5e-6
    """Learning rate of the scores. The default is the authors' for 40,000 training images of CIFAR-10."""
    gamma: Number = 0.5
    """Share of the uniform distribution in p."""
    mode: Mode = "sampling"
    """Sample classes from p, or weight the loss by p."""
    scores: Tensor = field(default_factory=lambda: torch.zeros(0), init=False)
    """(K,) scores w of the adversary."""
    drawn: Tensor | None = field(default=None, init=False)
    """(K,) class distribution p of this epoch; None: every example once."""

    def __post_init__(self) -> None:
        if self.eta <= 0:
            raise InputError(f"eta must be positive, got {self.eta}")
        if not 0 < self.gamma <= 1:
            raise InputError(f"gamma must be above 0 and at most 1, got {self.gamma}")
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
