"""TRADES (Zhang et al. 2019, Eq. 5): min E CE(f(x), y) + beta · max KL(p(x) ‖ p(x')).

Deviations
* Two training-mode passes, one of the clean and one of the attacked batch; the authors' code makes three, the
  clean one twice.
* The clean logits inside the attack are computed once, not at every step; the value is the same.
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
    """Clean cross-entropy plus a regulariser. Batch-norm statistics see the clean, then the attacked batch."""

    paper: ClassVar[str] = "Zhang et al. 2019"

    beta: Number = 6.0
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
