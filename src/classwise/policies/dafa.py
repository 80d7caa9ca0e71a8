"""DAFA, distance-aware fair adversarial training (Lee et al. 2024, Eq. 4): hard classes gain weight from similar ones.

After a warm-up, with P[i, j] the mean softmax output j on adversarial training images of class i, every pair of classes
in which i is harder than j, P[i, i] < P[j, j], moves weight from j to i, more if the classes are similar:

    W_i += lam * P[i, j] * P[j, j],   W_j -= lam * P[i, j] * P[j, j],   starting at W = 1.

The cross-entropy of class i is weighted by W_i, and its radius is W_i * eps. The KL term of TRADES is not weighted.

Deviations
* W is at least 0.1. The paper leaves it unbounded, and with many classes it may become negative.
* Pairs that tie are skipped, as in the paper; the authors' code moves weight for them.
* The step size of the attack is scaled by W_i. The authors' adversarial training without TRADES takes a second,
  unscaled step per iteration and never leaves the common radius.
* W is part of the saved state; the authors' code loses it on resuming.
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

FLOOR = 0.1
"""Smallest weight."""


@dataclass(kw_only=True)
class DAFA(Policy):
    """After a warm-up, shift loss weight and radius once from easy classes to similar hard classes."""

    paper: ClassVar[str] = "Lee et al. 2024"
    turns: ClassVar[tuple[str, ...]] = ("weight_nat", "weight_adv", "eps_scale")
    uses: ClassVar[tuple[str, ...]] = ("train.softmax_adv", "train.loss_nat")

    lam: Number = 1.0
    """Strength of the change; the paper uses 1.5 on CIFAR-100 and STL-10."""
    warmup: int = 70
    """Number of epochs of plain training, the last of which gives the statistics; the paper trains for 110 in total."""
    weights: Tensor = field(default_factory=lambda: torch.ones(0), init=False, repr=False)
    """(K,) weights W; empty during the warm-up."""

    def __post_init__(self) -> None:
        if self.lam <= 0:
            raise InputError(f"lam must be positive, got {self.lam}")
        if self.warmup < 1:
            raise InputError(f"warmup must be at least 1, got {self.warmup}")

    def start(self, task: Task) -> ClassControls:
        self.weights = torch.ones(0)
        return ClassControls.uniform(task.num_classes)

    def on_epoch_end(self, train: ClassStats, val: ClassStats, epoch: int) -> ClassControls | None:
        if epoch < self.warmup:
            return None
        if not len(self.weights):
            self.weights = 1 + self.lam * moved(train.softmax_adv / train.n_adv[:, None].clamp_min(1))
            self.weights = self.weights.clamp_min(FLOOR).float()
        term = "weight_nat" if torch.any(train.loss_nat) else "weight_adv"
        plain = ClassControls.uniform(len(self.weights))
        return replace(plain, eps_scale=self.weights, **{term: self.weights})

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights = state["weights"]


def moved(softmax: Tensor) -> Tensor:
    """Return the weight each class (K,) gains from easier classes minus what it gives to harder ones.

    ``softmax`` is P, (K, K). A class without examples has a row of zeros, so it neither gains nor gives.
    """
    own = softmax.diagonal()
    gains = softmax * own * (own[:, None] < own)
    return gains.sum(1) - gains.sum(0)
