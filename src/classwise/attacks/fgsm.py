"""The fast gradient sign method (Goodfellow et al. 2015): one step of size eps.

With ``start=uniform`` it is the attack of fast adversarial training (Wong et al. 2020), who step 1.25 · eps.
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
class FGSM(BallAttack):
    """One step of steepest ascent of the cross-entropy."""

    step_size: Number | None = None
    """eps if not given."""
    start: Start = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_size is not None and self.step_size <= 0:
            raise InputError(f"step_size must be positive, got {self.step_size}")

    def perturb(self, forward: Forward, ball: Ball, y: Tensor, noise: Noise) -> Tensor:
        step_size = self.step_size if self.step_size is not None else self.threat.eps
        return PGD(steps=1, step_size=step_size, start=self.start).perturb(forward, ball, y, noise)
