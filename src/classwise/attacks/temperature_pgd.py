"""Temperature-PGD (Tian et al., KDD 2021, Eq. 3-4): PGD on CE(softmax(z / T), y).

Dividing the logits by a temperature below 1 inside the attack's loss sharpens the output of a model that answers
with smooth probabilities, where plain cross-entropy barely moves. The model's own answer is untouched.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from classwise.attacks.base import BallAttack, Forward
from classwise.attacks.pgd import PGD
from classwise.errors import InputError
from classwise.noise import Noise
from classwise.spec import Number
from classwise.threat import Ball, Start


@dataclass(frozen=True, kw_only=True)
class TemperaturePGD(BallAttack):
    """PGD that multiplies the logits by 1/T in its loss."""

    inv_t: Number = 5.0
    """1/T; the paper tries 2, 5, 10 and 50."""
    steps: int = 20
    step_size: Number | None = None
    start: Start = "uniform"
    restarts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.inv_t <= 1e6:
            raise InputError(f"inv_t must be positive and at most 1e6, got {self.inv_t}")
        self._pgd()

    def _pgd(self) -> PGD:
        return PGD(
            eps=self.eps,
            norm=self.norm,
            steps=self.steps,
            step_size=self.step_size,
            start=self.start,
            restarts=self.restarts,
        )

    def perturb(self, forward: Forward, ball: Ball, y: Tensor, noise: Noise) -> Tensor:
        return self._pgd().perturb(lambda x: self.inv_t * forward(x), ball, y, noise)
