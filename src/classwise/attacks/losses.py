"""Losses that gradient attacks maximize: per-example functions of the logits. Larger is worse for the model."""

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
TINY = 1e-12
"""Keeps a quotient finite where all logits are equal."""


def log_odds(y: Tensor) -> Loss:
    """Log odds against the label, log((1 - p_y) / p_y): cross-entropy without its flat region.

    It is a strictly increasing function of -log p_y, so the gradients of both have the same direction. But where p_y
    rounds to one (a margin of 17 in float32) cross-entropy loses the gradient of the true logit, and at a margin of 100
    all of it; the log odds keep theirs.
    """
    return lambda logits: _log_odds(logits, y)


@fusible
def _log_odds(logits: Tensor, y: Tensor) -> Tensor:
    return _others(logits, y).logsumexp(1) - _at(logits, y)


def margin(y: Tensor) -> Loss:
    """Margin of the best wrong class, max_{k != y} z_k - z_y: positive exactly where the example is misclassified."""
    return lambda logits: _others(logits, y).amax(1) - _at(logits, y)


def dlr(y: Tensor) -> Loss:
    """Difference of logits ratio: the margin over z_(1) - z_(3), the largest and third largest logit.

    It is invariant to scaling and shifting the logits (Croce & Hein 2020, Eq. 6). With fewer than four classes it is
    the margin.
    """

    def loss(logits: Tensor) -> Tensor:
        if logits.shape[1] < 4:
            return margin(y)(logits)
        top = logits.topk(3, 1).values
        return margin(y)(logits) / (top[:, 0] - top[:, 2] + TINY)

    return loss


def divergence(reference: Tensor) -> Loss:
    """Kullback-Leibler divergence KL(p(x) || p(x')) from reference logits (B, K). Its gradient is zero at x' = x."""
    log_p = reference.log_softmax(1)
    return lambda logits: _divergence(logits, log_p)


@fusible
def _divergence(logits: Tensor, log_p: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - logits.log_softmax(1))).sum(1)


def targeted_log_odds(targets: Tensor) -> Loss:
    """Log odds of the target t, log(p_t / (1 - p_t))."""
    untargeted = log_odds(targets)
    return lambda logits: -untargeted(logits)


def targeted_margin(y: Tensor, targets: Tensor) -> Loss:
    """Margin of the target t over the label, z_t - z_y."""
    return lambda logits: _at(logits, targets) - _at(logits, y)


def targeted_dlr(y: Tensor, targets: Tensor) -> Loss:
    """Targeted difference of logits ratio: z_t - z_y over z_(1) - (z_(3) + z_(4)) / 2 (Croce & Hein 2020, Eq. 7).

    With fewer than four classes it is z_t - z_y.
    """

    def loss(logits: Tensor) -> Tensor:
        difference = targeted_margin(y, targets)(logits)
        if logits.shape[1] < 4:
            return difference
        top = logits.topk(4, 1).values
        return difference / (top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + TINY)

    return loss


def make_loss(name: LossName, problem: Problem) -> Loss:
    """Return the named loss for a batch: towards its targets if it has any, else away from the labels."""
    y, targets = problem.y, problem.targets
    if targets is not None:
        if name == "kl":
            raise InputError("loss 'kl' does not support targets: use ce, margin or dlr")
        return {
            "ce": targeted_log_odds(targets),
            "margin": targeted_margin(y, targets),
            "dlr": targeted_dlr(y, targets),
        }[name]
    if name == "kl":
        return divergence(problem.logits(problem.ball.center))
    return {"ce": log_odds, "margin": margin, "dlr": dlr}[name](y)


def _others(logits: Tensor, y: Tensor) -> Tensor:
    """Return the logits with that of the label set to minus infinity."""
    return logits.scatter(1, y[:, None], -torch.inf)


def _at(logits: Tensor, label: Tensor) -> Tensor:
    return logits.gather(1, label[:, None]).squeeze(1)
