"""Adversarial training in the style of published research code: the reference of ``python -m benchmarks train``.

TRADES (Zhang et al. 2019): min E CE(f(x), y) + beta · KL(p(x) ‖ p(x')), with x' from projected ascent of the same KL;
Madry et al. 2018: min E CE(f(x'), y), with x' from projected ascent of the cross-entropy. Linf only.

Eager float32, with the cost of typical published code: the attack calls ``backward``, which computes the gradients of
all weights at every step and discards them; TRADES computes the natural logits in every attack step and again in the
loss; tensors keep the default layout. The result equals that of ``objectives``.
"""

# B batch, K classes

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classwise.core.threat import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """Settings of the training attack."""

    eps: float
    step_size: float
    steps: int
    start: Start


Loss = Callable[[nn.Module, Tensor, Tensor, Inner, float], Tensor]
"""Model, images, labels, attack and beta to the mean loss of a batch."""


def trades(model: nn.Module, x: Tensor, y: Tensor, inner: Inner, beta: float) -> Tensor:
    """Return the natural cross-entropy plus beta times the divergence."""
    model.eval()
    x_adv = _ascend(model, x, inner, lambda x_adv: _divergence(model(x), model(x_adv)))
    model.train()
    return F.cross_entropy(model(x), y) + beta * _divergence(model(x), model(x_adv))


def madry(model: nn.Module, x: Tensor, y: Tensor, inner: Inner, beta: float) -> Tensor:
    """Return the cross-entropy of attacked images; beta is ignored."""
    model.eval()
    x_adv = _ascend(model, x, inner, lambda x_adv: F.cross_entropy(model(x_adv), y))
    model.train()
    return F.cross_entropy(model(x_adv), y)


LOSSES: Mapping[str, Loss] = {"trades": trades, "madry": madry}
"""By the name of the objective."""


def _ascend(model: nn.Module, x: Tensor, inner: Inner, loss: Callable[[Tensor], Tensor]) -> Tensor:
    noise = {
        "gaussian": lambda: 0.001 * torch.randn_like(x),
        "uniform": lambda: inner.eps * (2 * torch.rand_like(x) - 1),
        "zero": lambda: torch.zeros_like(x),
    }
    x_adv = (x + noise[inner.start]()).clamp(0, 1)
    for _ in range(inner.steps):
        x_adv = x_adv.detach().requires_grad_()
        model.zero_grad()
        loss(x_adv).backward()  # type: ignore[no-untyped-call]
        assert x_adv.grad is not None
        x_adv = x_adv.detach() + inner.step_size * x_adv.grad.sign()
        x_adv = torch.min(torch.max(x_adv, x - inner.eps), x + inner.eps).clamp(0, 1)
    return x_adv.detach()


def _divergence(logits: Tensor, logits_adv: Tensor) -> Tensor:
    """KL(p ‖ p'), averaged over the batch."""
    return F.kl_div(F.log_softmax(logits_adv, dim=1), F.softmax(logits, dim=1), reduction="batchmean")
