"""Adversarial weight perturbation (Wu et al. 2020): min over w of max over v of L(w + v).

v is one step of gradient ascent, scaled per layer: v_l = gamma · ‖w_l‖ · g_l / ‖g_l‖, where g is the gradient of the
batch's loss at w. The update of w then uses the gradient at w + v.

Deviations
* The authors take the step on a copy of the model with a separate optimizer, whose learning rate cancels in the
  normalization. Here the step is the gradient itself.
* Batch-norm statistics come from the pass at w + v only, as in the authors' code, which discards the copy.
* One-dimensional parameters (biases and batch norms) are not perturbed, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.training.distributed import SINGLE, ProcessGroup


@dataclass(frozen=True, kw_only=True)
class WeightPerturbation:
    """Settings of adversarial weight perturbation."""

    gamma: Number = 0.005
    """Size relative to the weights of each layer. The paper uses 0.005 with TRADES and 0.01 with Madry."""

    begin: int = 1
    """The first perturbed epoch. The authors' code starts at epoch 10 with TRADES and at epoch 1 with Madry."""

    def __post_init__(self) -> None:
        if self.gamma <= 0:
            raise InputError(f"gamma must be positive, got {self.gamma}")
        if self.begin < 1:
            raise InputError(f"begin must be at least 1, got {self.begin}")

    @contextmanager
    def perturbed(
        self, model: nn.Module, loss_of: Callable[[], Tensor], group: ProcessGroup = SINGLE
    ) -> Iterator[None]:
        """Perturb the weights against the loss of the batch within the block.

        The losses of a group's processes sum to the loss of the batch.
        """
        weights = [weight for weight in model.parameters() if weight.requires_grad and weight.dim() > 1]
        buffers = list(model.buffers())
        before = [tensor.detach().clone() for tensor in (*weights, *buffers)]
        gradients = torch.autograd.grad(loss_of(), weights)
        group.sum(gradients)
        with torch.no_grad():
            for buffer, kept in zip(buffers, before[len(weights) :], strict=True):
                buffer.copy_(kept)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.add_(gradient * (self.gamma * weight.norm() / gradient.norm().clamp_min(1e-12)))
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, kept in zip(weights, before, strict=False):
                    weight.copy_(kept)
