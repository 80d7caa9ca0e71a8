"""What a gradient attack climbs: per-example losses of the logits. Larger is worse for the model."""

# B batch, K classes

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from classwise.attacks.base import Forward

LossName = Literal["ce", "kl", "margin"]
Loss = Callable[[Tensor], Tensor]
"""Logits (B, K) to losses (B,)."""


def cross_entropy(y: Tensor) -> Loss:
    """-log p_y, written as softplus(logsumexp of the other logits - z_y).

    The same number as the usual form, with a gradient that stays right for confident models: where p_y rounds to
    one (a margin of 17 in float32), the usual form loses the gradient of the true logit and with it the direction.
    """

    def loss(logits: Tensor) -> Tensor:
        others = logits.scatter(1, y[:, None], -torch.inf).logsumexp(1)
        return F.softplus(others - logits.gather(1, y[:, None]).squeeze(1))

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
        return cross_entropy(y)
    if name == "margin":
        return margin(y)
    with torch.no_grad():
        return divergence(forward(clean))
