"""MART, misclassification aware adversarial training (Wang et al., ICLR 2020).

    L = BCE(p(x'), y) + beta * KL(p(x) || p(x')) * (1 - p_y(x)),   BCE(p, y) = -log p_y - log(1 - max_{k != y} p_k)

The loss term ``nat`` is the boosted cross-entropy of the *adversarial* image, because it is the term without beta. A
policy that sets ``weight_nat`` weights this term. MART has no loss on the natural image alone.

Deviations
* The attack starts uniformly in the ball, our interpretation of the paper's random start; the authors' code starts from
  the image plus small Gaussian noise.
* The divergence is computed from log-softmax, without the constants in the authors' logarithms. In the other terms
  their constants are kept: 1.0001 + 1e-12 in place of 1, and 1.0000001 - p_y as the weight.
"""

# B batch, K classes

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from classwise.attacks import PGD
from classwise.attacks.losses import divergence
from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.model_calls import both
from classwise.core.types import LossTerms, Objective


@dataclass(frozen=True, kw_only=True)
class Mart(Objective):
    """MART: boosted adversarial cross-entropy plus a divergence with more weight on misclassified examples.

    Batch-norm statistics are updated by the natural, then by the adversarial batch.
    """

    paper: ClassVar[str] = "Wang et al. 2020"

    beta: Number = 5.0
    """Strength of the divergence."""
    attack: PGD = PGD(steps=10)

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise InputError(f"beta must not be negative, got {self.beta}")

    def terms(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> LossTerms:
        logits_nat, logits_adv = both(model, x, x_adv)
        label = y[:, None]
        rival = logits_adv.softmax(1).scatter(1, label, 0.0).amax(1)
        confidence = logits_nat.softmax(1).gather(1, label).squeeze(1)
        return LossTerms(
            nat=F.cross_entropy(logits_adv, y, reduction="none") - (1.0001 - rival + 1e-12).log(),
            # The gradient flows through both distributions and through the weight, as in the paper.
            adv=divergence(logits_nat)(logits_adv) * (1.0000001 - confidence),
            beta=self.beta,
            logits_nat=logits_nat,
            logits_adv=logits_adv,
        )
