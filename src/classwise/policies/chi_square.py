"""Class-wise distributionally robust optimization over a chi-square ball (Zhi et al. 2025, arXiv 2501.04527).

With L_k the mean loss of class k, the model minimizes sum_k p_k L_k for the worst p near the uniform distribution:

    max_p sum_k p_k L_k   subject to   p >= 0,   sum_k p_k = 1,   (1/K) sum_k (K p_k - 1)^2 <= rho.

If no p_k is zero, K p_k = 1 + sqrt(rho) * (L_k - mean L) / std L, and the maximum is mean L + sqrt(rho) * std L. In
general K p_k = max(0, L_k - eta) / c: classes of small loss have weight zero, and among the others p is linear in the
loss. The left side of the constraint increases with eta, so its values at eta = L_1 ... L_K determine which classes
have weight.

Deviations
* L is the loss of the last epoch on validation data, and p is constant within an epoch; the paper solves for p on the
  training loss within its objective.
* rho bounds the mean of (K p_k - 1)^2; if the divergence is defined with a factor of one half, rho is half of this.
* L_k is a class mean, so of N training examples one of class k has the weight p_k * N / n_k, which is K p_k for classes
  of equal size.
* K counts the classes present in training and validation; for a class present in training only, p_k = 1/K.
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
    """Weight classes by the worst-case distribution within a chi-square ball around the uniform one."""

    paper: ClassVar[str] = "Zhi et al. 2025"
    turns: ClassVar[tuple[str, ...]] = ("weight_nat", "weight_adv")
    uses: ClassVar[tuple[str, ...]] = ("val.loss",)

    rho: Number = 0.5
    """Size of the ball: 0 is plain training, K - 1 allows all weight on one class."""

    def __post_init__(self) -> None:
        if self.rho < 0:
            raise InputError(f"rho must not be negative, got {self.rho}")

    def on_epoch_end(self, train: ClassStats, val: ClassStats, epoch: int) -> ClassControls:
        trained = train.n > 0
        measured = trained & (val.n > 0)
        by_class = torch.ones(len(trained), dtype=torch.float64)
        by_class[measured] = worst_weights(val.loss[measured] / val.n[measured], self.rho)
        even = train.n.sum() / trained.sum() / train.n
        by_example = torch.where(trained, by_class * even, 1.0).float()
        return replace(ClassControls.uniform(len(trained)), weight_nat=by_example, weight_adv=by_example)


def worst_weights(loss: Tensor, rho: float) -> Tensor:
    """Return K * p of the worst-case p for these losses (K,), exactly; ties get equal weights."""
    if not len(loss):
        return loss
    loss = loss - loss.amax()  # so that classes that tie at the top equal their mean exactly
    above = (loss - loss[:, None]).clamp_min(0)
    # (K,) the left side of the constraint at eta = L_k; NaN at the largest loss, whose class always has weight.
    spread = above.square().mean(1) / above.mean(1).square() - 1
    active = ~(spread <= rho)
    kept = 1 / active.double().mean()
    offset = torch.where(active, loss - loss[active].mean(), 0.0)
    variance = offset.square().mean()
    # mean (K p)^2 = kept + slope^2 * variance must be 1 + rho; if all losses tie, weights are equal.
    slope = ((1 + rho - kept).clamp_min(0) / variance).sqrt() if variance > 0 else 0.0
    return torch.where(active, kept + slope * offset, 0.0).clamp_min(0)
