"""Adversarial weight perturbation (Wu et al. 2020): min over w of max over v of L(w + v).

One step of ascent, as long in every layer as a share of its weights: v_l = gamma · ‖w_l‖ · g_l / ‖g_l‖, where g is the
gradient of the batch's loss at w. The gradient that moves w is then taken at w + v.

Deviations
* The authors take the step on a copy of the model, with an optimizer of its own, whose rate the normalisation
  cancels. Here it is the gradient itself.
* Batch-norm statistics are those of the pass at w + v alone, as in the authors' code after their copy is thrown away.
* Layers with one dimension, biases and batch norms, are left alone, as in the authors' code.
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
    """How far weights are pushed against the loss."""

    gamma: Number = 0.005
    """Length of the push, relative to the weights of each layer. The paper has 0.005 with TRADES, 0.01 with Madry."""

    begin: int = 1
    """The first epoch that has it. The authors' code begins with the tenth over TRADES, with the first over Madry."""

    def __post_init__(self) -> None:
        if self.gamma <= 0:
            raise InputError(f"gamma must be positive, got {self.gamma}")
        if self.begin < 1:
            raise InputError(f"begin counts epochs from 1, got {self.begin}")

    @contextmanager
    def perturbed(
        self, model: nn.Module, loss_of: Callable[[], Tensor], group: ProcessGroup = SINGLE
    ) -> Iterator[None]:
        """Within it the weights stand where the loss of the batch is worse; afterwards where they were.

        The losses of a group's processes add up to that of the batch.
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
