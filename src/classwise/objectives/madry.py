"""Adversarial training (Madry et al. 2018): minimize E max CE(f(x'), y).

Deviations
* The attack runs with batch norm in evaluation mode. Several published implementations attack in training mode, which
  updates the running statistics in every attack step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from classwise.attacks import PGD
from classwise.core.model_calls import logits_of
from classwise.core.types import LossTerms
from classwise.objectives.label_smoothing import Smoothed


@dataclass(frozen=True, kw_only=True)
class Madry(Smoothed):
    """Adversarial training: cross-entropy on adversarial images.

    Batch-norm statistics are updated by the adversarial batch.
    """

    paper: ClassVar[str] = "Madry et al. 2018"
    has_natural_term: ClassVar[bool] = False

    attack: PGD = PGD(steps=10)

    def terms(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> LossTerms:
        logits = logits_of(model(x_adv))
        adv = self.cross_entropy(logits, y)
        return LossTerms(nat=torch.zeros_like(adv), adv=adv, beta=1.0, logits_adv=logits)
