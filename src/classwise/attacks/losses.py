"""What a gradient attack climbs: per-example losses of the logits. Larger is worse for the model."""

# B batch, K classes

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from classwise.attacks.problem import Problem
from classwise.core.errors import InputError
from classwise.core.fusing import fusible

LossName = Literal["ce", "margin", "dlr", "kl"]
Loss = Callable[[Tensor], Tensor]
"""Logits (B, K) to losses (B,)."""


def log_odds(y: Tensor) -> Loss:
    """log (1 - p_y) / p_y: cross-entropy for an attacker.

    It rises and falls with -log p_y example by example, so every step takes the direction of cross-entropy's
    gradient, but it never goes flat: where p_y rounds to one (a margin of 17 in float32), cross-entropy loses the
    gradient of the true logit, and at a margin of 100 the rest of it.
    """
    return lambda logits: _log_odds(logits, y)


@fusible
def _log_odds(logits: Tensor, y: Tensor) -> Tensor:
    return _others(logits, y).logsumexp(1) - _at(logits, y)


def margin(y: Tensor) -> Loss:
    """max over k ≠ y of z_k, minus z_y: positive exactly where the example is misclassified."""
    return lambda logits: _others(logits, y).amax(1) - _at(logits, y)


def dlr(y: Tensor) -> Loss:
    """The margin over z_(1) - z_(3), the first and third largest logit (Croce & Hein 2020, Eq. 6).

    It does not change when the logits are scaled or shifted. Under four classes it is the plain margin.
    """

    def loss(logits: Tensor) -> Tensor:
        if logits.shape[1] < 4:
            return margin(y)(logits)
        top = logits.topk(3, 1).values
        return margin(y)(logits) / (top[:, 0] - top[:, 2] + TINY)

    return loss


def divergence(reference: Tensor) -> Loss:
    """KL(p(x) ‖ p(x')) from the clean logits (B, K), computed once. Its gradient vanishes at x' = x."""
    log_p = reference.log_softmax(1)
    return lambda logits: _divergence(logits, log_p)


@fusible
def _divergence(logits: Tensor, log_p: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - logits.log_softmax(1))).sum(1)


def targeted_log_odds(aim: Tensor) -> Loss:
    """log p_t / (1 - p_t) of the target t: the attacker's cross-entropy turned round."""
    untargeted = log_odds(aim)
    return lambda logits: -untargeted(logits)


def targeted_margin(y: Tensor, aim: Tensor) -> Loss:
    """z_t - z_y."""
    return lambda logits: _at(logits, aim) - _at(logits, y)


def targeted_dlr(y: Tensor, aim: Tensor) -> Loss:
    """z_t - z_y over z_(1) - (z_(3) + z_(4)) / 2 (Croce & Hein 2020, Eq. 7). Under four classes, z_t - z_y."""

    def loss(logits: Tensor) -> Tensor:
        difference = targeted_margin(y, aim)(logits)
        if logits.shape[1] < 4:
            return difference
        top = logits.topk(4, 1).values
        return difference / (top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + TINY)

    return loss


TINY = 1e-12
"""Keeps a quotient finite where all logits are the same."""


def make_loss(name: LossName, problem: Problem, aim: Tensor | None = None) -> Loss:
    """The named loss for these examples, away from their labels or towards the classes ``aim``."""
    y = problem.y
    if aim is not None:
        if name == "kl":
            raise InputError("loss 'kl' knows no target: use ce, margin or dlr")
        return {"ce": targeted_log_odds(aim), "margin": targeted_margin(y, aim), "dlr": targeted_dlr(y, aim)}[name]
    if name == "kl":
        return divergence(problem.logits(problem.ball.centre))
    return {"ce": log_odds, "margin": margin, "dlr": dlr}[name](y)


def _others(logits: Tensor, y: Tensor) -> Tensor:
    """The logits with the label's out of the running."""
    return logits.scatter(1, y[:, None], -torch.inf)


def _at(logits: Tensor, label: Tensor) -> Tensor:
    return logits.gather(1, label[:, None]).squeeze(1)
