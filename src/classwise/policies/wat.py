"""WAT, worst-class adversarial training (Li & Liu, AAAI 2023, Algorithm 1, Eq. 12).

There is one expert per class and one for the average. Hedge turns their cumulative validation losses into weights,
w = softmax(eta * sum_t L_val(f_t)) over K + 1 entries, and the model minimizes sum_k w_k L_k.

Deviations
* L_k is the mean loss of class k, so on balanced data class k has the weight K * w_k + w_avg, whose mean is one in
  every epoch. The authors' code also multiplies the average expert by K, so that its loss scale changes with the
  weights, and uses a scale of two in the first epoch.
* Validation losses are exact class means; the authors divide by the padded size of the last batch.
* Which epoch is kept is the setting ``select`` of the recipe; the paper's rule is ``worst-loss``.
* The cumulative losses are part of the saved state; the authors' code loses them on resuming.
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


@dataclass(kw_only=True)
class WAT(Policy):
    """Weight classes by their cumulative validation loss, with Hedge."""

    paper: ClassVar[str] = "Li & Liu 2023"
    turns: ClassVar[tuple[str, ...]] = ("weight_nat", "weight_adv")
    uses: ClassVar[tuple[str, ...]] = ("val.loss",)

    eta: Number = 0.1
    """Learning rate of the weights; the default is the paper's for CIFAR-10 and 100 epochs."""
    cost: Tensor = field(default_factory=lambda: torch.zeros(0), init=False)
    """(K + 1,) cumulative losses of the class experts and, last, of the average expert."""

    def __post_init__(self) -> None:
        if self.eta <= 0:
            raise InputError(f"eta must be positive, got {self.eta}")

    def start(self, task: Task) -> ClassControls:
        self.cost = torch.zeros(task.num_classes + 1, dtype=torch.float64)
        return ClassControls.uniform(task.num_classes)

    def on_epoch_end(self, train: ClassStats, val: ClassStats, epoch: int) -> ClassControls:
        # A class without validation images keeps its cost.
        by_class = val.loss / val.n.clamp_min(1)
        average = val.loss.sum() / val.n.sum().clamp_min(1)
        self.cost = self.cost + torch.cat([by_class, average[None]])
        share = train.n / train.n.sum()
        # A class absent from training has no example to weight, so its expert is excluded.
        excluded = torch.cat([share == 0, torch.tensor([False])])
        weights = torch.softmax((self.eta * self.cost).masked_fill(excluded, -torch.inf), 0)
        by_example = ((weights[:-1] / share).nan_to_num() + weights[-1]).float()
        return replace(ClassControls.uniform(len(share)), weight_nat=by_example, weight_adv=by_example)

    def state_dict(self) -> dict[str, Any]:
        return {"cost": self.cost}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cost = state["cost"]
