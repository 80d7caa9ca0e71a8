"""Catastrophic overfitting of training with a one-step attack (Wong et al. 2020, Section 4), and the guard against it.

Within an epoch the model learns to fool the single step it is trained with: accuracy under a stronger attack falls to
zero while the training loss improves. The validation attack detects it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.types import ClassStats

MAX_STEP_FACTOR = 16
"""Maximum multiple of the recipe's attack steps. A collapse at this number of steps has another cause."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Definition of a collapse of robust accuracy, and the reaction to it."""

    drop: Number = 0.2
    """Largest accepted drop of robust validation accuracy below its best value, as a fraction."""
    action: Literal["stop", "back"] = "stop"
    """``stop`` training, or go ``back`` to the best epoch and double the steps of the attack, at most four times."""

    def __post_init__(self) -> None:
        if not 0 < self.drop < 1:
            raise InputError(f"drop must be a fraction between 0 and 1, got {self.drop}")

    def collapsed(self, robust: float, best: float) -> bool:
        """Return whether robust accuracy has fallen too far below its best."""
        return robust < best - self.drop


def robust_share(val: ClassStats) -> float:
    """Return robust accuracy over all classes, as a fraction."""
    return float(val.correct_adv.sum() / val.n_adv.sum())
