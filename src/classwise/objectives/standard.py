"""Training without an attack: E CE(f(x), y). The baseline that shows what adversarial training is for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from classwise.core.model_calls import logits_of
from classwise.core.types import LossTerms
from classwise.objectives.label_smoothing import Smoothed


@dataclass(frozen=True, kw_only=True)
class Standard(Smoothed):
    """Cross-entropy on clean images. Batch-norm statistics are updated by the one clean pass."""

    @property
    def attack(self) -> None:
        return None

    def terms(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> LossTerms:
        logits = logits_of(model(x))
        nat = self.cross_entropy(logits, y)
        return LossTerms(nat=nat, adv=torch.zeros_like(nat), beta=0.0, logits_nat=logits)
