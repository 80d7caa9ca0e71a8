"""Similarity regularizer (Benz et al. 2021, Sections 3.2 and 3.3): push the mean logits of different classes apart.

    L + strength * mean_{i != j} cos(m_i, m_j),   m_k the mean logit vector of class k

Deviations
* The paper names the regularizer and specifies neither its form nor its strength. Here the means are those of a batch,
  over the classes present in it, and the gradient flows through them.
* Natural logits are used if the base objective has them (standard, TRADES), else adversarial ones (Madry). The value is
  added to that term of every example, so class weights of mean one do not change its strength.
"""

# B batch, K classes

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.types import LossTerms
from classwise.objectives.composed import Composed


@dataclass(frozen=True, kw_only=True)
class Similarity(Composed):
    """A base objective plus the mean cosine similarity between the mean logits of different classes.

    Batch-norm statistics are updated as by the base objective.
    """

    paper: ClassVar[str] = "Benz et al. 2021"

    strength: Number = 0.1
    """Strength of the regularizer. Its gradient grows as logits shrink: at 1 a small network does not learn digits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength < 0:
            raise InputError(f"strength must not be negative, got {self.strength}")

    def terms(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> LossTerms:
        terms = self.inner.terms(model, x, x_adv, y)
        if terms.logits_nat is not None:
            return replace(terms, nat=terms.nat + self.strength * similarity(terms.logits_nat, y))
        assert terms.logits_adv is not None
        return replace(terms, adv=terms.adv + self.strength * similarity(terms.logits_adv, y))


def similarity(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cosine similarity between mean logit vectors of different classes; 0 for a single class."""
    num_classes = logits.shape[1]
    count = logits.new_zeros(num_classes).index_add(0, y, logits.new_ones(len(y)))
    total = logits.new_zeros(num_classes, num_classes).index_add(0, y, logits)
    unit = F.normalize(total, dim=1)  # a sum has the direction of its mean; absent classes stay zero
    present = (count > 0).sum()
    # |u_1 + u_2 + ...|^2 contains every pair twice, and each vector with itself.
    both_ways = unit.sum(0).square().sum() - unit.square().sum()
    return both_ways / (present * (present - 1)).clamp_min(1)
