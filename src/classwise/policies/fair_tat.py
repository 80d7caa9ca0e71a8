"""FAIR-TAT (Medi et al., WACV 2025): targeted attacks towards the classes that others are confused with.

CFPS_c is the share of class c among the wrong predictions on adversarial training images of the previous epoch. An
image of class y is attacked towards a class drawn from softmax(2 * CFPS) over the classes other than y, within the
radius (lambda_r + t_y) * eps, where t_y is the robust accuracy of its class in that epoch (as in CFA). In the first
epoch targets are uniform over the other classes and the radius is eps.

Deviations
* The distribution of targets is renormalized over the other classes; the authors' code draws again until the target is
  another class, which is equivalent.
* After an epoch without wrong predictions targets are uniform. A class without adversarial images keeps the radius eps.
* The attack runs in evaluation mode and images are normalized once; the authors' code attacks in training mode and
  normalizes twice.
* The weight average of the paper (FAWA) is a setting of the recipe.
"""

# K classes

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.types import ClassControls, ClassStats, Policy, Task


@dataclass(kw_only=True)
class FairTAT(Policy):
    """Target the training attack at frequently predicted wrong classes, with a radius per class."""

    paper: ClassVar[str] = "Medi et al. 2025"
    turns: ClassVar[tuple[str, ...]] = ("targets", "eps_scale")
    uses: ClassVar[tuple[str, ...]] = ("train.confusion_adv", "train.robust")

    lambda_r: Number = 0.5
    """Radius of a class of robust accuracy 0, relative to eps."""
    sharpness: Number = 2.0
    """Factor on CFPS; 0 draws targets uniformly."""

    def __post_init__(self) -> None:
        if self.lambda_r <= 0:
            raise InputError(f"lambda_r must be positive, got {self.lambda_r}")
        if self.sharpness < 0:
            raise InputError(f"sharpness must not be negative, got {self.sharpness}")

    def start(self, task: Task) -> ClassControls:
        return self._controls(torch.zeros(task.num_classes), torch.ones(task.num_classes))

    def on_epoch_end(self, train: ClassStats, val: ClassStats, epoch: int) -> ClassControls:
        wrong = (train.confusion_adv - train.confusion_adv.diagonal().diag()).sum(0)
        cfps = wrong / wrong.sum().clamp_min(1)
        return self._controls(cfps, (self.lambda_r + train.robust).nan_to_num(1.0))

    def _controls(self, cfps: torch.Tensor, eps_scale: torch.Tensor) -> ClassControls:
        own = torch.eye(len(cfps), dtype=torch.bool)
        targets = (self.sharpness * cfps).expand(len(cfps), -1).masked_fill(own, -torch.inf).softmax(1)
        return replace(ClassControls.uniform(len(cfps)), targets=targets, eps_scale=eps_scale)
