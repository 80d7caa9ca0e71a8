"""CFA, class-wise calibrated fair adversarial training (Wei et al. 2023, Eq. 5-7): radius and regularization per class.

With t_k the robust accuracy of class k in training,

    eps_k = (lambda1 + t_k) * eps,   beta_k = (lambda2 + t_k) * beta,   loss_i = (CE_i + beta_k * KL_i) / (1 + beta_k):

a weak class gets a smaller radius and a weaker regularizer. The third part of the method, averaging the weights of
epochs whose worst class is robust enough, is the setting ``fawa`` of a recipe.

Deviations
* The loss is multiplied by 1 + beta, so that beta_k = beta is plain TRADES; the authors' learning rate is in effect
  1 + beta times lower.
* The step size of the attack scales with the radius of the class; the authors use 2/255 for all.
* Without a natural term only the radius changes, as in the paper.
* A class without training examples keeps its radius and its beta.
"""

# K classes

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.types import ClassControls, ClassStats, Policy, Task


@dataclass(kw_only=True)
class CFA(Policy):
    """Reduce radius and regularization for classes of low robust accuracy in training."""

    paper: ClassVar[str] = "Wei et al. 2023"
    turns: ClassVar[tuple[str, ...]] = ("weight_nat", "weight_adv", "eps_scale", "beta_scale")
    uses: ClassVar[tuple[str, ...]] = ("train.robust", "train.loss_nat")

    lambda1: Number = 0.5
    """Radius of a class of robust accuracy 0, relative to eps; the paper uses 0.5, and 0.3 with TRADES."""
    lambda2: Number = 0.5
    """Strength of the regularizer for a class of robust accuracy 0, relative to beta."""
    begin: int = 10
    """Number of epochs before the policy takes effect."""
    beta: float = field(default=1.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.lambda1 <= 0:
            raise InputError(f"lambda1 must be positive, got {self.lambda1}")
        if self.lambda2 < 0:
            raise InputError(f"lambda2 must not be negative, got {self.lambda2}")
        if self.begin < 1:
            raise InputError(f"begin must be at least 1, as the first epoch has no statistics, got {self.begin}")

    def start(self, task: Task) -> ClassControls:
        self.beta = task.beta
        return ClassControls.uniform(task.num_classes)

    def on_epoch_end(self, train: ClassStats, val: ClassStats, epoch: int) -> ClassControls | None:
        if epoch < self.begin:
            return None
        robust = train.robust.double()
        radius = (self.lambda1 + robust).nan_to_num(nan=1.0)
        controls = replace(ClassControls.uniform(len(robust)), eps_scale=radius.float())
        if not torch.any(train.loss_nat):
            return controls
        scale = (self.lambda2 + robust).nan_to_num(nan=1.0)
        weight = ((1 + self.beta) / (1 + self.beta * scale)).float()
        return replace(controls, beta_scale=scale.float(), weight_nat=weight, weight_adv=weight)
