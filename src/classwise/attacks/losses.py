"""What a gradient attack climbs: per-example losses of the logits. Larger is worse for the model."""

# B batch, K classes

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from classwise.attacks.base import Forward

LossName = Literal["ce", "kl", "margin"]
Loss = Callable[[Tensor], Tensor]
"""Logits (B, K) to losses (B,)."""


def log_odds(y: Tensor) -> Loss:
    """log (1 - p_y) / p_y: cross-entropy for an attacker.

    It rises and falls with -log p_y example by example, so every step takes the direction of cross-entropy's
    gradient, but it never goes flat: where p_y rounds to one (a margin of 17 in float32), cross-entropy loses the
    gradient of the true logit, and at a margin of 100 the rest of it.
    """

    def loss(logits: Tensor) -> Tensor:
        others = logits.scatter(1, y[:, None], -torch.inf).logsumexp(1)
        return others - logits.gather(1, y[:, None]).squeeze(1)

    return loss


def margin(y: Tensor) -> Loss:
    """max over k ≠ y of z_k, minus z_y: positive exactly where the example is misclassified."""

    def loss(logits: Tensor) -> Tensor:
        rival = logits.scatter(1, y[:, None], -torch.inf).amax(1)
        return rival - logits.gather(1, y[:, None]).squeeze(1)

    return loss


def divergence(reference: Tensor) -> Loss:
    """KL(p(x) ‖ p(x')) from the clean logits (B, K), computed once. Its gradient vanishes at x' = x."""
    log_p = reference.log_softmax(1)
    return lambda logits: (log_p.exp() * (log_p - logits.log_softmax(1))).sum(1)


def make_loss(name: LossName, forward: Forward, clean: Tensor, y: Tensor) -> Loss:
    """The named loss for these images and labels."""
    if name == "ce":
        return log_odds(y)
    if name == "margin":
        return margin(y)
    with torch.no_grad():
        return divergence(forward(clean))
