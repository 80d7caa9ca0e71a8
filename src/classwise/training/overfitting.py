"""A watch for catastrophic overfitting (Wong et al. 2020, Section 4): training by one step suddenly stops to defend.

Within an epoch the model learns to fool the one step it is trained with, and accuracy under a real attack falls to
nothing while the training loss looks better than ever. The validation attack sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from classwise.config.spec import Number
from classwise.core.errors import InputError
from classwise.core.types import ClassStats

STRONGEST = 16
"""Times the recipe's steps: a model that still collapses does so for another reason."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What counts as a collapse, and what to do about it."""

    drop: Number = 0.2
    """By how much robust validation accuracy, as a fraction, may fall below its best."""
    action: Literal["stop", "back"] = "stop"
    """Stop there; or go back to the best epoch and go on with twice as many steps of the attack, four times at most."""

    def __post_init__(self) -> None:
        if not 0 < self.drop < 1:
            raise InputError(f"drop is a fraction of one, got {self.drop}")

    def collapsed(self, val: ClassStats, best: float) -> bool:
        """Whether a model does so much worse than the best one did."""
        return robust_share(val) < best - self.drop


def robust_share(val: ClassStats) -> float:
    """Robust accuracy over all classes, as a fraction."""
    return float(val.correct_adv.sum() / val.n_adv.sum())
