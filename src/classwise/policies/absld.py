"""ABSLD, anti-bias soft label distillation (Zhao et al. 2024): sharper teacher outputs for classes of high loss.

The teacher's logits on images of class k are divided by tau_k. After every epoch, with l_k the mean cross-entropy of
the student on training images of class k,

    tau_k <- clip(tau_k - rate * (l_k - mean l) / max |l - mean l|, low, high),

separately for natural and adversarial images.

Deviations
* l_k is a class mean; the authors take the sum, which is equivalent for classes of equal size.
* The rate is constant; the authors lower it with the learning rate.
* Each term uses its own temperature. In the authors' code both targets are divided by both temperatures, because a
  tensor is changed in place.
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
class ABSLD(Policy):
    """Lower the teacher's temperature for classes of high loss and raise it for the others."""

    paper: ClassVar[str] = "Zhao et al. 2024"
    turns: ClassVar[tuple[str, ...]] = ("temperature_nat", "temperature_adv")
    uses: ClassVar[tuple[str, ...]] = ("train.ce_nat", "train.ce_adv")

    rate: Number = 0.1
    """Step size of the temperatures."""
    low: Number = 0.5
    """Smallest temperature."""
    high: Number = 5.0
    """Largest temperature."""
    temperatures: Tensor = field(default_factory=lambda: torch.ones(2, 0), init=False, repr=False)
    """(2, K) temperatures for natural and for adversarial images."""

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise InputError(f"rate must not be negative, got {self.rate}")
        if not 0 < self.low <= 1 <= self.high:
            raise InputError(f"low and high must satisfy 0 < low <= 1 <= high, got {self.low} and {self.high}")

    def start(self, task: Task) -> ClassControls:
        self.temperatures = torch.ones(2, task.num_classes, dtype=torch.float64)
        return self._controls()

    def on_epoch_end(self, train: ClassStats, val: ClassStats, epoch: int) -> ClassControls:
        sums, counts = torch.stack([train.ce_nat, train.ce_adv]), torch.stack([train.n_nat, train.n_adv])
        for temperature, loss, n in zip(self.temperatures, sums, counts, strict=True):
            present = n > 0
            mean = loss[present] / n[present]
            above = mean - mean.mean()
            if present.any() and (largest := above.abs().amax()) > 0:
                temperature[present] -= self.rate * above / largest
        self.temperatures.clamp_(self.low, self.high)
        return self._controls()

    def _controls(self) -> ClassControls:
        nat, adv = self.temperatures.float()
        return replace(ClassControls.uniform(len(nat)), temperature_nat=nat, temperature_adv=adv)

    def state_dict(self) -> dict[str, Any]:
        return {"temperatures": self.temperatures.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.temperatures = state["temperatures"].clone()
