"""Free adversarial training (Shafahi et al. 2019, Algorithm 1): one backward pass updates the weights and the images.

Each batch is trained on ``replays`` times in a row. The gradient with respect to the images, computed with that of the
weights, moves them by a step in the ball for the next replay. An epoch costs ``replays`` forward and backward passes
per image; there is no separate attack.

Deviations
* Each batch starts at a new point of the ball; the paper continues with the perturbation of the previous batch, which
  belongs to other images.
* ``epochs`` in a recipe are passes over the data with all their replays; the paper divides their number by ``replays``.
"""

# B batch

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from classwise.attacks import PGD
from classwise.core.errors import InputError
from classwise.core.streams import Randomness, noise_of
from classwise.core.types import ClassControls, LossTerms
from classwise.objectives.madry import Madry


@dataclass(frozen=True, kw_only=True)
class Free(Madry):
    """Free adversarial training: images and weights are updated by the same backward pass, several times per batch.

    Each replay updates batch-norm statistics once.
    """

    paper: ClassVar[str] = "Shafahi et al. 2019"

    replays: int = 4
    """Number of updates on each batch."""
    attack: PGD = PGD(steps=1)
    """Gives the ball, the start and the step size, whose default is the radius, as in the paper."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replays < 2:
            raise InputError(f"replays must be at least 2 for images to be perturbed, got {self.replays}")

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, controls: ClassControls, *, generator: Randomness = None
    ) -> LossTerms:
        """Return the loss of images that are updated as often as in training, with fixed weights."""
        x_adv = self.perturb(model, x, y, controls, generator=generator)
        for _ in range(self.replays - 1):
            with torch.enable_grad():
                loss = self.terms(model, x, x_adv, y).adv.sum()
            (x_adv.grad,) = torch.autograd.grad(loss, x_adv)
            x_adv = self.again(x, x_adv, y, controls)
        return self.terms(model, x, x_adv.detach(), y)

    def perturb(
        self, model: nn.Module, x: Tensor, y: Tensor, controls: ClassControls, *, generator: Randomness = None
    ) -> Tensor:
        ball = self.attack.threat.ball(x, controls.eps_scale[y])
        return ball.start(self.attack.start, noise_of(generator)).requires_grad_()

    def again(self, x: Tensor, x_adv: Tensor, y: Tensor, controls: ClassControls) -> Tensor:
        assert x_adv.grad is not None
        size = self.attack.step_size if self.attack.step_size is not None else self.attack.threat.eps
        ball = self.attack.threat.ball(x, controls.eps_scale[y])
        return ball.step(x_adv.detach(), x_adv.grad, size).requires_grad_()
