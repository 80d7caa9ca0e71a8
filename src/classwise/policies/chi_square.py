"""Class-wise distributionally robust optimisation over a chi-square ball (Zhi et al. 2025, arXiv 2501.04527).

With L_k the mean loss of class k, the model descends Σ_k p_k L_k for the worst p near the uniform distribution:

    max_p Σ_k p_k L_k   subject to   p ≥ 0,   Σ_k p_k = 1,   (1/K) Σ_k (K p_k − 1)² ≤ rho.

Where no p_k is zero, K p_k = 1 + sqrt(rho) · (L_k − mean L) / std L, and the maximum is mean L + sqrt(rho) · std L. In
general K p_k = max(0, L_k − eta) / c: classes of small loss have none, and among the others p is linear in the loss.
The left side of the constraint rises with eta, so its values at eta = L_1 … L_K tell which classes are left.

Deviations
* L is the loss of the last epoch on validation, and p is constant in an epoch; the paper solves for p on the training
  loss within its objective.
* rho bounds the mean of (K p_k − 1)²; where the divergence is defined with a factor of one half, rho is half of this.
* L_k is a class mean, so of N training examples one of class k carries p_k · N / n_k, which is K p_k where classes are
  of one size.
* K counts the classes that are in training and in validation; one that is only in training carries its even share.
"""

# K classes

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.types import ClassControls, ClassStats, Policy


@dataclass(kw_only=True)
class ChiSquare(Policy):
    """Weights classes by the worst distribution within a chi-square ball around the uniform one."""

    paper: ClassVar[str] = "Zhi et al. 2025"
    turns: ClassVar[tuple[str, ...]] = ("weight_nat", "weight_adv")
    uses: ClassVar[tuple[str, ...]] = ("val.loss",)

    rho: Number = 0.5
    """Size of the ball: 0 is plain training, K − 1 lets all weight go to one class."""

    def __post_init__(self) -> None:
        if self.rho < 0:
            raise InputError(f"rho must not be negative, got {self.rho}")

    def on_epoch_end(self, train: ClassStats, val: ClassStats, epoch: int) -> ClassControls:
        trained = train.n > 0
        judged = trained & (val.n > 0)
        by_class = torch.ones(len(trained), dtype=torch.float64)
        by_class[judged] = worst_weights(val.loss[judged] / val.n[judged], self.rho)
        even = train.n.sum() / trained.sum() / train.n
        by_example = torch.where(trained, by_class * even, 1.0).float()
        return replace(ClassControls.uniform(len(trained)), weight_nat=by_example, weight_adv=by_example)


def worst_weights(loss: Tensor, rho: float) -> Tensor:
    """(K,) K · p of the worst p for these losses, exactly; classes that tie are treated alike."""
    if not len(loss):
        return loss
    loss = loss - loss.amax()  # so that classes that tie at the top differ from their mean by nothing, not by rounding
    above = (loss - loss[:, None]).clamp_min(0)
    # (K,) the left side of the constraint at eta = L_k; NaN at the largest loss, whose class is never left out.
    spread = above.square().mean(1) / above.mean(1).square() - 1
    active = ~(spread <= rho)
    kept = 1 / active.double().mean()
    offset = torch.where(active, loss - loss[active].mean(), 0.0)
    variance = offset.square().mean()
    # mean (K p)² = kept + slope² · variance is to be 1 + rho; classes that all tie have no one to prefer.
    slope = ((1 + rho - kept).clamp_min(0) / variance).sqrt() if variance > 0 else 0.0
    return torch.where(active, kept + slope * offset, 0.0).clamp_min(0)
