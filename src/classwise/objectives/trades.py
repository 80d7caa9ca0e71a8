"""TRADES (Zhang et al. 2019, Eq. 5): minimize E CE(f(x), y) + beta * max KL(p(x) || p(x')).

Deviations
* Two passes in training mode, one of the natural and one of the adversarial batch. The authors' code makes three, the
  natural one twice.
* The natural logits in the attack are computed once instead of in every step; the value is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from classwise.attacks import PGD
from classwise.attacks.losses import divergence
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.model_calls import both
from classwise.core.types import LossTerms
from classwise.objectives.label_smoothing import Smoothed


@dataclass(frozen=True, kw_only=True)
class Trades(Smoothed):
    """TRADES: natural cross-entropy plus the divergence between natural and adversarial outputs.

    Batch-norm statistics are updated by the natural, then by the adversarial batch.
    """

    paper: ClassVar[str] = "Zhang et al. 2019"

    beta: Number = 6.0
    """Strength of the divergence."""
    attack: PGD = PGD(steps=10, loss="kl", start="gaussian")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 0:
            raise InputError(f"beta must not be negative, got {self.beta}")

    def terms(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> LossTerms:
        logits_nat, logits_adv = both(model, x, x_adv)
        return LossTerms(
            nat=self.cross_entropy(logits_nat, y),
            # The gradient flows through both distributions, as in the paper.
            adv=divergence(logits_nat)(logits_adv),
            beta=self.beta,
            logits_nat=logits_nat,
            logits_adv=logits_adv,
        )
