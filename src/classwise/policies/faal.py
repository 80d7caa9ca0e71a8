"""FAAL, fairness-aware adversarial learning (Zhang et al., CVPR 2024): the worst-case class distribution of each batch.

Let m_k be the mean margin loss max_{j != y} z_j - z_y over the adversarial examples of class k in a batch. The batch
loss is weighted by the distribution that maximizes sum_k p_k m_k subject to sum_k p_k = 1 and KL(u || p) <= radius,
with u uniform.

If the m_k differ, the constraint is active. The stationary point is p_k = lambda * u_k / (mu - m_k) with mu > max m,
and lambda follows from sum_k p_k = 1, which leaves one equation in mu:

    KL(u || p) = sum_k u_k log(mu - m_k) + log sum_k u_k / (mu - m_k) = radius.

Its left side decreases from infinity to zero. It is invariant to shifting and scaling the m_k, so it is solved for
theta = log((mu - max m) / (max m - min m)). The largest and the smallest of the n values 1 / (mu - m_k) then differ by
the factor e^L = 1 + e^-theta. So KL <= L, and KL >= (2 / n) log cosh(L / 2), with equality if all others are at the
mean of these two. The root therefore lies between -(n * radius + log 4) and -log(e^radius - 1).

Deviations
* A class counts by its weight alone. The authors maximize sum_i p_{y_i} m_{y_i} over examples, in which a class also
  counts by its frequency in the batch.
* A class absent from the batch is ignored; the authors give it a margin of -1 and a share of the distribution.
* The root is found on the device by repeated section, without a general solver and without waiting for the host.
* Fine-tuning, its length, its learning rate and adversarial weight perturbation are settings of the recipe.
"""

# B batch, K classes, S sections

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.types import ClassControls, LossTerms, Policy

SECTIONS, ROUNDS = 64, 10
"""Sections per round, and rounds of the search. Each round keeps one section; 2^60 exceeds float64 precision."""


@dataclass(kw_only=True)
class FAAL(Policy):
    """Weight the classes of each batch by the worst-case distribution near the uniform one."""

    paper: ClassVar[str] = "Zhang et al. 2024"
    turns: ClassVar[tuple[str, ...]] = ("weight_nat", "weight_adv")
    uses: ClassVar[tuple[str, ...]] = ("batch.logits_adv",)
    fine_tunes: ClassVar[bool] = True

    radius: Number = 0.5
    """Largest divergence from the uniform distribution, KL(u || p)."""

    def __post_init__(self) -> None:
        if self.radius <= 0:
            raise InputError(f"radius must be positive, got {self.radius}")

    def on_batch(self, terms: LossTerms, y: Tensor) -> ClassControls:
        if terms.logits_adv is None:
            raise InputError("faal needs adversarial images: choose an objective with an attack")
        logits = terms.logits_adv.detach().double()
        labels = torch.arange(logits.shape[1], device=y.device)
        own = y[:, None] == labels
        margins = logits.masked_fill(own, -torch.inf).amax(1) - logits.gather(1, y[:, None]).squeeze(1)
        count = own.sum(0)
        means = (own * margins[:, None]).sum(0) / count.clamp_min(1)
        present = count > 0
        weights = torch.where(present, present.sum() * worst_mixture(means, present, self.radius), 1.0).float()
        ones = torch.ones_like(weights)
        return ClassControls(weight_nat=weights, weight_adv=weights, eps_scale=ones, beta_scale=ones)


def worst_mixture(means: Tensor, present: Tensor, radius: float) -> Tensor:
    """Return the p (K,) that maximizes sum_k p_k m_k within KL(u || p) <= radius over the classes present, else 0."""
    n = present.sum().to(means.dtype)
    highest = means.masked_fill(~present, -torch.inf).amax()
    gaps = (highest - means).masked_fill(~present, 0)
    # If all means are equal, all gaps are zero, and every theta gives the uniform distribution.
    log_gaps = (gaps / gaps.amax().clamp_min(torch.finfo(gaps.dtype).tiny)).log()
    log_u = torch.where(present, -n.log(), -torch.inf)
    steps = torch.linspace(0, 1, SECTIONS + 1, dtype=means.dtype, device=means.device)
    low = -(n * radius + math.log(4))
    high = torch.full_like(low, -radius - math.log(-math.expm1(-radius)))
    for _ in range(ROUNDS):
        theta = torch.lerp(low, high, steps)
        distances = torch.logaddexp(theta[:, None], log_gaps)  # (S + 1, K) log of (mu - m_k), in units of the spread
        kl = (distances * present).sum(1) / n + (log_u - distances).logsumexp(1)
        beyond = kl > radius
        low, high = torch.where(beyond, theta, low).amax(), torch.where(beyond, high, theta).amin()
    return (log_u - torch.logaddexp(high, log_gaps)).softmax(0)
