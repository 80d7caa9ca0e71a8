"""Standard training, minimize E CE(f(x), y): the baseline without an attack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from classwise.core.model_calls import logits_of
from classwise.core.types import LossTerms
from classwise.objectives.label_smoothing import Smoothed


@dataclass(frozen=True, kw_only=True)
class Standard(Smoothed):
    """Standard training: cross-entropy on natural images.

    Batch-norm statistics are updated by the natural batch.
    """

    has_adversarial_term: ClassVar[bool] = False

    @property
    def attack(self) -> None:
        return None

    def terms(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> LossTerms:
        logits = logits_of(model(x))
        nat = self.cross_entropy(logits, y)
        return LossTerms(nat=nat, adv=torch.zeros_like(nat), beta=0.0, logits_nat=logits)
